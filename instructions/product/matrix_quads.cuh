// How matrix products finish quads. A lane finishes four stored rows of the weight, in every eighth
// row of x. The lanes of a warp together have two whole rows of a block, so the warp loads and
// stores these without gaps. A lane finishes two of its rows at a time; meanwhile it asks for what
// the next two need.
//
// NOTE: fetching the code is a good part of the time of an epilogue: a warp runs through it once
// for a few rows. So there is one copy for both blocks and all rows, whose sums take the same
// registers in turn, and it is short.
#pragma once

#include "instructions/product/epilogue.cuh"
#include "instructions/product/matrix_sums.cuh"

namespace megavm {

template <class Instruction, class Finisher>
struct MatrixQuads : MatrixSizes {
  using Kept = typename Epilogue<Instruction>::Kept;
  using OfRow = typename Epilogue<Instruction>::OfRow;
  using OfQuad = typename Epilogue<Instruction>::OfQuad;
  using Asked = typename Epilogue<Instruction>::Asked;
  using Result = typename Epilogue<Instruction>::Result;
  static constexpr uint32_t kQuadRows = 2 * kQuadPairs;  // a quad has so many rows of the weight
  static constexpr uint32_t kLanesOfRow = kBlockRows / kQuadRows;   // lanes with the same row of x
  static constexpr uint32_t kRowStep = 4 * (kLanes / kLanesOfRow);  // from a lane's row to its next
  static constexpr uint32_t kTogether = 2, kTurnRows = kTogether * kRowStep;

  const Finisher& finisher;
  const Epilogue<Instruction>& epilogue;
  const Product& product;
  const MatrixRows rows;  // that this warpgroup finishes, among those of the group
  const uint32_t number = lane_index() % kLanesOfRow;  // the lane's quad, among those of a block

  __device__ __forceinline__ void finish(const MatrixGroup& group, MatrixSums& sums) const {
#pragma unroll 1
    for (uint32_t i = 0; i < finisher.blocks_of(group); ++i) {
      const uint32_t unit = first_unit_of(group, i) + number * kQuadRows / kUnitRows;
      Place place = {
          first_unit_of(group, i),
          product.pair(unit, number % (kUnitPairs / kQuadPairs) * kQuadPairs),
          rows.first + warp_index() % 4 * (kLanes / kLanesOfRow) + lane_index() / kLanesOfRow,
          unit < product.tiling.units ? rows.end() : 0};
      if (place.end > 0) epilogue.begin_quad(place.pair, place.of_quad);
      ask(place);
      finish_rows(finisher.staged(group), sums, place);
      sums.next_block();
    }
  }

 private:
  // Where a lane is: its block and pairs, and its next row, which is below `end` if there is one.
  struct Place {
    uint32_t first_unit, pair, row, end;
    OfQuad of_quad = {};
    Asked asked[kTogether] = {};
  };

  __device__ __forceinline__ uint32_t first_unit_of(const MatrixGroup& group, uint32_t i) const {
    return finisher.block_of(group, i) * kBlockUnits;
  }
  __device__ __forceinline__ OfRow found(uint32_t row) const {
    return finisher.template found<OfRow>(row);
  }
  __device__ __forceinline__ void ask(Place& place) const {
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      const uint32_t row = place.row + j * kRowStep;
      const bool active = row < place.end;
      epilogue.ask({finisher.rows_.first + row, place.pair, active}, found(active ? row : 0),
                   place.of_quad, place.asked[j]);
    }
  }

  // Finish the rows of a block, up to kStagedRows at a time.
  __device__ __forceinline__ void finish_rows(uint32_t from, MatrixSums& sums, Place& place) const {
    static_assert(kRows / 2 % kTurnRows == 0);
#pragma unroll 1
    for (uint32_t first = rows.first; first < rows.end(); first += kStagedRows) {
      // All warps of the warpgroup come here: none has ended since they all met.
      ptx::sync_warpgroup(warpgroup_index());
      sums.stage_next(from);
      ptx::sync_warpgroup(warpgroup_index());
      const uint32_t end = min_of(first + kStagedRows, rows.end());
#pragma unroll 1
      for (uint32_t turn = first; turn < end; turn += kTurnRows) finish_turn(from, place);
      if constexpr (kWordsOf<Kept> > 0)
        if (epilogue.keeps()) keep(from, first, place.first_unit);
    }
  }

  __device__ __forceinline__ uint32_t staged_row(uint32_t row) const {
    return (row - rows.first) % kStagedRows;
  }

  __device__ __forceinline__ void finish_turn(uint32_t from, Place& place) const {
    const uint32_t row = place.row;
    Result result[kTogether];
    OfRow of_row[kTogether];
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      const uint32_t mine = row + j * kRowStep;
      of_row[j] = found(mine);
      const ptx::Words4 words =
          ptx::load_shared4(from + staged_at(staged_row(mine), number * kQuadRows));
      float scale = 1.0f;
      if (product.x_squares != kNone) scale = finisher.scale_of_row(mine);
      const QuadSums sums = {
          {{__uint_as_float(words.x) * scale, __uint_as_float(words.y) * scale},
           {__uint_as_float(words.z) * scale, __uint_as_float(words.w) * scale}}};
      result[j] = epilogue.combine(sums, place.of_quad, place.asked[j]);
      if constexpr (kWordsOf<Kept> > 0)
        if (epilogue.keeps()) stage(from, mine, result[j]);
    }
    place.row += kTurnRows;
    ask(place);
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      const uint32_t mine = row + j * kRowStep;
      epilogue.store({finisher.rows_.first + mine, place.pair, mine < place.end}, of_row[j],
                     place.of_quad, result[j]);
    }
  }

  // Results that are kept take the place of their sums.
  __device__ __forceinline__ void stage(uint32_t to, uint32_t row, const Result& result) const {
    const auto words = __builtin_bit_cast(ptx::Words4, result);
    ptx::store_shared4(to + staged_at(staged_row(row), number * kQuadRows), words);
  }

  // Keep what there is to keep of the staged results of a block. A thread goes through every second
  // quad of a row: lanes that share more would compare what they have, for each row.
  // NOTE: eight lanes that load at the same time have rows and quads in all banks (staged_at).
  __device__ __forceinline__ void keep(uint32_t from, uint32_t first_row,
                                       uint32_t first_unit) const {
    ptx::sync_warpgroup(warpgroup_index());
    const uint32_t lane = lane_index(), quad = lane % 2, warp = warp_index() % 4;
    const uint32_t own = warp * (kLanes / 2) + lane / 16 * 8 + lane / 2 % 4 * 2 + lane / 8 % 2;
    const uint32_t row = first_row + own;
    if (own >= kStagedRows || row >= rows.end()) return;
    Kept kept = {};
    const uint32_t units = min_of(kBlockUnits, product.tiling.units - first_unit);
#pragma unroll 4
    for (uint32_t unit = 0; unit < units; ++unit) {
      const uint32_t at = staged_at(own, unit * kUnitRows + quad * kQuadRows);
      epilogue.keep(product.pair(first_unit + unit, quad * kQuadPairs),
                    __builtin_bit_cast(Result, ptx::load_shared4(from + at)), kept);
    }
    finisher.keep(kept, warpgroup_index() * 4 + quad, row);
  }
};

}  // namespace megavm
