// The input of products of several rows: a warp holds its operands A in registers.
#pragma once

#include "instructions/product/product.cuh"

namespace megavm {

constexpr uint32_t kChunkTiles = kChunkPages * kTilesPerWarp;  // a warp's tiles of a unit's chunk
// A *piece* is a lane's columns of a row of x in one tile: 16 bytes in the weights' element type.
constexpr uint32_t kPieceColumns = kTileColumns / 4;

// A warp's operands A for a chunk of a group's rows of x. Of each eight rows of the group, a lane
// holds row lane / 4.
class RowsInput {
 public:
  __device__ __forceinline__ RowsInput(const Stage& stage, const Product& input,
                                       const Consumer& consumer)
      : stage_(stage), input_(input), consumer_(consumer) {
#pragma unroll
    for (ptx::Words4& words : words_) words = ptx::zero4();
  }

  // The operands for the warp's tile i of the chunk: one of 8 rows for both products, or one of 16
  // rows for each.
  __device__ __forceinline__ const ptx::Words4& first(uint32_t i) const {
    return words_[i * kGroupEights];
  }
  __device__ __forceinline__ const ptx::Words4& second(uint32_t i) const {
    return words_[i * kGroupEights + kGroupEights - 1];
  }

  // Begin a group whose first `rows` rows are live. Lanes of dead rows read a live row instead.
  __device__ __forceinline__ void begin(uint32_t first_row, uint32_t rows) {
    if (rows == 0) return;
#pragma unroll
    for (uint32_t e = 0; e < kGroupEights; ++e)
      x_row_[e] = x_row(stage_, input_, first_row + min_of(8 * e + lane_index() / 4, rows - 1));
  }

  // Fetch a chunk of the group's rows, of so many pages of a unit. `live`: whether any row is live.
  // Tagged words are not waited for otherwise: those of dead rows might never be there.
  template <uint32_t kOfUnit>
  __device__ __forceinline__ void fetch(uint32_t chunk, bool live) {
    constexpr uint32_t kTiles = kOfUnit * kTilesPerWarp;
    const Tensor& x = this->x();
    if constexpr (program::kAnyRaggedK) {
      if (live) fetch_ragged<kTiles>(chunk);
    } else if constexpr (!kSingleRow) {
      // Only the kinds of input that the program has are compiled.
      const uint32_t kind = 1u << (2 * is_f32(x) + is_tagged(x));
      if (program::kAnyInputs & kind & 8 && live) fetch<kTiles, true, true>(chunk);
      if (program::kAnyInputs & kind & 4) fetch<kTiles, true, false>(chunk);
      if (program::kAnyInputs & kind & 2 && live) fetch<kTiles, false, true>(chunk);
      if (program::kAnyInputs & kind & 1) fetch<kTiles, false, false>(chunk);
    }
  }

 private:
  // Whether the column exists.
  __device__ __forceinline__ bool exists(uint32_t column) const {
    return !program::kAnyPartialPages || column < input_.tiling.k;
  }

  __device__ __forceinline__ const Tensor& x() const { return stage_.tensors[input_.x]; }

  // The first column of the warp's tile i.
  __device__ __forceinline__ uint32_t tile_column(uint32_t chunk, uint32_t i) const {
    const uint32_t page = chunk * kChunkPages + i / kTilesPerWarp;
    const uint32_t tile = i % kTilesPerWarp * kNumConsumers + consumer_.warp();
    return (page * kTilesPerPage + tile) * kTileColumns;
  }

  // This lane's first column in the warp's tile i.
  __device__ __forceinline__ uint32_t lane_column(uint32_t chunk, uint32_t i) const {
    return tile_column(chunk, i) + lane_index() % 4 * kPieceColumns;
  }

  // A piece as 16 bytes in the weights' element type.
  static __device__ __forceinline__ ptx::Words4 packed(const float (&value)[kPieceColumns]) {
    if constexpr (kF32Weights)
      return {__float_as_uint(value[0]), __float_as_uint(value[1]), __float_as_uint(value[2]),
              __float_as_uint(value[3])};
    else
      return {ptx::pack_bf16(value[0], value[1]), ptx::pack_bf16(value[2], value[3]),
              ptx::pack_bf16(value[4], value[5]), ptx::pack_bf16(value[6], value[7])};
  }

