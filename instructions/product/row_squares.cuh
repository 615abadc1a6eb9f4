// The RMSNorm scale of a row, from the sums of squares that the producers of the row stored. The
// products of the row are multiplied with it; see Matmul.
#pragma once

#include "instructions/product/product.cuh"

namespace megavm {

// 1 / sqrt(mean(x^2) + eps). (RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467.)
__device__ __forceinline__ float scale_of(const Product& product, float squares) {
  return rsqrtf(__fdividef(squares, static_cast<float>(product.tiling.k)) + product.eps);
}

// A warp reads the squares of up to kRows rows. `ask` issues the first loads of a row; `scales`
// waits for them, and reads what is left of all rows together: a lane has kBatch times four of each
// row in flight, then kMore. With as little at once for one row after the other, 16 rows of 5120
// columns waited four times, while the memory idled.
template <uint32_t kRows = 1>
class RowSquares {
 public:
  __device__ __forceinline__ RowSquares(const Stage& stage, const Product& input)
      : stage_(stage), input_(input) {
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) forget(four_[i]);
  }

  // Issue the first loads of the i-th row. `row`: its number in x.
  __device__ __forceinline__ void ask(uint32_t row, uint32_t i = 0) {
    row_[i] = row;
    asked_ |= 1u << i;
    if constexpr (!kRagged) load(four_[i], i, 0);
  }

  // The scales of the rows that were asked for, in all lanes.
  __device__ __forceinline__ void scales(float (&scale)[kRows]) {
#pragma unroll
    for (float& sum : scale) sum = 0.0f;
    if constexpr (kRagged) {
#pragma unroll 1
      for (uint32_t c = lane_index(); c < squares().columns; c += kLanes)
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i)
          if (asked(i)) scale[i] += read_element(squares(), row_[i], c, input_.x_squares);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i)
        if (asked(i)) scale[i] = sum_of(four_[i], i, 0, scale[i]);
#pragma unroll 1
      for (uint32_t begin = kBatch; begin * kLanes * 4 < squares().columns; begin += kMore) {
        FourSquares more[kRows][kMore];
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i) forget(more[i]);
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i)
          if (asked(i)) load(more[i], i, begin);
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i)
          if (asked(i)) scale[i] = sum_of(more[i], i, begin, scale[i]);
      }
    }
    __syncwarp();
#pragma unroll
    for (float& sum : scale) {
      for (uint32_t offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      sum = scale_of(input_, sum);
    }
  }

  // The scale of the only row.
  __device__ __forceinline__ float scale() {
    static_assert(kRows == 1);
    float found[1];
    scales(found);
    return found[0];
  }

 private:
  static constexpr uint32_t kBatch = 2;
  static constexpr uint32_t kMore = 3;
  static constexpr bool kRagged = program::kAnySquares & 4;  // some counts are not multiples of 4
  static constexpr bool kMayBeTagged = program::kAnySquares & 2;
  using FourSquares = Loaded<true, 4>;

  __device__ __forceinline__ const Tensor& squares() const {
    return stage_.tensors[input_.x_squares];
  }
  __device__ __forceinline__ bool tagged() const { return kMayBeTagged && is_tagged(squares()); }
  __device__ __forceinline__ SourceRow source(uint32_t i) const {
    return FourSquares::row_of(squares(), row_[i], input_.x_squares);
  }
  static __device__ __forceinline__ uint32_t column(uint32_t i) {
    return (i * kLanes + lane_index()) * 4;
  }
  __device__ __forceinline__ bool exists(uint32_t i) const { return column(i) < squares().columns; }

  __device__ __forceinline__ bool asked(uint32_t i) const { return asked_ >> i & 1; }

  // NOTE: every register is written before a batch is loaded. Otherwise its second load waits until
  // the first has arrived, in case that its registers are still being loaded.
  template <uint32_t kCount>
  static __device__ __forceinline__ void forget(FourSquares (&fours)[kCount]) {
#pragma unroll
    for (FourSquares& four : fours) four.forget();
  }

  // Issue the loads of a batch of row i, whose number among the row's is `begin`.
  template <uint32_t kCount>
  __device__ __forceinline__ void load(FourSquares (&fours)[kCount], uint32_t i, uint32_t begin) {
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j)
      if (exists(begin + j))
        fours[j].load(source(i).address + uint64_t{column(begin + j)} * FourSquares::kColumnBytes);
  }

  // `sum` and the squares of a batch. Those that are tagged are loaded again until all are there.
  template <uint32_t kCount>
  __device__ __forceinline__ float sum_of(FourSquares (&fours)[kCount], uint32_t i, uint32_t begin,
                                          float sum) const {
    if (tagged())
      await<true>(
          source(i), fours, [&](uint32_t j) { return exists(begin + j); },
          [&](uint32_t j) { return column(begin + j); }, true);
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j)
      if (exists(begin + j))
        sum += fours[j].value(0) + fours[j].value(1) + (fours[j].value(2) + fours[j].value(3));
    return sum;
  }

  const Stage& stage_;
  const Product& input_;
  uint32_t row_[kRows] = {}, asked_ = 0;
  FourSquares four_[kRows][kBatch];
};

}  // namespace megavm
