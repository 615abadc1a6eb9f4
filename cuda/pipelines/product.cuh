// The matrix product behind matmul, gate_up and qkv_rope: weights stream through the ring in units
// of 8 rows, each warp multiplies its share of every tile row with the input, and the partial sums
// meet in shared memory.
//
// Loader and consumers process pages in the same order:
//   for each group of rows (1 row, or 8), for each block of units, for each chunk of columns,
//   for each unit of the block, for each page of the unit in the chunk.
//
// A page is up to 32 tiles of [8 rows][64 bytes]; tile i belongs to warp i % 8. One 16-byte shared
// load per lane and tile is the B operand of two mma.m16n8k16: lane 4n + j gets W[n][8j .. 8j+7].
// Rows 0 to 7 of A hold the input's columns 8j .. 8j+3, rows 8 to 15 its columns 8j+4 .. 8j+7. So
// the first product is valid in the upper half of D and the second in the lower half; the other
// halves are ignored. A lane's operand A is 16 bytes of its row as well: words 0, 2, 1, 3 of the
// columns 8j .. 8j+7.
//
// A *plan* declares the operands of a product and finishes its sums, see
// instructions/matmul/cuda.cuh. An *item* is the columns of a row that are finished together. All
// product instructions run one copy of this code, which so stays in the instruction cache; only
// finishing an item is their own. This file has the common code of programs of one row
// (product_row.cuh) and of several (product_rows.cuh).
#pragma once

#include "cuda/kernel.cuh"

namespace megavm {

static_assert(kPreload % 2 == 0);
constexpr uint32_t kScalesAt = kPanelBytes;
constexpr uint32_t kPartialsAt = kScalesAt + 2 * 4 * kScales;
static_assert(!program::kAnyProduct || kPartialsAt + 2 * 4 * kPartialFloats <= kScratch);

// The weight rows of a product, as a rectangle of tiles.
struct Tiling {
  uint32_t k;      // columns
  uint32_t units;  // units of the instruction, over all weights

  __device__ __forceinline__ uint32_t tiles() const { return ceil_div(k, kTileColumns); }
  __device__ __forceinline__ uint32_t pages() const { return ceil_div(k, kPageColumns); }
  __device__ __forceinline__ uint32_t chunks() const {
    return kOneChunk ? 1 : ceil_div(pages(), kChunkPages);
  }
  __device__ __forceinline__ uint32_t pages_of(uint32_t chunk) const {
    return kOneChunk ? pages() : min_of(kChunkPages, pages() - chunk * kChunkPages);
  }
  // Number of tiles in a page of a unit.
  __device__ __forceinline__ uint32_t tiles_of(uint32_t page) const {
    return min_of(kTilesPerPage, tiles() - page * kTilesPerPage);
  }
};

// The weights of a product: up to three tensors. Their units follow one another, or two tensors
// alternate.
struct WeightRows {
  uint64_t from[3];  // address of the first unit of each tensor
  uint32_t upto[3];  // units of this tensor and the tensors before it
  bool alternate;    // unit u belongs to tensor u % 2
  uint64_t unit_bytes;

  __device__ __forceinline__ uint64_t unit(uint32_t u) const {
    if (alternate) return (u % 2 ? from[1] : from[0]) + u / 2 * unit_bytes;
    if (u < upto[0]) return from[0] + u * unit_bytes;
    if (u < upto[1]) return from[1] + (u - upto[0]) * unit_bytes;
    return from[2] + (u - upto[1]) * unit_bytes;
  }
};

// Operands of a product, as the common code needs them.
struct ProductInput {
  Tiling tiling;
  uint32_t half_items;  // twice the items of one row in a unit
  bool wants_end;       // whether the plan has work at the end of a group (peaks)
  OperandWord x;
  OperandWord x_squares;  // kNone: no normalisation
  OperandWord row_index;  // kNone: row r of x for row r
  OperandWord row_count;  // kNone: all rows are live
  uint32_t x_rows;        // values of row_index must be below this
  uint32_t row_begin;
  uint32_t row_end;
  float eps;
  uint32_t first_k;  // column of x where the product begins

  __device__ __forceinline__ uint32_t first_column() const {
    return program::kAnyPartOfK ? first_k : 0;
  }
};

// Data that a thread fetched or computed for its item before the sums were complete. Each plan uses
// the members in its own way.
struct Prefetched {
  float value[8];
  uint32_t number[2];
  uint64_t to[3];
  uint32_t kind;         // kind of the PairPlace with address to[0]
  uint32_t scaled_kind;  // the same for to[1], the place of the scaled copy of the result

  __device__ __forceinline__ Prefetched() {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      value[i] = i < 4 || program::kAnyBias || program::kAnyOutScaled ? __uint_as_float(ptx::zero())
                                                                      : 0.0f;
    number[0] = number[1] = ptx::zero();
#pragma unroll
    for (uint64_t& address : to) address = ptx::zero();
    kind = scaled_kind = ptx::zero();
  }

