// The RMSNorm scales of the rows of a matrix product. The storer computes them while the consumers
// multiply; these read them when they finish the sums.
#pragma once

#include "instructions/product/matrix_pages.cuh"
#include "instructions/product/row_squares.cuh"

namespace megavm {

class MatrixScales : MatrixSizes {
 public:
  __device__ __forceinline__ MatrixScales(const Stage& stage, const Product& p)
      : stage_(stage), product_(p) {}

  __device__ __forceinline__ void run(Storer& storer) const {
    const uint32_t end = live_end(stage_, product_);
    if (product_.x_squares == kNone || product_.row_begin >= end) return;
    storer.stage.ready().wait(storer.stage.phase);
    const Tensor& squares = stage_.tensors[product_.x_squares];
    const bool in_fours = has_fours(squares);
    // A lane needs so many loads, of four squares each, for its share of a row.
    const uint32_t loads = ceil_div(squares.columns, 4 * kRowLanes);
#pragma unroll 1
    for (uint32_t row = product_.row_begin; row < end; row += kRows) {
      // The consumers have used the scales in this place.
      storer.scales.finished().wait(storer.scales.phase() ^ 1);
      const uint32_t count = min_of(kRows, end - row);
      if (!in_fours)
        scale_one_by_one(storer.scales, row, count);
      else if (loads > 8)
        scale<1, 16>(storer.scales, squares, row, count);
      else if (loads > 4)
        scale<2, 8>(storer.scales, squares, row, count);
      else if (loads > 2)
        scale<2, 4>(storer.scales, squares, row, count);
      else if (loads > 1)
        scale<4, 2>(storer.scales, squares, row, count);
      else
        scale<8, 1>(storer.scales, squares, row, count);
      storer.scales.arrived().arrive_together();
      storer.scales.advance();
    }
  }

 private:
  static constexpr uint32_t kRowLanes = 8;                   // lanes that add up a row
  static constexpr uint32_t kLaneRows = kLanes / kRowLanes;  // rows side by side

  // The scales of `count` rows from `first_row` on. A lane has kRowsAtOnce rows at a time, and
  // loads kFours times four squares of each.
  template <uint32_t kRowsAtOnce, uint32_t kFours>
  __device__ __forceinline__ void scale(const ScalesCursor& scales, const Tensor& squares,
                                        uint32_t first_row, uint32_t count) const {
    static_assert(kRowsAtOnce <= kRowLanes);
    const uint32_t fours = squares.columns / 4, lane = lane_index() % kRowLanes;
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kRowsAtOnce * kLaneRows) {
      uint64_t from[kRowsAtOnce];
      float sum[kRowsAtOnce] = {}, own_sum = 0.0f;
      const auto row_of = [&](uint32_t nth) {
        return first + nth * kLaneRows + lane_index() / kRowLanes;
      };
#pragma unroll
      for (uint32_t nth = 0; nth < kRowsAtOnce; ++nth)
        from[nth] =
            base_of(squares) + uint64_t{first_row + min_of(row_of(nth), count - 1)} * (16 * fours);
#pragma unroll 1
      for (uint32_t begin = lane; begin < fours; begin += kFours * kRowLanes) {
        ptx::Words4 words[kRowsAtOnce][kFours];
        // NOTE: no load is conditional: all of them are in flight together.
#pragma unroll
        for (uint32_t i = 0; i < kFours; ++i)
#pragma unroll
          for (uint32_t nth = 0; nth < kRowsAtOnce; ++nth)
            words[nth][i] =
                ptx::load_relaxed4(from[nth] + 16 * min_of(begin + i * kRowLanes, fours - 1));
#pragma unroll
        for (uint32_t i = 0; i < kFours; ++i)
#pragma unroll
          for (uint32_t nth = 0; nth < kRowsAtOnce; ++nth) {
            const ptx::Words4& w = words[nth][i];
            const float four = __uint_as_float(w.x) + __uint_as_float(w.y) +
                               (__uint_as_float(w.z) + __uint_as_float(w.w));
            if (begin + i * kRowLanes < fours) sum[nth] += four;
          }
      }
      __syncwarp();
#pragma unroll
      for (uint32_t nth = 0; nth < kRowsAtOnce; ++nth) {
#pragma unroll
        for (uint32_t apart = 1; apart < kRowLanes; apart *= 2)
          sum[nth] += __shfl_xor_sync(~0u, sum[nth], apart);
        if (lane == nth) own_sum = sum[nth];
      }
      // All lanes of a row have its sum: each finishes one of the rows.
      if (lane < kRowsAtOnce && row_of(lane) < count)
        store(scales, row_of(lane), scale_of(product_, own_sum));
    }
  }

  // The same for squares that are tagged or have other numbers of columns.
  __device__ __forceinline__ void scale_one_by_one(const ScalesCursor& scales, uint32_t first_row,
                                                   uint32_t count) const {
#pragma unroll 1
    for (uint32_t row = 0; row < count; ++row) {
      RowSquares<> squares(stage_, product_);
      squares.ask(first_row + row);
      const float scale = squares.scale();
      if (lane_index() == 0) store(scales, row, scale);
    }
  }

  static __device__ __forceinline__ void store(const ScalesCursor& scales, uint32_t row,
                                               float scale) {
    ptx::store_shared(scale_at(scales, row), __float_as_uint(scale));
  }

  const Stage& stage_;
  const Product& product_;
};

}  // namespace megavm
