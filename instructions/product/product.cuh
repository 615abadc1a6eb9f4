// The matrix product of matmul, gate_up and qkv_rope: weights stream through the ring in units
// of 8 rows, each warp multiplies its share of every tile row with the input, and the partial sums
// meet in shared memory.
//
// Loader and consumers process pages in the same order:
//   for each group of rows (1 row, 8 or 16), for each span of units, for each chunk of columns,
//   for each unit of the span, for each page of the unit in the chunk.
//
// A page is up to 32 tiles of [8 rows][64 bytes]; tile i belongs to warp i % 8. One 16-byte shared
// load per lane and tile is the B operand of two mma.m16n8k16: lane 4n + j gets W[n][8j .. 8j+7],
// which the layout of the weights keeps in chunk j ^ (n >> 1) of row n (vm/layout.py).
// Rows 0 to 7 of A hold the input's columns 8j .. 8j+3, rows 8 to 15 its columns 8j+4 .. 8j+7. So
// the first product is valid in the upper half of D and the second in the lower half; the other
// halves are ignored. A lane's operand A is 16 bytes of its row as well: words 0, 2, 1, 3 of the
// columns 8j .. 8j+7. In groups of 16 rows, A has all of them and each product its own: columns
// 8j .. 8j+3 and 8j+4 .. 8j+7, and all of D is valid.
//
// The sums of two neighbouring rows of the stored weight, a *pair*, are finished together, by the
// epilogue of the instruction (epilogue.cuh). Loader and consumers run one copy of this code for
// all product instructions: with a copy for each, a step of one row took 2 % more time. This file
// has what programs of one row (row.cuh) and of several (rows.cuh) have in common; products.cuh
// makes the kernel.
#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

static_assert(kPreload % 2 == 0);
constexpr uint32_t kUnitPairs = kUnitRows / 2;
// A group has so many times eight rows. (A group of one row counts as one eight.)
constexpr uint32_t kGroupEights = ceil_div(kGroupRows, kMinGroupRows);
static_assert(kGroupRows <= kMaxGroupRows && kGroupEights <= 2);
static_assert(kGroupEights == 1 || !kF32Weights);
// Consumers finish a block in *passes* of kPassUnits units, so that each pair and row has a thread.
// The sums of a block of 16 rows stay in the scratch from chunk to chunk; then it has two passes.
constexpr uint32_t kPassUnits = kBlockUnits / kGroupEights;
constexpr uint32_t kMostPasses = kOneChunk ? 1 : kGroupEights;

constexpr uint32_t kScalesAt = kPanelBytes;
constexpr uint32_t kPartialsAt = kScalesAt + 2 * 4 * kScales;
static_assert(!program::kAnyProduct || kPartialsAt + 2 * 4 * kPartialFloats <= kScratch);
// A half of the scratch has the partial sums of a pass.
static_assert(kPassUnits * kNumConsumers * kGroupRows * kUnitRows <= kPartialFloats);

// The weight rows of a product, as a rectangle of tiles.
struct Tiling {
  uint32_t k;      // columns
  uint32_t units;  // units of the instruction

  __device__ __forceinline__ uint32_t tiles() const { return ceil_div(k, kTileColumns); }
  __device__ __forceinline__ uint32_t pages() const { return ceil_div(k, kPageColumns); }
  __device__ __forceinline__ uint32_t chunks() const {
    return kOneChunk ? 1 : ceil_div(pages(), kChunkPages);
  }
  __device__ __forceinline__ uint32_t pages_of(uint32_t chunk) const {
    return kOneChunk ? pages() : min_of(kChunkPages, pages() - chunk * kChunkPages);
  }
  // Units whose sums are finished together, in steps of several rows.
  __device__ __forceinline__ uint32_t block_units() const {
    return chunks() > 1 ? kMostPasses * kPassUnits : kPassUnits;
  }
  // Number of tiles in a page of a unit.
  __device__ __forceinline__ uint32_t tiles_of(uint32_t page) const {
    return min_of(kTilesPerPage, tiles() - page * kTilesPerPage);
  }
};

// A product, as loader and consumers see it.
struct Product {
  Tiling tiling;
  uint64_t weights;  // address of the first unit; the others follow
  uint64_t unit_bytes;
  uint32_t pair_begin;  // pairs of the weight whose sums are finished; a unit may have others too
  uint32_t pair_end;
  OperandWord weight;
  OperandWord x;
  OperandWord x_squares;  // kNone: no normalisation
  OperandWord row_index;  // kNone: row r of x for row r
  OperandWord row_count;  // kNone: all rows are live
  uint32_t x_rows;        // values of row_index must be below this
  uint32_t row_begin;
  uint32_t row_end;
  float eps;
  uint32_t first_k;  // column of x where the product begins
  uint32_t matrix;   // 1: rows are multiplied as a matrix (matrix.cuh)

