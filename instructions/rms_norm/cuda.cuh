#pragma once

#include "cuda/pipelines/rows.cuh"

namespace megavm {

// One warp computes a row. When there are fewer rows than warps, several warps share a row: each
// sums the squares of the whole row and stores its share of the result.
template <>
struct Kernel<RmsNorm> : NoPages {
  static constexpr uint32_t kBatch = 4;  // pairs of columns that a lane has in flight

  // Two neighbouring elements, the first in an even column, as loaded from memory.
  template <bool kF32, bool kTagged>
  struct Raw {
    ptx::Words4 words;

    __device__ __forceinline__ void load(const Tensor& x, uint32_t row, uint32_t column) {
      if constexpr (kTagged && kF32) {
        words = ptx::load_relaxed_tagged2(word_at(x, row, column));
      } else if constexpr (kTagged) {
        const ptx::Words2 w = ptx::load_relaxed_tagged(word_at(x, row, column));
        words.x = w.x, words.y = w.y;
      } else if constexpr (kF32) {
        const ptx::Words2 w = ptx::load_relaxed2(element_at(x, row, column));
        words.x = w.x, words.z = w.y;
      } else {
        words.x = ptx::load_relaxed1(element_at(x, row, column));
      }
    }
    // `tag` if all words carry it; else a tag that differs.
    __device__ __forceinline__ uint32_t check(uint32_t tag) const {
      if constexpr (!kTagged) return tag;
      if constexpr (kF32) return words.y == tag ? words.w : words.y;
      return words.y;
    }
    __device__ __forceinline__ float first() const {
      return kF32 ? __uint_as_float(words.x) : ptx::low_bf16(words.x);
    }
    __device__ __forceinline__ float second() const {
      return kF32 ? __uint_as_float(words.z) : ptx::high_bf16(words.x);
    }
  };

  // Call use(column, first, second) for the pairs `begin`, begin + kLanes, ... below `end` of a
  // row, as soon as they have arrived.
  template <bool kF32, bool kTagged, class Use>
  static __device__ __forceinline__ void each_pair(const Operands<RmsNorm>& in, uint32_t row,
                                                   uint32_t begin, uint32_t end, Use&& use) {
    const Tensor& x = in[&RmsNorm::x];
#pragma unroll 1
    for (uint32_t pair = begin; pair < end; pair += kBatch * kLanes) {
      Raw<kF32, kTagged> raw[kBatch] = {};
      while (true) {
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          if (pair + i * kLanes < end) raw[i].load(x, row, (pair + i * kLanes) * 2);
        uint32_t found = in.tag(), wrong = 0;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (pair + i * kLanes >= end || raw[i].check(in.tag()) == in.tag()) continue;
          found = raw[i].check(in.tag());
          wrong = pair + i * kLanes;
        }
        if (found == in.tag()) break;
        if (is_stopping())
          stop_at_tag(in.word(&RmsNorm::x), row, kF32 ? wrong * 2 : wrong, found, in.tag());
      }
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i)
        if (pair + i * kLanes < end) use((pair + i * kLanes) * 2, raw[i].first(), raw[i].second());
    }
  }

  static __device__ __forceinline__ float scale_of(const Operands<RmsNorm>& in, float squares) {
#pragma unroll
    for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2)
      squares += __shfl_xor_sync(~0u, squares, offset);
    const float mean = squares / static_cast<float>(in[&RmsNorm::x].columns);
    return 1.0f / sqrtf(mean + in.inst.eps);
  }

  static __device__ __forceinline__ float gain(const Operands<RmsNorm>& in, uint32_t column) {
    // The gain is a vector: its elements are contiguous, whatever its shape.
    const Tensor& gain = in[&RmsNorm::gain];
    const uint64_t address = base_of(gain) + uint64_t{column} * element_bytes(gain);
    if (is_f32(gain)) return __uint_as_float(ptx::load_constant(address));
    return ptx::from_bf16(ptx::load_constant_half(address));
  }

  // This warp's share of a row of even width.
  template <bool kF32, bool kTagged>
  static __device__ __forceinline__ void even_row(const Operands<RmsNorm>& in, uint32_t row,
                                                  uint32_t part, uint32_t parts) {
    const uint32_t pairs = in[&RmsNorm::x].columns / 2;
    float squares = 0.0f;
    each_pair<kF32, kTagged>(in, row, lane_index(), pairs, [&](uint32_t, float x, float y) {
      squares = fmaf(x, x, squares);
      squares = fmaf(y, y, squares);
    });
    const float scale = scale_of(in, squares);
    const uint32_t size = ceil_div(pairs, parts), begin = part * size;
    each_pair<kF32, kTagged>(in, row, begin + lane_index(), min_of(begin + size, pairs),
                             [&](uint32_t column, float x, float y) {
                               write_pair(in[&RmsNorm::out], row, column,
                                          x * scale * gain(in, column),
                                          y * scale * gain(in, column + 1), true, in.out_tag());
                             });
  }

  // This warp's share of a row, element by element. A tagged row of odd width is float32.
  static __device__ __forceinline__ void odd_row(const Operands<RmsNorm>& in, uint32_t row,
                                                 uint32_t part, uint32_t parts) {
    const Tensor& x = in[&RmsNorm::x];
    const uint32_t k = x.columns;
    float squares = 0.0f;
#pragma unroll 1
    for (uint32_t c = lane_index(); c < k; c += kLanes) {
      const float value = read_element(x, row, c, in.tag(), in.word(&RmsNorm::x));
      squares = fmaf(value, value, squares);
    }
    const float scale = scale_of(in, squares);
#pragma unroll 1
    for (uint32_t c = part * kLanes + lane_index(); c < k; c += parts * kLanes) {
      const float value = read_element(x, row, c, in.tag(), in.word(&RmsNorm::x));
      write_element(in[&RmsNorm::out], row, c, value * scale * gain(in, c), in.out_tag());
    }
  }

  static __device__ __forceinline__ void consume(const Operands<RmsNorm>& in, Consumer& consumer) {
    const RmsNorm& inst = in.inst;
    const Tensor& x = in[&RmsNorm::x];
    const uint32_t live = live_end(in, &RmsNorm::row_count, inst.row_begin, inst.row_end);
    const uint32_t rows = live - inst.row_begin;
    const uint32_t parts = rows == 0 ? 1 : max_of(1, kNumConsumers / rows);
    const uint32_t part = consumer.warp() % parts;
    const uint32_t step = kNumConsumers / parts;
    consumer.wait_ready();
#pragma unroll 1
    for (uint32_t row = inst.row_begin + consumer.warp() / parts; row < live; row += step) {
      if (x.columns % 2)
        odd_row(in, row, part, parts);
      else if (is_f32(x) && is_tagged(x))
        even_row<true, true>(in, row, part, parts);
      else if (is_f32(x))
        even_row<true, false>(in, row, part, parts);
      else if (is_tagged(x))
        even_row<false, true>(in, row, part, parts);
      else
        even_row<false, false>(in, row, part, parts);
    }
  }
};

}  // namespace megavm
