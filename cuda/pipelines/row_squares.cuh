// The RMSNorm scale of a row, from the sums of squares that the producers of the row stored. The
// products of the row are multiplied with it; see Matmul.
#pragma once

#include "cuda/pipelines/product.cuh"

namespace megavm {

// Four neighbouring sums of squares, as loaded from memory.
struct FourSquares {
  static constexpr bool kMayBeTagged = program::kAnySquares & 2;
  ptx::Words4 low, high;  // high: words 2 and 3 of a tagged tensor

  __device__ __forceinline__ void clear() {
    low = ptx::zero4();
    if constexpr (kMayBeTagged) high = ptx::zero4();
  }

  __device__ __forceinline__ void load(const Tensor& squares, uint32_t row, uint32_t column) {
    if (kMayBeTagged && is_tagged(squares)) {
      low = ptx::load_relaxed_tagged2(word_at(squares, row, column));
      high = ptx::load_relaxed_tagged2(word_at(squares, row, column + 2));
    } else {
      low = ptx::load_relaxed4(element_at(squares, row, column));
    }
  }

  // Of a tagged tensor: `tag` if all words carry it; else a tag that differs.
  __device__ __forceinline__ uint32_t check(uint32_t tag) const {
    if (low.y != tag) return low.y;
    if (low.w != tag) return low.w;
    return high.y != tag ? high.y : high.w;
  }

  __device__ __forceinline__ float sum(bool tagged) const {
    if (kMayBeTagged && tagged)
      return __uint_as_float(low.x) + __uint_as_float(low.z) +
             (__uint_as_float(high.x) + __uint_as_float(high.z));
    return __uint_as_float(low.x) + __uint_as_float(low.y) +
           (__uint_as_float(low.z) + __uint_as_float(low.w));
  }
};

// A warp reads the squares of a row; each lane has kBatch times four in flight. `ask` issues the
// first loads, `scale` waits for them.
class RowSquares {
 public:
  __device__ __forceinline__ RowSquares(const Stage& stage, const ProductInput& input)
      : stage_(stage), input_(input) {
#pragma unroll
    for (FourSquares& four : four_) four.clear();
  }

  // Issue the first loads. `row`: a row of x.
  __device__ __forceinline__ void ask(uint32_t row) {
    row_ = row;
    if constexpr (!kRagged) load(0);
  }

  // 1 / sqrt(mean(x^2) + eps), in all lanes. (RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467.)
  __device__ __forceinline__ float scale() {
    float sum = 0.0f;
    if constexpr (kRagged) {
#pragma unroll 1
      for (uint32_t c = lane_index(); c < squares().columns; c += kLanes)
        sum += read_element(squares(), row_, c, stage_.tag, input_.x_squares);
    } else {
#pragma unroll 1
      for (uint32_t begin = 0; begin * kLanes * 4 < squares().columns; begin += kBatch) {
        if (begin > 0) load(begin);
        wait(begin);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          if (exists(begin + i)) sum += four_[i].sum(is_tagged(squares()));
      }
    }
    __syncwarp();
    for (uint32_t offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return rsqrtf(__fdividef(sum, static_cast<float>(input_.tiling.k)) + input_.eps);
  }

 private:
  static constexpr uint32_t kBatch = 2;
  static constexpr bool kRagged = program::kAnySquares & 4;  // some counts are not multiples of 4

  __device__ __forceinline__ const Tensor& squares() const {
    return stage_.tensors[input_.x_squares];
  }
  static __device__ __forceinline__ uint32_t column(uint32_t i) {
    return (i * kLanes + lane_index()) * 4;
  }
  __device__ __forceinline__ bool exists(uint32_t i) const { return column(i) < squares().columns; }

  __device__ __forceinline__ void load(uint32_t begin) {
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i)
      if (exists(begin + i)) four_[i].load(squares(), row_, column(begin + i));
  }

  // Reload the squares that are missing until all have arrived.
  __device__ __forceinline__ void wait(uint32_t begin) {
    if constexpr (FourSquares::kMayBeTagged) {
      const uint32_t tag = stage_.tag;
      while (is_tagged(squares())) {
        uint32_t missing = 0, found = tag;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          if (exists(begin + i) && four_[i].check(tag) != tag)
            missing = column(begin + i), found = four_[i].check(tag);
        if (found == tag) return;
        if (__builtin_expect(is_stopping(), 0))
          stop_at_tag(input_.x_squares, row_, missing, found, tag);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          if (exists(begin + i) && four_[i].check(tag) != tag)
            four_[i].load(squares(), row_, column(begin + i));
      }
    }
  }

  const Stage& stage_;
  const ProductInput& input_;
  uint32_t row_ = 0;
  FourSquares four_[kBatch];
};

}  // namespace megavm