  __device__ __forceinline__ void set_place(const PairPlace& place) {
    to[0] = place.address;
    kind = place.kind;
  }
  __device__ __forceinline__ void set_scaled_place(const PairPlace& place) {
    to[1] = place.address;
    scaled_kind = place.kind;
  }
  __device__ __forceinline__ PairPlace place() const { return {to[0], kind}; }
  __device__ __forceinline__ PairPlace scaled_place() const { return {to[1], scaled_kind}; }
};

__device__ __forceinline__ uint32_t live_end(const Stage& stage, const ProductInput& p) {
  if (p.row_count == kNone) return p.row_end;
  const uint32_t count = static_cast<uint32_t>(constant_integer(stage.tensors[p.row_count], 0, 0));
  return max_of(p.row_begin, min_of(p.row_end, count));
}

// The number of groups of rows: 1 if the instruction has rows for only one, live or not; else the
// number of groups with live rows.
__device__ __forceinline__ uint32_t num_groups(const Stage& stage, const ProductInput& p) {
  if (p.row_end - p.row_begin <= kGroupRows) return 1;
  return ceil_div(live_end(stage, p) - p.row_begin, kGroupRows);
}

// The row of x for a row of the result.
__device__ __forceinline__ uint32_t x_row(const Stage& stage, const ProductInput& p, uint32_t row) {
  if (p.row_index == kNone) return row;
  const uint32_t found =
      static_cast<uint32_t>(constant_integer(stage.tensors[p.row_index], row, 0));
  if (found >= p.x_rows) stop_instruction(Fault::kRowIndex, row, 0, found, p.x_rows);
  return found;
}

// The loader: stream the weights, page by page, in the order above.
__device__ __forceinline__ void load_product(const Stage& stage, const ProductInput& p,
                                             const WeightRows& weights, Loader& loader) {
  const Tiling& tiling = p.tiling;
  const uint32_t groups = num_groups(stage, p), chunks = tiling.chunks();
#pragma unroll 1
  for (uint32_t group = 0; group < groups; ++group)
#pragma unroll 1
    for (uint32_t first = 0; first < tiling.units; first += kBlockUnits)
#pragma unroll 1
      for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        const uint32_t end = min_of(first + kBlockUnits, tiling.units);
        const uint32_t first_page = chunk * kChunkPages;
        const uint32_t end_page = first_page + tiling.pages_of(chunk);
#pragma unroll 1
        for (uint32_t unit = first; unit < end; ++unit) {
          const uint64_t from = weights.unit(unit);
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
__device__ __forceinline__ void read_ragged(const Stage& stage, const ProductInput& p, uint32_t row,
                                            uint32_t column, float (&value)[kCount]) {
#pragma unroll
  for (uint32_t j = 0; j < kCount; ++j)
    value[j] = column + j < p.tiling.k ? read_element(stage.tensors[p.x], row,
                                                      p.first_column() + column + j, stage.tag, p.x)
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

__device__ __forceinline__ ProductInput no_input() {
  return {{ptx::zero(), ptx::zero()},
          ptx::zero(),
          ptx::zero() != 0,
          ptx::zero(),
          ptx::zero(),
          ptx::zero(),
          ptx::zero(),
          ptx::zero(),
          ptx::zero(),
          ptx::zero(),
          __uint_as_float(ptx::zero()),
          ptx::zero()};
}

// Delay stores, for tests; see kHoldStores.
__device__ __forceinline__ void hold_stores(uint32_t times) {
  if constexpr (kHoldStores > 0)
    for (uint32_t i = 0; i < times; ++i) __nanosleep(kHoldStores);
}

// ---- Sums.

// A warp's tiles of one page.
struct PageTiles {
  ptx::Words4 tile[kTilesPerWarp];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (ptx::Words4& t : tile) t = ptx::zero4();
  }

  __device__ __forceinline__ void load(uint32_t page_address, uint32_t warp) {
    const uint32_t from = page_address + warp * kTileBytes + lane_index() * 16;
#pragma unroll
    for (uint32_t i = 0; i < kTilesPerWarp; ++i)
      tile[i] = ptx::load_shared4(from + i * kNumConsumers * kTileBytes);
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

  // Add the products of tile i.
  __device__ __forceinline__ void multiply(uint32_t i, const ptx::Words4& a, const ptx::Words4& w) {
    ptx::mma(sum[i % 2], a, w.x, w.y);
    ptx::mma(sum[2 + i % 2], a, w.z, w.w);
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
      float x = sum[0][0] + sum[1][0] + (sum[2][2] + sum[3][2]);
      float y = sum[0][1] + sum[1][1] + (sum[2][3] + sum[3][3]);
      if (lane / 4 < kGroupRows) {
        const uint32_t address = partials + 4 * (lane / 4 * kUnitRows + lane % 4 * 2);
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

// Call `visitor` with a null pointer of the plan type of a product instruction.
template <class Used, class Visitor>
__device__ __forceinline__ void dispatch_product(const Stage& stage, Visitor&& visitor) {
  Used::dispatch(stage.words.header.opcode, [&]<class Instruction>(Instruction*) {
    if constexpr (IsProduct<Instruction>)
      visitor(static_cast<typename Kernel<Instruction>::Plan*>(nullptr));
  });
}

}  // namespace megavm