  __device__ __forceinline__ bool is_matrix() const {
    return program::kMatrixRows > 0 && (program::kAnyProduct == 0 || matrix != 0);
  }

  __device__ __forceinline__ uint32_t first_column() const {
    return program::kAnyPartOfK ? first_k : 0;
  }

  // The number in the weight of pair `i` after the beginning of the instruction's unit `unit`, and
  // whether the instruction finishes that pair.
  __device__ __forceinline__ uint32_t pair(uint32_t unit, uint32_t i) const {
    return (pair_begin / kUnitPairs + unit) * kUnitPairs + i;
  }
  __device__ __forceinline__ bool finishes(uint32_t pair) const {
    return pair >= pair_begin && pair < pair_end;
  }
};

__device__ __forceinline__ uint64_t unit_bytes(const Tensor& weight) {
  return uint64_t{ceil_div(weight.columns, kTileColumns)} * kTileBytes;
}

__device__ __forceinline__ uint32_t live_end(const Stage& stage, const Product& p) {
  if (p.row_count == kNone) return p.row_end;
  const uint32_t count = static_cast<uint32_t>(constant_integer(stage.tensors[p.row_count], 0, 0));
  return max_of(p.row_begin, min_of(p.row_end, count));
}

// The number of groups of rows: 1 if the instruction has rows for only one, live or not; else the
// number of groups with live rows.
__device__ __forceinline__ uint32_t num_groups(const Stage& stage, const Product& p) {
  if (p.row_end - p.row_begin <= kGroupRows) return 1;
  return ceil_div(live_end(stage, p) - p.row_begin, kGroupRows);
}

// The row of x for a row of the result.
__device__ __forceinline__ uint32_t x_row(const Stage& stage, const Product& p, uint32_t row) {
  if (p.row_index == kNone) return row;
  const uint32_t found =
      static_cast<uint32_t>(constant_integer(stage.tensors[p.row_index], row, 0));
  check_indexed_row(found, row, p.x_rows);
  return found;
}

// The loader: stream the weights, page by page, in the order above.
__device__ __forceinline__ void load_product(const Stage& stage, const Product& p, Loader& loader) {
  const Tiling& tiling = p.tiling;
  const uint32_t groups = num_groups(stage, p), chunks = tiling.chunks();
#pragma unroll 1
  for (uint32_t group = 0; group < groups; ++group)
#pragma unroll 1
    for (uint32_t first = 0; first < tiling.units; first += kSpanUnits)
#pragma unroll 1
      for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        const uint32_t end = min_of(first + kSpanUnits, tiling.units);
        const uint32_t first_page = chunk * kChunkPages;
        const uint32_t end_page = first_page + tiling.pages_of(chunk);
#pragma unroll 1
        for (uint32_t unit = first; unit < end; ++unit) {
          const uint64_t from = p.weights + unit * p.unit_bytes;
#pragma unroll 1
          for (uint32_t page = first_page; page < end_page; ++page) {
            const uint32_t bytes = tiling.tiles_of(page) * kTileBytes;
            loader.begin_page(bytes);
            loader.copy(0, from + page * kPageBytes, bytes);
          }
        }
      }
}

// ---- Input.

// Columns of a row of x, element by element, for rows that do not consist of whole tiles; 0 beyond
// the last column.
template <uint32_t kCount>
__device__ __forceinline__ void read_ragged(const Stage& stage, const Product& p, uint32_t row,
                                            uint32_t column, float (&value)[kCount]) {
#pragma unroll
  for (uint32_t j = 0; j < kCount; ++j)
    value[j] = column + j < p.tiling.k
                   ? read_element(stage.tensors[p.x], row, p.first_column() + column + j, p.x)
                   : 0.0f;
}

// ---- Scales and partial sums, which the consumers leave in one half of the scratch.

// Addresses of the scale of a row of the group, and of a warp's partial sums of a unit of the
// block: [row][8 columns].
__device__ __forceinline__ uint32_t scale_at(uint32_t half, uint32_t row) {
  return scratch_at(kScalesAt) + 4 * (half * kGroupRows + row);
}
__device__ __forceinline__ uint32_t partials_at(uint32_t half, uint32_t unit, uint32_t warp) {
  return scratch_at(kPartialsAt) +
         4 * (half * kPartialFloats + (unit * kNumConsumers + warp) * kGroupRows * kUnitRows);
}

// A product all of whose members are written, see ptx::zero.
__device__ __forceinline__ Product no_product() {
  const auto zero = [] { return ptx::zero(); };
  return {{zero(), zero()}, zero(), zero(), zero(), zero(), zero(), zero(),
          zero(),           zero(), zero(), zero(), zero(), zero(), __uint_as_float(zero()),
          zero(),           0};
}

