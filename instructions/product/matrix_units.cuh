// How matrix products finish whole units: a lane has one of the two units that its warp has of a
// block, and every sixteenth row. While it finishes a row it asks for what the next one needs.
//
// NOTE: fetching the code is a good part of the time of an epilogue: a warp runs through it once for
// a few rows. So there is one copy for both blocks, whose sums take the same registers in turn, and
// it is short. There is a copy for each part of the rows: what is staged occupies no registers then,
// and nothing spills.
#pragma once

#include "instructions/product/epilogue.cuh"
#include "instructions/product/matrix_sums.cuh"

namespace megavm {

template <class Instruction, class Finisher>
struct MatrixUnits : MatrixSizes {
  using Kept = typename Epilogue<Instruction>::Kept;
  using OfRow = typename Epilogue<Instruction>::OfRow;
  using OfUnit = typename Epilogue<Instruction>::OfUnit;
  using Asked = typename Epilogue<Instruction>::Asked;
  static constexpr uint32_t kTurnRows = kLanes / kUnitsOfWarp;  // rows of a warp at a time

  const Finisher& finisher;
  const Epilogue<Instruction>& epilogue;
  const MatrixRows rows;  // that this warpgroup finishes, among those of the group
  const uint32_t of_warp = lane_index() % kUnitsOfWarp, lane_row = lane_index() / kUnitsOfWarp;

  __device__ __forceinline__ void finish(const MatrixGroup& group, MatrixSums& sums) const {
#pragma unroll 1
    for (uint32_t i = 0; i < finisher.blocks_of(group); ++i) {
      const uint32_t unit = finisher.block_of(group, i) * kBlockUnits +
                            finisher.consumer_.warp() % 4 * kUnitsOfWarp + of_warp;
      const uint32_t end = unit < finisher.order_.units ? rows.end() : 0;
      Place place = {finisher.product_.pair(unit, 0), rows.first / kTurnRows * kTurnRows + lane_row,
                     end};
      if (end > 0) epilogue.begin_unit(place.pair, place.of_unit);
      ask(place.row, place);
      finish_parts(sums, place);
      sums.next_block();
    }
  }

 private:
  // Where a lane is: its pairs, and its next row, which is below `end` if there is one.
  struct Place {
    uint32_t pair, row, end;
    OfUnit of_unit = {};
    Asked asked = {};
  };

  __device__ __forceinline__ bool has(uint32_t row, const Place& place) const {
    return row >= rows.first && row < place.end;
  }
  __device__ __forceinline__ OfRow found(uint32_t row) const {
    return finisher.template found<OfRow>(row);
  }
  __device__ __forceinline__ void ask(uint32_t row, Place& place) const {
    if (has(row, place))
      epilogue.ask(finisher.rows_.first + row, found(row), place.of_unit, place.asked);
  }

  template <uint32_t kPart = 0>
  __device__ __forceinline__ void finish_parts(const MatrixSums& sums, Place& place) const {
    if constexpr (kPart < MatrixSums::kParts) {
      constexpr uint32_t kFirst = kPart * kStagedRows;
      if (kFirst >= rows.end()) return;
      if (kFirst + kStagedRows > rows.first) {
        const uint32_t from = finisher.stage_of(finisher.consumer_.warp());
        __syncwarp();
        sums.stage<kPart>(from);
        __syncwarp();
        const uint32_t turns = min_of(kFirst + kStagedRows, rows.end());
#pragma unroll 1
        for (uint32_t turn = max_of(kFirst, rows.first / kTurnRows * kTurnRows); turn < turns;
             turn += kTurnRows)
          finish_turn(from + turn % kStagedRows * kStagedRowBytes, place);
      }
      finish_parts<kPart + 1>(sums, place);
    }
  }

  // Finish a row, whose sums are staged in the rows from `from` on.
  __device__ __forceinline__ void finish_turn(uint32_t from, Place& place) const {
    const uint32_t row = place.row;
    const Asked asked = place.asked;
    place.row += kTurnRows;
    ask(place.row, place);
    Kept kept = {};
    if (has(row, place)) {
      const uint32_t at = from + staged_at(lane_row, of_warp * kUnitRows);
      const ptx::Words4 low = ptx::load_shared4(at), high = ptx::load_shared4(at ^ 16);
      float scale = 1.0f;
      if (finisher.product_.x_squares != kNone)
        scale = __uint_as_float(ptx::load_shared(scratch_at(4 * row)));
      const auto scaled = [&](uint32_t x, uint32_t y) {
        return PairSums{__uint_as_float(x) * scale, __uint_as_float(y) * scale};
      };
      const UnitPairs unit_sums = {{scaled(low.x, low.y), scaled(low.z, low.w),
                                    scaled(high.x, high.y), scaled(high.z, high.w)}};
      epilogue.finish_unit(finisher.rows_.first + row, found(row), place.pair, unit_sums,
                           place.of_unit, asked, kept);
    }
    if constexpr (kWordsOf<Kept> > 0)
      if (epilogue.keeps()) finisher.keep(kept, row, kUnitsOfWarp);
  }
};

}  // namespace megavm
