#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

// One warp computes a row. When there are fewer rows than warps, several warps share a row: each
// sums the squares of the whole row and stores its share of the result.
template <>
struct Kernel<RmsNorm> : KernelDefaults {
  static constexpr uint32_t kBatch = 4;  // pairs of columns that a lane has in flight

  // Call use(column, first, second) for the pairs `begin`, begin + kLanes, ... below `end` of a
  // row, as soon as they have arrived.
  template <bool kF32, class Use>
  static __device__ __forceinline__ void each_pair(const Operands<RmsNorm>& in, uint32_t row,
                                                   uint32_t begin, uint32_t end, Use&& use) {
    using Pair = Loaded<kF32, 2>;
    const SourceRow from = Pair::row_of(in[&RmsNorm::x], row, in.word(&RmsNorm::x));
#pragma unroll 1
    for (uint32_t pair = begin; pair < end; pair += kBatch * kLanes) {
      Pair raw[kBatch] = {};
      const auto exists = [&](uint32_t i) { return pair + i * kLanes < end; };
      const auto column = [&](uint32_t i) { return (pair + i * kLanes) * 2; };
      await(from, raw, exists, column, is_tagged(in[&RmsNorm::x]));
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i)
        if (exists(i)) use(column(i), raw[i].value(0), raw[i].value(1));
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
  template <bool kF32>
  static __device__ __forceinline__ void even_row(const Operands<RmsNorm>& in, uint32_t row,
                                                  uint32_t part, uint32_t parts) {
    const uint32_t pairs = in[&RmsNorm::x].columns / 2;
    float squares = 0.0f;
    each_pair<kF32>(in, row, lane_index(), pairs, [&](uint32_t, float x, float y) {
      squares = fmaf(x, x, squares);
      squares = fmaf(y, y, squares);
    });
    const float scale = scale_of(in, squares);
    const uint32_t size = ceil_div(pairs, parts), begin = part * size;
    each_pair<kF32>(in, row, begin + lane_index(), min_of(begin + size, pairs),
                    [&](uint32_t column, float x, float y) {
                      write_pair(in[&RmsNorm::out], row, column, x * scale * gain(in, column),
                                 y * scale * gain(in, column + 1), true);
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
      const float value = read_element(x, row, c, in.word(&RmsNorm::x));
      squares = fmaf(value, value, squares);
    }
    const float scale = scale_of(in, squares);
#pragma unroll 1
    for (uint32_t c = part * kLanes + lane_index(); c < k; c += parts * kLanes) {
      const float value = read_element(x, row, c, in.word(&RmsNorm::x));
      write_element(in[&RmsNorm::out], row, c, value * scale * gain(in, c));
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
      else if (is_f32(x))
        even_row<true>(in, row, part, parts);
      else
        even_row<false>(in, row, part, parts);
    }
  }
};

}  // namespace megavm
