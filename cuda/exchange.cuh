// Reading what other instructions write: words of a row, tagged or not, several at a time, and the
// only place where a warp waits for one.
#pragma once

#include "cuda/tensor.cuh"

namespace megavm {

// Stop this warp because a word for which it waits is empty.
[[noreturn]] __device__ __forceinline__ void stop_at_word(OperandWord operand, uint32_t row,
                                                          uint32_t word) {
  stop(FaultKind::kWord, operand, row, word, 0, 0);
  __builtin_unreachable();
}

// Wait until a word of a tagged tensor is there, and return its value.
__device__ __forceinline__ uint32_t read_word(uint64_t address, OperandWord operand, uint32_t row,
                                              uint32_t word) {
  uint32_t found = ptx::load_relaxed1(address);
  while (found == kEmptyWord) {
    if (__builtin_expect(is_stopping(), 0)) stop_at_word(operand, row, word);
    found = ptx::load_relaxed1(address);
  }
  return found;
}

// An element that other instructions may write, as float32. Waits for it if it is tagged.
__device__ __forceinline__ float read_element(const Tensor& t, uint32_t row, uint32_t column,
                                              OperandWord operand) {
  if (is_tagged(t)) {
    const uint32_t per_word = 4 / element_bytes(t);
    const uint32_t word = read_word(word_at(t, row, column), operand, row, column / per_word);
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
  OperandWord operand;
  uint32_t row;
};

// kColumns neighbouring elements of a row, as loaded from memory, tagged or not.
template <bool kF32, uint32_t kColumns>
struct Loaded {
  static constexpr uint32_t kColumnBytes = kF32 ? 4 : 2;
  static constexpr uint32_t kWords = kColumns * kColumnBytes / 4;
  static_assert(kWords == 1 || kWords == 2 || kWords % 4 == 0);
  static constexpr uint32_t kFours = ceil_div(kWords, 4);
  ptx::Words4 raw[kFours];

  static __device__ __forceinline__ SourceRow row_of(const Tensor& t, uint32_t row,
                                                     OperandWord operand) {
    return {base_of(t) + uint64_t{row} * t.columns * kColumnBytes, operand, row};
  }

  __device__ __forceinline__ void load(uint64_t address) {
    if constexpr (kWords == 1) {
      raw[0].x = ptx::load_relaxed1(address);
    } else if constexpr (kWords == 2) {
      const ptx::Words2 words = ptx::load_relaxed2(address);
      raw[0].x = words.x, raw[0].y = words.y;
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kWords; i += 4) raw[i / 4] = ptx::load_relaxed4(address + 4 * i);
    }
  }

  // Make all words empty.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (ptx::Words4& four : raw) {
      const uint32_t empty = ptx::zero() - 1;
      static_assert(kEmptyWord == ~0u);
      four = {empty, empty, empty, empty};
    }
  }

  // Whether no word is empty.
  // NOTE: a maximum, because the compiler makes branches of a conjunction. A load behind such a
  // branch waits for the loads before it.
  __device__ __forceinline__ bool is_there() const {
    static_assert(kEmptyWord == ~0u);
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) largest = max_of(largest, word(i));
    return largest != kEmptyWord;
  }

  __device__ __forceinline__ uint32_t word(uint32_t i) const {
    const ptx::Words4& four = raw[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }

  __device__ __forceinline__ float value(uint32_t i) const {
    if constexpr (kF32) return __uint_as_float(word(i));
    return i % 2 ? ptx::high_bf16(word(i / 2)) : ptx::low_bf16(word(i / 2));
  }

  // Called when the worker is stopping: stop at the first of these words that is empty, if any.
  static __device__ __forceinline__ void find_missing(const SourceRow& from, uint32_t column) {
#pragma unroll 1
    for (uint32_t i = 0; i < kWords; ++i)
      if (ptx::load_relaxed1(from.address + uint64_t{column} * kColumnBytes + 4 * i) == kEmptyWord)
        stop_at_word(from.operand, from.row, column * kWords / kColumns + i);
  }
};

// Wait for all words that a lane has in flight. `load` issues the loads, then `missing` checks the
// words: it returns the number of a group of words that is incomplete, or kNone. The two alternate
// until all words have arrived. When the worker is stopping, `find` stops at a missing word of the
// group. kAsked: the caller has issued the first loads.
// NOTE: no word may be checked before all loads are issued. So `missing` returns a number: ptxas
// needs a predicate for each term of a conjunction, runs out of them, and then checks some
// words between the loads.
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

// The same for a batch: words[i] begins at column(i) of the row, if exists(i); `tagged`: of a
// tensor that is tagged. If kAsked, only the words that are missing are loaded again.
template <bool kAsked = false, class Words, uint32_t kBatch, class Exists, class Column>
__device__ __forceinline__ void await(const SourceRow& from, Words (&words)[kBatch],
                                      Exists&& exists, Column&& column, bool tagged) {
  await<kAsked>(
      [&] {
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          if (exists(i) && (!kAsked || !words[i].is_there()))
            words[i].load(from.address + uint64_t{column(i)} * Words::kColumnBytes);
      },
      [&] {
        uint32_t missing = kNone;
        if (tagged)
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
            if (exists(i) && !words[i].is_there()) missing = i;
        return missing;
      },
      [&](uint32_t missing) { Words::find_missing(from, column(missing)); });
}

}  // namespace megavm
