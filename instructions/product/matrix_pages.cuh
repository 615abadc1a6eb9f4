// The pages of matrix products: their sizes and order, and what the loader does. matrix.cuh has the
// consumers' part.
//
// Loader and consumers process pages in the same order:
//   for each kMatrixRows rows, for each group of blocks, for each step of some columns:
//     pages of x; pages of weights.
// In steps of few rows, all workers multiply the same x at the same time. Each begins with other
// columns, so that they do not read the same lines at once.
//
// The operands come in boxes of 64 columns, which the copy engine finds by maps (vm/cuda/boxes.py).
// A box of x is [row][128 bytes] with the 128-byte swizzle. A box of a block of weights is
// [unit][2 tiles][8 rows][64 bytes], which is wgmma's 64-byte swizzle. If the block has fewer than
// 8 units, so has its box. The boxes of two blocks that follow each other in a page are copied as
// one. A wgmma reads 8 units in any case: what follows counts as nothing. What lies
// beyond the last column is zeros.
#pragma once

#include "instructions/product/product.cuh"

namespace megavm {

struct MatrixSizes {
  static constexpr uint32_t kRows = max_of(kMinMatrixRows, program::kMatrixRows);
  static constexpr uint32_t kWarpgroups = kNumConsumers / 4;
  // Most blocks of a warpgroup: their sums take up to 128 registers.
  static constexpr uint32_t kMaxBlocks = 2;
  static constexpr uint32_t kGroupBlocks = kMatrixBlocks;
  static_assert(kGroupBlocks == kWarpgroups * kMaxBlocks && kRows <= kMaxMatrixRows);
  static constexpr uint32_t kBoxBytes = kRows * kBoxRowBytes;  // a box of x
  static constexpr uint32_t kPageBoxes = kPageBytes / kBoxBytes;
  static constexpr uint32_t kUnitBytes = kBoxTiles * kTileBytes;  // a unit in a box of weights
  static constexpr uint32_t kPageUnits = kPageBytes / kUnitBytes;
  static constexpr uint32_t kBoxWords = kUnitBytes / kMapWordBytes;
  // Most boxes of x in a step, and most pages of a step with several: the ring holds four steps.
  static constexpr uint32_t kMostBoxes = 4;
  static constexpr uint32_t kGoodPages = kPages / 4;
  // A step of more than kWarpgroups blocks has one box of x, and so many pages.
  static constexpr uint32_t kMostStepPages = 1 + kGroupBlocks * kBlockUnits / kPageUnits;
  static_assert(program::kMatrixRows == 0 ||
                (2 * kMostStepPages <= kPages && kGoodPages <= kMostStepPages));

  // Most boxes that a warpgroup multiplies at a time. With 128 rows there are never two of its own.
  static constexpr uint32_t kTurnBoxes = kRows <= 64 ? 2 : 1;

  // Whether workers begin with different columns. With more rows, several tiles of them are
  // multiplied at the same time, and the second-level cache likes that workers share lines.
  static constexpr bool kRotates = kRows <= 64 && !program::kFixedOrder;

  static constexpr uint32_t kOperandBytes = 32;  // 16 columns of an operand

  // A warpgroup stages its sums of so many rows of x and one block, in pages of a step.
  static constexpr uint32_t kStagedRows = min_of(kRows, 64);
  static constexpr uint32_t kBlockRows = kUnitRows * kBlockUnits;  // stored rows of the weight
  static constexpr uint32_t kStagedRowBytes = kBlockRows * 4;
  static constexpr uint32_t kStagedBytes = kStagedRows * kStagedRowBytes;
  static constexpr uint32_t kGivenBytes = kStagedBytes / 4;  // room for what a warp gives away
  static_assert(kWarpgroups * kStagedBytes <= 2 * kPageBytes, "a step has two pages at least");

