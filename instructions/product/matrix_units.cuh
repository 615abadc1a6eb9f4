// How matrix products finish whole units: a lane has one of the two units that its warp has of a
// block, and every sixteenth row. It finishes kTogether of them at a time, so that what one waits
// for is hidden by the other.
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
  static constexpr uint32_t kTurns = kStagedRows / kTurnRows, kTogether = min_of(2, kTurns);

  const Finisher& finisher;
  const Epilogue<Instruction>& epilogue;
  const MatrixGroup& group;
  const MatrixSums& sums;
  const Staged from;
  uint32_t first, apart;  // turns of this warp
  uint32_t of_warp, lane_row;

  __device__ __forceinline__ MatrixUnits(const Finisher& finisher,
                                         const Epilogue<Instruction>& epilogue,
                                         const MatrixGroup& group, const MatrixSums& sums)
      : finisher(finisher),
        epilogue(epilogue),
        group(group),
        sums(sums),
        from(finisher.staged_in(group)),
        first(group.is_shared() ? warpgroup_index() : 0),
        apart(group.is_shared() ? kWarpgroups : 1),
        of_warp(lane_index() % kUnitsOfWarp),
        lane_row(lane_index() / kUnitsOfWarp) {}

  // NOTE: one copy of the code for each part of each block. So the sums that are staged already
  // occupy no registers, and nothing spills.
  template <uint32_t kBlock = 0>
  __device__ __forceinline__ void finish() const {
    if constexpr (kBlock < kMaxBlocks) {
      if (kBlock >= finisher.blocks_of(group)) return;
      const uint32_t unit = finisher.block_of(group, kBlock) * kBlockUnits +
                            finisher.consumer_.warp() % 4 * kUnitsOfWarp + of_warp;
      const uint32_t pair = finisher.product_.pair(unit, 0);
      const uint32_t rows = unit < finisher.order_.units ? finisher.rows_.count : 0;
      OfUnit of_unit = {};
      if (rows > 0) epilogue.begin_unit(pair, of_unit);
      Asked asked[kTogether] = {};
      ask(0, first, rows, of_unit, asked);
      finish_parts<kBlock>(pair, rows, of_unit, asked);
      finish<kBlock + 1>();
    }
  }

 private:
  // The row of turn `number` of a part, among the rows of the group.
  __device__ __forceinline__ uint32_t row_of(uint32_t part, uint32_t number) const {
    return part * kStagedRows + number * kTurnRows + lane_row;
  }

  // Ask for what the rows of a turn need, and of the turns after it that come with it.
  __device__ __forceinline__ void ask(uint32_t part, uint32_t turn, uint32_t rows,
                                      const OfUnit& of_unit, Asked (&asked)[kTogether]) const {
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      const uint32_t number = turn + j * apart, row = row_of(part, number);
      if (number < kTurns && row < rows)
        epilogue.ask(finisher.rows_.first + row, finisher.template found<OfRow>(row), of_unit,
                     asked[j]);
    }
  }

  template <uint32_t kBlock, uint32_t kPart = 0>
  __device__ __forceinline__ void finish_parts(uint32_t pair, uint32_t rows, const OfUnit& of_unit,
                                               Asked (&asked)[kTogether]) const {
    if constexpr (kPart < MatrixSums::kParts) {
      if (kPart * kStagedRows >= finisher.rows_.count) return;
      finisher.stage(group, sums, kBlock, kPart);
#pragma unroll 1
      for (uint32_t turn = first; turn < kTurns; turn += kTogether * apart) {
        Asked next[kTogether] = {};
        if (turn + kTogether * apart < kTurns)
          ask(kPart, turn + kTogether * apart, rows, of_unit, next);
        else if (kPart + 1 < MatrixSums::kParts)
          ask(kPart + 1, first, rows, of_unit, next);
#pragma unroll
        for (uint32_t j = 0; j < kTogether; ++j) {
          finish_turn(kPart, turn + j * apart, pair, rows, of_unit, asked[j]);
          asked[j] = next[j];
        }
      }
      finish_parts<kBlock, kPart + 1>(pair, rows, of_unit, asked);
    }
  }

  __device__ __forceinline__ void finish_turn(uint32_t part, uint32_t number, uint32_t pair,
                                              uint32_t rows, const OfUnit& of_unit,
                                              const Asked& asked) const {
    const uint32_t row = row_of(part, number);
    Kept kept = {};
    if (number < kTurns && row < rows) {
      const uint32_t place =
          staged_at(lane_row, of_warp * kUnitRows) + number * kTurnRows * kStagedRowBytes;
      const ptx::Words4 low = from.load4(place), high = from.load4(place ^ 16);
      float scale = 1.0f;
      if (finisher.product_.x_squares != kNone)
        scale = __uint_as_float(ptx::load_shared(scratch_at(4 * row)));
      const auto scaled = [&](uint32_t x, uint32_t y) {
        return PairSums{__uint_as_float(x) * scale, __uint_as_float(y) * scale};
      };
      const UnitPairs unit_sums = {{scaled(low.x, low.y), scaled(low.z, low.w),
                                    scaled(high.x, high.y), scaled(high.z, high.w)}};
      epilogue.finish_unit(finisher.rows_.first + row, finisher.template found<OfRow>(row), pair,
                           unit_sums, of_unit, asked, kept);
    }
    if constexpr (kWordsOf<Kept> > 0)
      if (epilogue.keeps()) finisher.keep(kept, row, kUnitsOfWarp);
  }
};

}  // namespace megavm
