// Common types of the paths of a product (dot.hpp, amx.hpp): inputs, blocks of weights, and the
// layout of sums.
#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

// The input rows of a product.
struct Input {
  uint32_t x;
  uint32_t squares;  // sums of squares of x; kNone: x is not normalised
  float eps;
  int64_t k;
  int declared_rows;   // rows of the tile, live or not: decides whether whole rows fit the panel
  int num_rows;        // live rows
  const int32_t* row;  // the row of x for each live row
  // The columns of x that are multiplied.
  int64_t begin = 0;
  int64_t end = k;

  int64_t width() const { return end - begin; }
};

// Two halves of up to 16 consecutive weight rows each.
template <typename Weight>
struct Block {
  const Weight* half[2];
  int count[2];
};

// The input rows of one tile, rounded and packed, columns [begin, begin + width) at a time.
template <typename Weight>
struct Panel {
  Weight* data;
  int64_t stride;  // elements per row
};

// Sums of one block: [tile of 16 input rows][half][input row in the tile][weight row].
constexpr int kHalfSums = kLanes * kLanes;
constexpr int kTileSums = 2 * kHalfSums;

MEGAVM_INLINE float* sums_of(float* sums, int row, int half) {
  return sums + row / kLanes * kTileSums + half * kHalfSums + row % kLanes * kLanes;
}

// How far ahead in a row weights are prefetched.
constexpr int kPrefetchBytes = 512;

// Load up to 16 values of live row i.
template <typename Rows>
MEGAVM_INLINE Vec load_input(const Input& in, const Rows& rows, int i, int64_t column, int count) {
  return count == kLanes ? rows.load(in.row[i], column) : rows.load(in.row[i], column, count);
}

}  // namespace megavm::MEGAVM_LEVEL