  // Where the sum of a row of x and a row of the weight is staged.
  // Units of a row of x change places by bits 1 and 2 of its number, so that the threads that
  // store sums (four rows of x that are two apart, 8 rows of a unit) do not meet in a bank. Those
  // that load them at the same time have half of a row, in any order.
  static __device__ __forceinline__ uint32_t staged_at(uint32_t row, uint32_t weight_row) {
    return row * kStagedRowBytes +
           ((weight_row / kUnitRows ^ (row >> 1 & 3)) * kUnitRows + weight_row % kUnitRows) * 4;
  }

  // Scratch: the scales of the rows, in two places; what epilogues look up of each row; what each
  // warp keeps of it.
  static constexpr uint32_t kOfRowsAt = 2 * kRows * kScaleBytes;
  static constexpr uint32_t kKeptAt = kOfRowsAt + kRows * kOfRowBytes;
  static_assert(program::kMatrixRows == 0 || kRows * kMatrixRowBytes <= kScratch);
  static __device__ __forceinline__ uint32_t scale_at(const ScalesCursor& scales, uint32_t row) {
    return scratch_at((scales.half() * kRows + row) * kScaleBytes);
  }
  static_assert(kBlockRows == 64);
  // A wgmma may read beyond the last page.
  static_assert(kScratchAt + kBlockUnits * kUnitBytes <= kSharedBytes);
};

// The order of the pages.
struct MatrixOrder : MatrixSizes {
  uint32_t blocks, units, tiles;

  __device__ __forceinline__ explicit MatrixOrder(const Tiling& tiling)
      : blocks(ceil_div(tiling.units, kBlockUnits)), units(tiling.units), tiles(tiling.tiles()) {}

  __device__ __forceinline__ uint32_t units_of(uint32_t block) const {
    return min_of(kBlockUnits, units - block * kBlockUnits);
  }
  __device__ __forceinline__ uint32_t boxes() const { return ceil_div(tiles, kBoxTiles); }
};

// A group of blocks, and its steps. Box i of the weights of a step is that of block i % blocks for
// box i / blocks of x.
struct MatrixGroup : MatrixSizes {
  uint32_t first, blocks;
  uint32_t boxes = kMostBoxes;  // boxes of x in a step
  uint32_t x_pages, pages;      // a step has so many pages of x, and in all
  uint32_t page_shift = 1;      // a page has 1 << page_shift boxes of weights

  // NOTE: more boxes a step if the block has only a few units. Steps of few bytes would leave too
  // few in flight.
  __device__ __forceinline__ MatrixGroup(const MatrixOrder& order, uint32_t first)
      : first(first), blocks(min_of(kGroupBlocks, order.blocks - first)) {
    if (blocks == 1)
      while (order.units_of(first) << (page_shift + 1) <= kPageUnits) ++page_shift;
    while (true) {
      x_pages = ceil_div(boxes, kPageBoxes);
      pages = x_pages + ((boxes * blocks + (1u << page_shift) - 1) >> page_shift);
      if (boxes == 1 || pages <= kGoodPages) break;
      boxes /= 2;
    }
  }

  // Whether the warpgroups share the only block: each multiplies half of the boxes of a step.
  __device__ __forceinline__ bool is_shared() const {
    return !program::kFixedOrder && blocks == 1 && boxes > 1;
  }
  // Boxes of a step that each warpgroup multiplies.
  __device__ __forceinline__ uint32_t own_boxes() const {
    return is_shared() ? boxes / kWarpgroups : boxes;
  }

  // Blocks whose weights are copied together: two if they follow each other in a page.
  __device__ __forceinline__ uint32_t blocks_of_copy() const {
    return page_shift == 1 && (blocks % 2 == 0 || (boxes == 1 && blocks > 1)) ? 2 : 1;
  }