// Delay stores, for tests; see kHoldStores.
__device__ __forceinline__ void hold_stores(uint32_t times) {
  if constexpr (kHoldStores > 0)
    for (uint32_t i = 0; i < times; ++i) __nanosleep(kHoldStores);
}

// ---- Sums.

// The two sums of a pair of weight rows.
struct PairSums {
  float first, second;
};

// Add up the sums of several warps, in order.
__device__ __forceinline__ PairSums add_up(const ptx::Words2 (&partial)[kNumConsumers]) {
  PairSums total = {};
#pragma unroll
  for (const ptx::Words2& words : partial) {
    total.first += __uint_as_float(words.x);
    total.second += __uint_as_float(words.y);
  }
  return total;
}

// A warp's tiles of one page. Tiles beyond the last column are zero, and so is the input there:
// every page is multiplied as if it were whole. A branch at each tile in place of the zeros cost
// TinyLlama 10 % of a step of one row.
struct PageTiles {
  ptx::Words4 tile[kTilesPerWarp];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (ptx::Words4& t : tile) t = ptx::zero4();
  }

  // `tiles`: of the page; read only if the program has partial pages.
  __device__ __forceinline__ void load(uint32_t page_address, uint32_t warp, uint32_t tiles) {
    const uint32_t lane = lane_index();
    const uint32_t from = page_address + warp * kTileBytes + 16 * (lane ^ lane >> 3);
#pragma unroll
    for (uint32_t i = 0; i < kTilesPerWarp; ++i) {
      tile[i] = ptx::load_shared4(from + i * kNumConsumers * kTileBytes);
      if (program::kAnyPartialPages && i * kNumConsumers + warp >= tiles) tile[i] = {0, 0, 0, 0};
    }
  }
};

// A warp's sums of one unit, over the warp's share of the columns.
struct UnitSums {
  // bf16: sum[i % 2] adds up the first product of tile i, sum[2 + i % 2] the second, so that
  // consecutive mma do not depend on each other. float32: sum[row][0], for weight row lane / 4.
  float sum[kF32Weights ? kGroupRows : 4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& chain : sum)
#pragma unroll
      for (float& value : chain) value = 0.0f;
  }

  // Add the products of tile i, with the operand A of each.
  __device__ __forceinline__ void multiply(uint32_t i, const ptx::Words4& first,
                                           const ptx::Words4& second, const ptx::Words4& w) {
    ptx::mma(sum[i % 2], first, w.x, w.y);
    ptx::mma(sum[2 + i % 2], second, w.z, w.w);
  }
  // Of up to 8 rows, both have the same.
  __device__ __forceinline__ void multiply(uint32_t i, const ptx::Words4& a, const ptx::Words4& w) {
    multiply(i, a, a, w);
  }

  // The same for float32 and one row.
  static __device__ __forceinline__ void multiply_f32(float& total, const ptx::Words4& a,
                                                      const ptx::Words4& w) {
    total = fmaf(__uint_as_float(a.x), __uint_as_float(w.x), total);
    total = fmaf(__uint_as_float(a.y), __uint_as_float(w.y), total);
    total = fmaf(__uint_as_float(a.z), __uint_as_float(w.z), total);
    total = fmaf(__uint_as_float(a.w), __uint_as_float(w.w), total);
  }

  // Store the sums to shared memory, [row][8 columns] for this warp; with `add_up`, add them to the
  // sums of earlier chunks. Clears the registers.
  __device__ __forceinline__ void flush(uint32_t partials, bool add_up) {
    const uint32_t lane = lane_index();
    if constexpr (kF32Weights) {
#pragma unroll
      for (uint32_t row = 0; row < kGroupRows; ++row) {
        float total = sum[row][0];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const uint32_t address = partials + 4 * (row * kUnitRows + lane / 4);
        if (lane % 4 == 0) {
          if (add_up) total += __uint_as_float(ptx::load_shared(address));
          ptx::store_shared(address, __float_as_uint(total));
        }
      }
    } else {
#pragma unroll
      for (uint32_t e = 0; e < kGroupEights; ++e) {
        // Of 8 rows, the second product is valid in the lower half of D.
        const uint32_t i = 2 * e, j = kGroupEights > 1 ? i : 2;
        float x = sum[0][i] + sum[1][i] + (sum[2][j] + sum[3][j]);
        float y = sum[0][i + 1] + sum[1][i + 1] + (sum[2][j + 1] + sum[3][j + 1]);
        const uint32_t row = 8 * e + lane / 4;
        if (row >= kGroupRows) continue;
        const uint32_t address = partials + 4 * (row * kUnitRows + lane % 4 * 2);
        if (add_up) {
          const ptx::Words2 before = ptx::load_shared2(address);
          x += __uint_as_float(before.x), y += __uint_as_float(before.y);
        }
        ptx::store_shared2(address, __float_as_uint(x), __float_as_uint(y));
      }
    }
    clear();
  }
};

}  // namespace megavm
