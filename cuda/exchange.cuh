// Reading what other instructions write: words of a row, tagged or not, several at a time, and the
// only place where a warp waits for a tag.
#pragma once

#include "cuda/tensor.cuh"

namespace megavm {

// Stop this warp because a tagged word does not carry the tag it waits for.
[[noreturn]] __device__ __forceinline__ void stop_at_tag(OperandWord operand, uint32_t row,
                                                         uint32_t word, uint32_t found,
                                                         uint32_t wanted) {
  stop(FaultKind::kTag, operand, row, word, found, wanted);
  __builtin_unreachable();
}

// Wait until a tagged word carries `tag`, and return its value.
__device__ __forceinline__ uint32_t read_tagged(uint64_t address, uint32_t tag, OperandWord operand,
                                                uint32_t row, uint32_t word) {
  ptx::Words2 found = ptx::load_relaxed_tagged(address);
  while (found.y != tag) {
    if (__builtin_expect(is_stopping(), 0)) stop_at_tag(operand, row, word, found.y, tag);
    found = ptx::load_relaxed_tagged(address);
  }
  return found.x;
}

// An element that other instructions may write, as float32. Waits for the tag if it is tagged.
__device__ __forceinline__ float read_element(const Tensor& t, uint32_t row, uint32_t column,
                                              uint32_t tag, OperandWord operand) {
  if (is_tagged(t)) {
    const uint32_t per_word = 4 / element_bytes(t);
    const uint32_t word =
        read_tagged(word_at(t, row, column), tag, operand, row, column / per_word);
    if (is_f32(t)) return __uint_as_float(word);
    return column % 2 ? ptx::high_bf16(word) : ptx::low_bf16(word);
  }
  const uint64_t address = element_at(t, row, column);
  if (is_f32(t)) return __uint_as_float(ptx::load_relaxed1(address));
  return ptx::from_bf16(ptx::load_relaxed_half(address));
}

// A row that a warp reads, and what a fault says of its words. See Loaded::row_of.
struct SourceRow {
  uint64_t address;  // address of the first element
  uint32_t tag;      // the tag for which the reader waits
  OperandWord operand;
  uint32_t row;
};

// kColumns neighbouring elements of a row, as loaded from memory. kTagged: they may be tagged.
// Where this differs between tensors of a program, callers pass `tagged`.
template <bool kF32, bool kTagged, uint32_t kColumns>
struct Loaded {
  static constexpr bool kMayBeTagged = kTagged;
  static constexpr uint32_t kWords = kColumns * (kF32 ? 4 : 2) / 4;
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0);
  static constexpr uint32_t kRegisters = kWords * (kTagged ? 2 : 1);
  static constexpr uint32_t kFours = ceil_div(kRegisters, 4);
  ptx::Words4 raw[kFours];  // in the order of memory: each tag follows its value

  static constexpr uint32_t column_bytes(bool tagged = kTagged) {
    return (kF32 ? 4 : 2) * (kTagged && tagged ? 2 : 1);
  }
  static __device__ __forceinline__ SourceRow row_of(const Tensor& t, uint32_t row, uint32_t tag,
                                                     OperandWord operand, bool tagged = kTagged) {
    return {base_of(t) + uint64_t{row} * t.columns * column_bytes(tagged), tag, operand, row};
  }

  __device__ __forceinline__ void load(uint64_t address, bool tagged = kTagged) {
    if (kTagged && tagged) {
      if constexpr (kWords == 1) {
        const ptx::Words2 word = ptx::load_relaxed_tagged(address);
        raw[0].x = word.x, raw[0].y = word.y;
      } else {
#pragma unroll
        for (uint32_t i = 0; i < kWords; i += 2)
          raw[i / 2] = ptx::load_relaxed_tagged2(address + 8 * i);
      }
    } else if constexpr (kWords == 1) {
      raw[0].x = ptx::load_relaxed1(address);
    } else if constexpr (kWords == 2) {
      const ptx::Words2 words = ptx::load_relaxed2(address);
      raw[0].x = words.x, raw[0].y = words.y;
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kWords; i += 4) raw[i / 4] = ptx::load_relaxed4(address + 4 * i);
    }
  }

  // Whether all words carry the tag; words that are not tagged count as if they did.
  // NOTE: selects, because the compiler makes branches of a conjunction. A load behind such a
  // branch waits for the loads before it.
  __device__ __forceinline__ bool has(uint32_t tag) const {
    if constexpr (!kTagged) return true;
    uint32_t found = tag;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i)
      found = found == tag ? (i % 2 ? raw[i / 2].w : raw[i / 2].y) : found;
    return found == tag;
  }

  __device__ __forceinline__ uint32_t word(uint32_t i, bool tagged = kTagged) const {
    if (kTagged && tagged) return i % 2 ? raw[i / 2].z : raw[i / 2].x;
    const ptx::Words4& four = raw[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }

  __device__ __forceinline__ float value(uint32_t i, bool tagged = kTagged) const {
    if constexpr (kF32) return __uint_as_float(word(i, tagged));
    return i % 2 ? ptx::high_bf16(word(i / 2, tagged)) : ptx::low_bf16(word(i / 2, tagged));
  }

  // Called when the worker is stopping: stop at the first of these words that is missing, if any.
  static __device__ __forceinline__ void find_missing(const SourceRow& from, uint32_t column) {
#pragma unroll 1
    for (uint32_t i = 0; i < kWords; ++i) {
      const uint64_t at = from.address + uint64_t{column} * column_bytes() + 8 * i;
      const uint32_t found = ptx::load_relaxed_tagged(at).y;
      if (found != from.tag)
        stop_at_tag(from.operand, from.row, column * kWords / kColumns + i, found, from.tag);
    }
  }
};

// Wait for all words that a lane has in flight. `load` issues the loads, then `missing` checks the
// tags: it returns the number of a group of words that is incomplete, or kNone. The two alternate
// until all words have arrived. When the worker is stopping, `find` stops at a missing word of the
// group. kAsked: the caller has issued the first loads.
// NOTE: no tag may be checked before all loads are issued. So `missing` returns a number: ptxas
// needs a predicate for each term of a conjunction, runs out of them, and then checks some tags
// between the loads.
template <bool kAsked = false, class Load, class Missing, class Find>
__device__ __forceinline__ void await(Load&& load, Missing&& missing, Find&& find) {
  while (true) {
    if constexpr (!kAsked) load();
    const uint32_t number = missing();
    if (number == kNone) return;
    if (__builtin_expect(is_stopping(), 0)) find(number);
    if constexpr (kAsked) load();
  }
}

// The same for a batch: words[i] begins at column(i) of the row, if exists(i). If kAsked, only the
// words that are missing are loaded again.
template <bool kAsked = false, class Words, uint32_t kBatch, class Exists, class Column>
__device__ __forceinline__ void await(const SourceRow& from, Words (&words)[kBatch],
                                      Exists&& exists, Column&& column,
                                      bool tagged = Words::kMayBeTagged) {
  await<kAsked>(
      [&] {
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          if (exists(i) && (!kAsked || !words[i].has(from.tag)))
            words[i].load(from.address + uint64_t{column(i)} * Words::column_bytes(tagged), tagged);
      },
      [&] {
        uint32_t missing = kNone;
        if (Words::kMayBeTagged && tagged)
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
            if (exists(i) && !words[i].has(from.tag)) missing = i;
        return missing;
      },
      [&](uint32_t missing) { Words::find_missing(from, column(missing)); });
}

}  // namespace megavm