  // Make operands of the packed pieces of tile i, see product.cuh.
  __device__ __forceinline__ void set(uint32_t i, const ptx::Words4 (&piece)[kGroupEights]) {
    if constexpr (kF32Weights) {
      words_[i] = piece[0];
    } else if constexpr (kGroupEights == 1) {
      words_[i] = {piece[0].x, piece[0].z, piece[0].y, piece[0].w};
    } else {
      words_[2 * i] = {piece[0].x, piece[1].x, piece[0].y, piece[1].y};
      words_[2 * i + 1] = {piece[0].z, piece[1].z, piece[0].w, piece[1].w};
    }
#pragma unroll
    for (uint32_t e = 0; e < kGroupEights; ++e) ptx::settle(words_[i * kGroupEights + e]);
  }

  template <uint32_t kTiles, bool kF32, bool kTagged>
  __device__ __forceinline__ void fetch(uint32_t chunk) {
    using Raw = Loaded<kF32, kPieceColumns>;
    // Tiles whose pieces a lane has in flight: all loads are issued before any word is checked.
    constexpr uint32_t kMost = min_of(kTiles, 64 / Raw::kWords);
    constexpr uint32_t kBatch = kTiles % kMost == 0 ? kMost : kTilesPerWarp;
    static_assert(kTiles % kBatch == 0);
    constexpr uint32_t kBytes = Raw::kColumnBytes;
    SourceRow from[kGroupEights];
#pragma unroll
    for (uint32_t e = 0; e < kGroupEights; ++e) from[e] = Raw::row_of(x(), x_row_[e], input_.x);
#pragma unroll
    for (uint32_t first = 0; first < kTiles; first += kBatch) {
      Raw raw[kGroupEights][kBatch];
      uint32_t column[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) column[i] = lane_column(chunk, first + i);
#pragma unroll
      for (uint32_t e = 0; e < kGroupEights; ++e) {
        const uint64_t row = from[e].address + input_.first_column() * kBytes;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
          // NOTE: no load is conditional, even for columns that do not exist. The result of a
          // conditional load merges with another value, and the merge would wait for the load.
          raw[e][i].load(row + (exists(column[i]) ? column[i] : 0) * kBytes);
      }
      if constexpr (kTagged)
#pragma unroll
        for (uint32_t e = 0; e < kGroupEights; ++e)
          await<true>(
              from[e], raw[e], [&](uint32_t i) { return exists(column[i]); },
              [&](uint32_t i) { return input_.first_column() + lane_column(chunk, first + i); },
              true);
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        ptx::Words4 piece[kGroupEights];
#pragma unroll
        for (uint32_t e = 0; e < kGroupEights; ++e) {
          const Raw& r = raw[e][i];
          if constexpr (!kF32 && !kF32Weights) {
            piece[e] = {r.word(0), r.word(1), r.word(2), r.word(3)};
          } else {
            float value[kPieceColumns];
#pragma unroll
            for (uint32_t j = 0; j < kPieceColumns; ++j) value[j] = r.value(j);
            piece[e] = packed(value);
          }
          if (!exists(column[i])) piece[e] = ptx::zero4();
        }
        set(first + i, piece);
      }
    }
  }

  // The same for rows that do not consist of whole tiles, element by element.
  template <uint32_t kTiles>
  __device__ __forceinline__ void fetch_ragged(uint32_t chunk) {
#pragma unroll 1
    for (uint32_t i = 0; i < kTiles; ++i) {
      ptx::Words4 piece[kGroupEights];
#pragma unroll
      for (uint32_t e = 0; e < kGroupEights; ++e) {
        float value[kPieceColumns];
        read_ragged(stage_, input_, x_row_[e], lane_column(chunk, i), value);
        piece[e] = packed(value);
      }
#pragma unroll
      for (uint32_t k = 0; k < kTiles; ++k)
        if (k == i) set(k, piece);
    }
  }

  const Stage& stage_;
  const Product& input_;
  const Consumer& consumer_;
  uint32_t x_row_[kGroupEights] = {};  // the rows of x that this lane holds
  ptx::Words4 words_[kChunkTiles * kGroupEights];
};

}  // namespace megavm
