// out := x . weight^T for a tile, shared by all instructions that multiply by a weight.
//
// The work is cut into *blocks* of up to two times 16 weight rows. Weights are read in their
// row-major layout, directly from memory, once per tile. Input rows are first rounded to the
// weights' type and packed into a panel. If whole rows fit into the panel, only one block at a time
// needs sums. Otherwise the arena holds the sums of the whole tile, and the input is processed in
// slices (Product.working_bytes declares the sizes).
//
// A sum is computed in *pieces* of kSplitColumns columns, each in 16 lanes that one tree of
// additions joins; with AMX, 32 columns after 32. The order is the same for every number of rows
// and tile, so the result of a row does not depend on the other rows.
#pragma once

#include <type_traits>

#include "vm/cpu/amx.hpp"
#include "vm/cpu/dot.hpp"

namespace megavm::MEGAVM_LEVEL {

// Width of a slice: the input columns that the panel holds when whole rows do not fit.
MEGAVM_INLINE int64_t slice_columns(int64_t rows, int64_t itemsize) {
  const int64_t fitting = int64_t{kInputBytes} / (rows * itemsize) / kSplitColumns;
  return (fitting > 1 ? fitting : 1) * kSplitColumns;
}

template <typename Weight, typename Path, typename BlockAt, typename Store>
inline void product_on(Worker& worker, const Input& in, int num_blocks, BlockAt block_at,
                       Store store) {
  const int64_t block_sums = ceil_to(in.num_rows, kLanes) * 2 * kLanes;
  float* scales = worker.allocate<float>(in.num_rows);
  for (int i = 0; i < in.num_rows; ++i)
    scales[i] = in.squares == kNone ? 1.0f : scale_of(worker, in.squares, in.row[i], in.k, in.eps);
  const auto finish = [&](const Path& path, int b, float* sums) {
    path.finish(in, sums);
    for (int i = 0; i < in.num_rows; ++i) {
      const Vec scale = splat(scales[i]);
      store(b, i, scale * load(sums_of(sums, i, 0)), scale * load(sums_of(sums, i, 1)));
    }
  };
  const int64_t panel_bytes =
      in.declared_rows * ceil_to(in.width(), kPanelColumns) * int64_t{sizeof(Weight)};
  if (panel_bytes <= int64_t{kInputBytes}) {
    // The input stays in the panel while the weights stream.
    Path path(worker, in, in.width());
    float* sums = worker.allocate<float>(block_sums);
    path.pack(worker, in, in.begin, in.width());
    for (int b = 0; b < num_blocks; ++b) {
      path.multiply(in, block_at(b), block_at(b + 1 < num_blocks ? b + 1 : b), in.begin, in.width(),
                    sums, true);
      finish(path, b, sums);
    }
    return;
  }
  // The sums stay in the arena while slices of the input and of the weights stream.
  const int64_t slice = slice_columns(in.declared_rows, sizeof(Weight));
  Path path(worker, in, slice < in.width() ? slice : in.width());
  const int64_t room =
      static_cast<int64_t>((worker.arena_limit - worker.arena_used) / (sizeof(float) * block_sums));
  // Padding to whole blocks may make the sums larger than declared. Then the tile is computed in
  // several passes over the input.
  const int at_once = num_blocks < room ? num_blocks : room > 1 ? static_cast<int>(room) : 1;
  float* sums = worker.allocate<float>(block_sums * at_once);
  for (int first = 0; first < num_blocks; first += at_once) {
    const int end = first + at_once < num_blocks ? first + at_once : num_blocks;
    for (int64_t begin = in.begin; begin < in.end; begin += slice) {
      const int64_t width = in.end - begin < slice ? in.end - begin : slice;
      path.pack(worker, in, begin, width);
      for (int b = first; b < end; ++b)
        path.multiply(in, block_at(b), block_at(b + 1 < end ? b + 1 : b), begin, width,
                      sums + (b - first) * block_sums, begin == in.begin);
    }
    for (int b = first; b < end; ++b) finish(path, b, sums + (b - first) * block_sums);
  }
}

// Multiply the input rows with `num_blocks` blocks of weights. `block_at(b)` returns block b;
// `store(b, i, first, second)` receives the products of its two halves with live row i.
template <typename Weight, typename BlockAt, typename Store>
inline void product(Worker& worker, const Input& in, int num_blocks, BlockAt block_at,
                    Store store) {
#if defined(__AMX_BF16__)
  using Path = std::conditional_t<sizeof(Weight) == 2, AmxPath, DotPath<Weight>>;
#else
  using Path = DotPath<Weight>;
#endif
  product_on<Weight, Path>(worker, in, num_blocks, block_at, store);
}

// The rows of x for the live rows of a tile; row r itself without a row_index.
MEGAVM_INLINE const int32_t* input_rows(Worker& worker, const Range& live, uint32_t row_index,
                                        int64_t x_rows) {
  int32_t* rows = worker.allocate<int32_t>(live.end - live.begin);
  for (int64_t r = live.begin; r < live.end; ++r) {
    const int64_t row = row_index == kNone ? r : indexed_row(worker, row_index, r, x_rows);
    rows[r - live.begin] = static_cast<int32_t>(row);
  }
  return rows;
}

// Call `use` with a null pointer of the weight's element type.
template <typename Use>
MEGAVM_INLINE void with_weight_type(const Worker& worker, uint32_t weight, Use use) {
  if (worker.tensor(weight).dtype == DType::kBf16) return use(static_cast<const Bf16*>(nullptr));
  use(static_cast<const float*>(nullptr));
}

}  // namespace megavm::MEGAVM_LEVEL