  // From one box of the weights to the next, in bytes.
  __device__ __forceinline__ uint32_t box_bytes() const { return kPageBytes >> page_shift; }
  // The page, and the place in it, of box i of the weights.
  __device__ __forceinline__ uint32_t page_of(uint32_t i) const {
    return x_pages + (i >> page_shift);
  }
  __device__ __forceinline__ uint32_t offset_of(uint32_t i) const {
    return (i & ((1u << page_shift) - 1)) * box_bytes();
  }
};

// The loader's part.
__device__ __forceinline__ void load_matrix(const Stage& stage, const Product& p, Loader& loader) {
  const MatrixOrder order(p.tiling);
  using S = MatrixSizes;
  Boxes boxes = {};
  boxes.map = loader.map_of(stage.words.operands[p.x]);
  const uint32_t first_unit = p.pair_begin / kUnitPairs;
  const uint32_t all_units = ceil_div(stage.tensors[p.weight].rows, kUnitRows);
  boxes.end_column = p.first_column() + p.tiling.k;
  const uint32_t end = live_end(stage, p), lane = lane_index();
  loader.begin_instruction();
#pragma unroll 1
  for (uint32_t row = p.row_begin; row < end; row += S::kRows) {
    boxes.row = row;
#pragma unroll 1
    for (uint32_t first = 0; first < order.blocks; first += S::kGroupBlocks) {
      const MatrixGroup group(order, first);
      const uint32_t end_unit = min_of(order.units, (first + group.blocks) * kBlockUnits);
      const uint32_t bytes =
          group.boxes * (S::kBoxBytes + (end_unit - first * kBlockUnits) * S::kUnitBytes);
      // The first `weights` lanes copy weights in every step, the lanes after them x.
      const uint32_t together = group.blocks_of_copy(), beside = ceil_div(group.blocks, together);
      const uint32_t weights = group.boxes * beside;
      const bool is_x = lane >= weights;
      // The box of x that the lane copies, or that is multiplied with its weights.
      const uint32_t of_x = is_x ? lane - weights : lane / beside;
      const uint32_t block = lane % beside * together;  // its first block, counted from `first`
      const uint32_t unit = (first + block) * kBlockUnits;
      const uint32_t units = min_of(together * kBlockUnits, end_unit - unit);
      const uint64_t map =
          is_x ? boxes.map : loader.map_of(stage.words.operands[p.weight], units - 1);
      const uint32_t row_of_map = is_x ? boxes.row : first_unit + unit;
      const uint32_t width = is_x ? kBoxColumns : S::kBoxWords;
      const uint32_t box_of_step = of_x * group.blocks + block;
      const uint32_t page_of_step = is_x ? of_x / S::kPageBoxes : group.page_of(box_of_step);
      const uint32_t offset =
          is_x ? of_x % S::kPageBoxes * S::kBoxBytes : group.offset_of(box_of_step);
      const uint32_t first_box = p.first_column() / kBoxColumns + of_x;
      const uint32_t end_box = is_x ? ceil_div(boxes.end_column, kBoxColumns) : kNone;
      const auto copy = [&](const PageCursor& step, uint32_t number, uint32_t lanes) {
        if (lane >= lanes) return;
        const uint32_t box = first_box + number * group.boxes;
        PageCursor page = step;
        page.advance(page_of_step);
        loader.copy_box(step, page, offset, map, box < end_box ? box * width : Loader::kBeyond,
                        row_of_map, is_x);
      };
      const uint32_t steps = ceil_div(order.boxes(), group.boxes);
      uint32_t number = S::kRotates ? steps * first_unit / all_units : 0;
#pragma unroll 1
      for (uint32_t left = steps; left > 0; --left) {
        const PageCursor step = loader.begin_pages(group.pages, bytes);
        // Until the input is ready, its copies are deferred.
        const bool at_once = loader.look_ready();
        copy(step, number, at_once ? weights + group.boxes : weights);
        PageCursor page = step;
#pragma unroll 1
        for (uint32_t j = 0; j < (at_once ? 0 : group.x_pages); ++j) {
          boxes.column =
              p.first_column() + (number * group.boxes + j * S::kPageBoxes) * kBoxColumns;
          loader.copy_boxes(step, page, boxes, min_of(S::kPageBoxes, group.boxes));
          page.advance();
        }
        if (++number == steps) number = 0;
      }
    }
  }
}

}  // namespace megavm
