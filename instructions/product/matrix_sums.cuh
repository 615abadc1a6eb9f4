// The sums of matrix products, in the registers of a warpgroup. To finish them, it *stages* them in
// shared memory, a block and up to 64 rows of x at a time (staged_at).
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

  // Forget the sums of the first rows of the first block, kEights times eight: those of the rows
  // behind them take their registers.
  template <uint32_t kEights>
  __device__ __forceinline__ void next_eights() {
#pragma unroll
    for (uint32_t i = 0; i + 4 * kEights < kRows / 2; ++i) sum[0][i] = sum[0][i + 4 * kEights];
  }

  // Stage this warp's sums of the first block and of rows [kPart, kPart + 1) * kStagedRows of x.
  // `to`: where the warpgroup stages.
  template <uint32_t kPart>
  __device__ __forceinline__ void stage(uint32_t to) const {
    // A warp has 16 rows of a block.
    const uint32_t lane = lane_index(), weight_row = warp_index() % 4 * 16 + lane / 4;
    const uint32_t row = lane % 4 * 2;
    const uint32_t places[2] = {to + staged_at(row, weight_row),
                                to + staged_at(row, weight_row + 8)};
#pragma unroll
    for (uint32_t i = 0; i < kStagedRows / 2; ++i)
      // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
      ptx::store_shared(places[i / 2 % 2] + (i / 4 * 8 + i % 2) * kStagedRowBytes,
                        __float_as_uint(sum[0][kPart * (kStagedRows / 2) + i]));
  }

  // Stage the first rows that are not forgotten, and forget them.
  __device__ __forceinline__ void stage_next(uint32_t to) {
    stage<0>(to);
    next_eights<kStagedRows / 8>();
  }

  static constexpr uint32_t kParts = kRows / kStagedRows;
};

}  // namespace megavm
