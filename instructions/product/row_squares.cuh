// The RMSNorm scale of a row, from the sums of squares that the producers of the row stored. The
// products of the row are multiplied with it; see Matmul.
#pragma once

#include "instructions/product/product.cuh"

namespace megavm {

// 1 / sqrt(mean(x^2) + eps). (RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467.)
__device__ __forceinline__ float scale_of(const Product& product, float squares) {
  return rsqrtf(__fdividef(squares, static_cast<float>(product.tiling.k)) + product.eps);
}

// A warp reads the squares of kRows rows; of each, a lane has kBatch times four in flight. `ask`
// issues the first loads of a row, `scale` waits for them.
template <uint32_t kRows = 1>
class RowSquares {
 public:
  __device__ __forceinline__ RowSquares(const Stage& stage, const Product& input)
      : stage_(stage), input_(input) {
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) forget(i);
  }

  // Issue the first loads of the i-th row. `row`: its number in x.
  __device__ __forceinline__ void ask(uint32_t row, uint32_t i = 0) {
    row_[i] = row;
    if constexpr (!kRagged) load(i, 0);
  }

  // The scale of the i-th row, in all lanes.
  __device__ __forceinline__ float scale(uint32_t i = 0) {
    float sum = 0.0f;
    if constexpr (kRagged) {
#pragma unroll 1
      for (uint32_t c = lane_index(); c < squares().columns; c += kLanes)
        sum += read_element(squares(), row_[i], c, input_.x_squares);
    } else {
#pragma unroll 1
      for (uint32_t begin = 0; begin * kLanes * 4 < squares().columns; begin += kBatch) {
        if (begin > 0) {
          forget(i);
          load(i, begin);
        }
        wait(i, begin);
#pragma unroll
        for (uint32_t j = 0; j < kBatch; ++j)
          if (exists(begin + j)) sum += sum_of(four_[i][j]);
      }
    }
    __syncwarp();
    for (uint32_t offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return scale_of(input_, sum);
  }

 private:
  static constexpr uint32_t kBatch = 2;
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

  // NOTE: every register is written before a batch is loaded. Otherwise its second load waits until
  // the first has arrived, in case that its registers are still being loaded.
  __device__ __forceinline__ void forget(uint32_t i) {
#pragma unroll
    for (FourSquares& four : four_[i]) four.forget();
  }

  __device__ __forceinline__ void load(uint32_t i, uint32_t begin) {
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j)
      if (exists(begin + j))
        four_[i][j].load(source(i).address +
                         uint64_t{column(begin + j)} * FourSquares::kColumnBytes);
  }

  __device__ __forceinline__ float sum_of(const FourSquares& four) const {
    return four.value(0) + four.value(1) + (four.value(2) + four.value(3));
  }

  // Reload the squares that are missing until all have arrived.
  __device__ __forceinline__ void wait(uint32_t i, uint32_t begin) {
    if (!tagged()) return;
    await<true>(
        source(i), four_[i], [&](uint32_t j) { return exists(begin + j); },
        [&](uint32_t j) { return column(begin + j); }, true);
  }

  const Stage& stage_;
  const Product& input_;
  uint32_t row_[kRows] = {};
  FourSquares four_[kRows][kBatch];
};

}  // namespace megavm
