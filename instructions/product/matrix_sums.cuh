// The sums of matrix products, in the registers of a warpgroup. To finish them, a warp *stages* them
// in shared memory, 16 rows of the weight and up to 64 rows of x at a time (staged_at).
#pragma once

#include "instructions/product/matrix_pages.cuh"

namespace megavm {

__device__ __forceinline__ uint32_t warpgroup_index() { return warp_index() / 4; }

// `count` rows of x from `first` on.
struct MatrixRows {
  uint32_t first = 0, count = 0;

  __device__ __forceinline__ uint32_t end() const { return first + count; }
};

// The sums of a warpgroup, of each of its blocks.
struct MatrixSums : MatrixSizes {
  float sum[kMaxBlocks][kRows / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t b = 0; b < kMaxBlocks; ++b)
#pragma unroll
      for (float& s : sum[b]) s = 0.0f;
  }

  // Keep the compiler from moving accesses to the sums across this point.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (auto& of_block : sum) ptx::settle(of_block);
  }

  // Forget the sums of the first block: those of the second one take their registers.
  __device__ __forceinline__ void next_block() {
#pragma unroll
    for (uint32_t b = 0; b + 1 < kMaxBlocks; ++b)
#pragma unroll
      for (uint32_t i = 0; i < kRows / 2; ++i) sum[b][i] = sum[b + 1][i];
  }

  // Stage the sums of the first block and of rows [kPart, kPart + 1) * kStagedRows of x, from
  // address `to` on.
  template <uint32_t kPart>
  __device__ __forceinline__ void stage(uint32_t to) const {
    const uint32_t lane = lane_index(), weight_row = lane / 4, x_rows = lane % 4;
    // Row 2 x_rows + next of x, row weight_row + 8 half of the weight; see staged_at.
    uint32_t places[2][2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t next = 0; next < 2; ++next)
        places[half][next] = to + staged_at(2 * x_rows + next, weight_row + 8 * half);
#pragma unroll
    for (uint32_t i = 0; i < kStagedRows / 2; ++i)
      // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
      ptx::store_shared(places[i / 2 % 2][i % 2] + i / 4 * 8 * kStagedRowBytes,
                        __float_as_uint(sum[0][kPart * (kStagedRows / 2) + i]));
  }

  static constexpr uint32_t kParts = kRows / kStagedRows;
};

}  // namespace megavm
