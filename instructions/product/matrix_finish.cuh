// How matrix products finish their sums: each warp stages its sums in the pages of the last step,
// and finishes them by the epilogue of the instruction (epilogue.cuh), units at a time
// (matrix_units.cuh), or else pairs. Sums that are the results themselves it stores at once.
//
// In a shared group, which both warpgroups multiplied, each gives the other its sums of half of the
// rows, adds those of the other half, and finishes these.
#pragma once

#include "instructions/product/matrix_units.cuh"

namespace megavm {

template <class Used>
class MatrixFinisher : MatrixSizes {
 public:
  __device__ __forceinline__ MatrixFinisher(const Stage& stage, const Product& p,
                                            Consumer& consumer, const MatrixOrder& order,
                                            const MatrixRows& rows)
      : stage_(stage), product_(p), consumer_(consumer), order_(order), rows_(rows) {}

  // Before the first group.
  __device__ __forceinline__ void begin_rows() const {
    forget_kept();
    look_up_rows();
  }

  // Finish the sums of a group, which the pages of its last step take. The sums are gone then.
  template <class Instruction>
  __device__ __forceinline__ void finish(const Epilogue<Instruction>& epilogue,
                                         const MatrixGroup& group, MatrixSums& sums) const {
    MatrixRows rows = {0, rows_.count};
    if (group.is_shared()) rows = share(sums.sum[0]);
    if constexpr (Epilogue<Instruction>::kPlain)
      if (epilogue.is_plain()) {
        hold_stores(consumer_.warp());
        return store_sums(epilogue, group, rows, sums);
      }
    // The other warpgroup has read what this one gave it.
    if (group.is_shared()) consumer_.sync();
    // Units add squares up in another order than pairs: not where the order must be the same
    // whatever the alignment of a rank's columns.
    if constexpr (Epilogue<Instruction>::kUnits && !program::kFixedOrder)
      if (product_.pair_begin % kUnitPairs == 0 && product_.pair_end % kUnitPairs == 0 &&
          epilogue.takes_units())
        return MatrixUnits<Instruction, MatrixFinisher>{{}, *this, epilogue, rows}.finish(group,
                                                                                         sums);
    finish_pairs(epilogue, group, rows, sums);
  }

  // When all pairs of these rows are finished: a warp for each row stores what all warps kept.
  __device__ __forceinline__ void end_rows() const {
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) {
      using Kept = typename Epilogue<I>::Kept;
      if constexpr (kWordsOf<Kept> > 0) {
        const Epilogue<I> epilogue(stage_);
        if (!epilogue.keeps()) return;
        consumer_.sync();
#pragma unroll 1
        for (uint32_t row = consumer_.warp(); row < rows_.count; row += kNumConsumers) {
          Kept all = {};
          if (lane_index() < kNumConsumers)
            all = __builtin_bit_cast(Kept, ptx::load_shared2(kept_at(lane_index(), row)));
          epilogue.end(rows_.first + row, merge_lanes(all));
        }
      }
    });
  }

 private:
  template <class, class>
  friend struct MatrixUnits;

  // Finish a pair at a time. A lane has one of the warp's eight pairs of a block, and every fourth
  // row. It looks up kAtOnce rows before it finishes the first of them.
  template <class Instruction>
  __device__ __forceinline__ void finish_pairs(const Epilogue<Instruction>& epilogue,
                                               const MatrixGroup& group, const MatrixRows& rows,
                                               MatrixSums& sums) const {
    using Kept = typename Epilogue<Instruction>::Kept;
    constexpr uint32_t kAtOnce = Epilogue<Instruction>::kAtOnce;
    constexpr uint32_t kRowStep = kLanes / kPairsOfWarp, kTurnRows = kAtOnce * kRowStep;
    static_assert(kRowStep == kMoveRows && kStagedRows / 2 % kTurnRows == 0);
    const uint32_t pair_in_warp = lane_index() % kPairsOfWarp;
    const uint32_t from = stage_of(consumer_.warp());
    hold_stores(consumer_.warp());
#pragma unroll 1
    for (uint32_t i = 0; i < blocks_of(group); ++i) {
      const uint32_t in_block = consumer_.warp() % 4 * kPairsOfWarp + pair_in_warp;
      const uint32_t unit = block_of(group, i) * kBlockUnits + in_block / kUnitPairs;
      const uint32_t pair = product_.pair(unit, in_block % kUnitPairs);
      const bool exists = unit < order_.units && product_.finishes(pair);
      // This thread's next row, among the live rows.
      uint32_t row = rows.first + lane_index() / kPairsOfWarp;
      typename Epilogue<Instruction>::Early early = {};
      if (exists && row < rows.end()) epilogue.begin(rows_.first + row, pair, early);
#pragma unroll 1
      for (uint32_t begin = rows.first; begin < rows.end(); begin += kTurnRows) {
        if (begin % kStagedRows == 0 || begin == rows.first)
          stage(sums, begin / kStagedRows, from);
        const auto is_active = [&](uint32_t j) {
          return exists && row + j * kRowStep < rows.end();
        };
        typename Epilogue<Instruction>::Early of_row[kAtOnce];
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          of_row[j] = early;
          const uint32_t number = rows_.first + row + j * kRowStep;
          if (!is_active(j)) continue;
          epilogue.move(number, pair, j * kRowStep, of_row[j]);
          epilogue.await(number, pair, of_row[j]);
        }
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          const uint32_t number = row + j * kRowStep;
          const ptx::Words2 words =
              ptx::load_shared2(from + staged_at(number % kStagedRows, 2 * pair_in_warp));
          float scale = 1.0f;
          if (product_.x_squares != kNone)
            scale = __uint_as_float(ptx::load_shared(scratch_at(4 * number)));
          const PairSums pair_sums = {__uint_as_float(words.x) * scale,
                                      __uint_as_float(words.y) * scale};
          Kept kept = {};
          epilogue.finish({rows_.first + number, pair, is_active(j), 1}, pair_sums, of_row[j],
                          kept);
          if constexpr (kWordsOf<Kept> > 0)
            if (epilogue.keeps()) keep(kept, number, kPairsOfWarp);
        }
        row += kTurnRows;
        if (exists && row < rows.end())
          epilogue.move(rows_.first + row, pair, kTurnRows, early);
      }
      sums.next_block();
    }
  }

  // Stage a part of the rows of the first block (MatrixSums::stage).
  // NOTE: a switch, because ptxas makes a jump of it. Of conditions it makes predicates, and runs
  // through the stores of all parts for each.
  __device__ __forceinline__ void stage(const MatrixSums& sums, uint32_t part, uint32_t to) const {
    static_assert(MatrixSums::kParts <= 2);
    __syncwarp();
    switch (part) {
      case 0:
        sums.stage<0>(to);
        break;
      case 1:
        sums.stage<MatrixSums::kParts - 1>(to);
        break;
    }
    __syncwarp();
  }

  // Results that are the sums themselves leave the registers at once: no warp stages anything. A
  // store of a warp is eight neighbouring columns of four rows, whole sectors.
  template <class Plain>
  __device__ __forceinline__ void store_sums(const Plain& epilogue, const MatrixGroup& group,
                                             const MatrixRows& rows, MatrixSums& sums) const {
    constexpr uint32_t kEights = kRows / 8;
    if (group.is_shared())
      return rows.first == 0
                 ? store_eights<0, kEights / 2>(epilogue, group.first, sums.sum[0])
                 : store_eights<kEights / 2, kEights>(epilogue, group.first, sums.sum[0]);
#pragma unroll 1
    for (uint32_t i = 0; i < blocks_of(group); ++i) {
      store_eights<0, kEights>(epilogue, block_of(group, i), sums.sum[0]);
      sums.next_block();
    }
  }

  // Exchange the sums of a shared group. Returns the rows of which this warpgroup has all sums.
  __device__ __forceinline__ MatrixRows share(float (&sum)[kRows / 2]) const {
    constexpr uint32_t kHalf = kRows / 2, kEights = kHalf / 8;
    if (warpgroup_index() == 0) {
      exchange_sums<kEights, 0>(sum);
      return {0, min_of(kHalf, rows_.count)};
    }
    exchange_sums<0, kEights>(sum);
    return {kHalf, max_of(kHalf, rows_.count) - kHalf};
  }

  // Give the other warpgroup the sums of the eights of rows from kGiven on, and add its sums to
  // those from kKept on.
  template <uint32_t kGiven, uint32_t kKept>
  __device__ __forceinline__ void exchange_sums(float (&sum)[kRows / 2]) const {
    constexpr uint32_t kFours = kRows / 16;  // each has two rows of x and of the weight
    static_assert(kFours * kLanes * 16 <= kStagedBytes);
    const uint32_t warp = consumer_.warp(), lane = 16 * lane_index();
    const uint32_t own = stage_of(warp) + lane, other = stage_of(warp ^ 4) + lane;
#pragma unroll
    for (uint32_t i = 0; i < kFours; ++i) {
      const float (&s)[kRows / 2] = sum;
      constexpr uint32_t kAt = 4 * kGiven;
      ptx::store_shared4(
          own + i * kLanes * 16,
          {__float_as_uint(s[kAt + 4 * i]), __float_as_uint(s[kAt + 4 * i + 1]),
           __float_as_uint(s[kAt + 4 * i + 2]), __float_as_uint(s[kAt + 4 * i + 3])});
    }
    consumer_.sync();
#pragma unroll
    for (uint32_t i = 0; i < kFours; ++i) {
      const ptx::Words4 words = ptx::load_shared4(other + i * kLanes * 16);
      float* kept = sum + 4 * (kKept + i);
      kept[0] += __uint_as_float(words.x), kept[1] += __uint_as_float(words.y);
      kept[2] += __uint_as_float(words.z), kept[3] += __uint_as_float(words.w);
    }
  }

  // Store the sums of a block and of eight rows of x at a time, of the eights [kFirst, kEnd).
  template <uint32_t kFirst, uint32_t kEnd, class Plain>
  __device__ __forceinline__ void store_eights(const Plain& epilogue, uint32_t block,
                                               const float (&sum)[kRows / 2]) const {
    const uint32_t lane = lane_index(), row = 8 * kFirst + lane % 4 * 2;
    const uint64_t row_bytes = epilogue.plain_at(1, 0) - epilogue.plain_at(0, 0);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t unit = block * kBlockUnits + consumer_.warp() % 4 * kUnitsOfWarp + half;
      const uint32_t column = 2 * product_.pair(unit, 0) + lane / 4;
      if (unit >= order_.units || !epilogue.has_column(column)) continue;
      uint64_t to = epilogue.plain_at(rows_.first + row, column);
#pragma unroll
      for (uint32_t i = 0; i < kEnd - kFirst; ++i, to += 8 * row_bytes)
#pragma unroll
        for (uint32_t next = 0; next < 2; ++next)
          // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
          if (row + 8 * i + next < rows_.count)
            ptx::store(to + next * row_bytes,
                       __float_as_uint(sum[4 * (kFirst + i) + 2 * half + next]));
    }
  }

  // Where a warp stages its sums, in the pages of the last step.
  __device__ __forceinline__ uint32_t stage_of(uint32_t warp) const {
    constexpr uint32_t kOfPage = kPageBytes / kStagedBytes;
    PageCursor page = consumer_.page;
    page.advance(warp / kOfPage);
    return page.address() + warp % kOfPage * kStagedBytes;
  }

  // Blocks of the group that this warpgroup finishes, and block i of them. In a shared group both
  // warpgroups finish its block, and take rows in turn.
  __device__ __forceinline__ uint32_t blocks_of(const MatrixGroup& group) const {
    if (group.is_shared()) return 1;
    return (group.blocks + kWarpgroups - 1 - warpgroup_index()) / kWarpgroups;
  }
  __device__ __forceinline__ uint32_t block_of(const MatrixGroup& group, uint32_t i) const {
    return group.first + (group.is_shared() ? 0 : warpgroup_index() + i * kWarpgroups);
  }

  // The result of the epilogue's look_up of a row.
  template <class OfRow>
  __device__ __forceinline__ OfRow found(uint32_t row) const {
    if constexpr (kWordsOf<OfRow> == 0)
      return {};
    else
      return __builtin_bit_cast(OfRow,
                                ptx::load_shared2(scratch_at(kOfRowsAt) + kOfRowBytes * row));
  }

  // Let the epilogue look up what it needs of each row, a row by a thread, for all warps.
  __device__ __forceinline__ void look_up_rows() const {
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) {
      if constexpr (Epilogue<I>::kUnits) {
        using OfRow = typename Epilogue<I>::OfRow;
        if constexpr (kWordsOf<OfRow> > 0) {
          static_assert(sizeof(OfRow) == kOfRowBytes);
          for (uint32_t row = consumer_.thread(); row < rows_.count; row += kNumConsumerThreads) {
            const auto words =
                __builtin_bit_cast(ptx::Words2, Epilogue<I>(stage_).look_up(rows_.first + row));
            ptx::store_shared2(scratch_at(kOfRowsAt) + kOfRowBytes * row, words.x, words.y);
          }
          consumer_.sync_alive();
        }
      }
    });
  }

  __device__ __forceinline__ uint32_t kept_at(uint32_t warp, uint32_t row) const {
    return scratch_at(kKeptAt) + (warp * kRows + row) * kKeptBytes;
  }

  __device__ __forceinline__ void forget_kept() const {
    for (uint32_t i = lane_index(); i < kRows; i += kLanes)
      ptx::store_shared2(kept_at(consumer_.warp(), i), 0, 0);
    __syncwarp();
  }

  // Add what the lanes of a row of x kept to what the warp kept of it.
  // `lanes`: neighbouring lanes have the same row.
  template <class Kept>
  __device__ __forceinline__ void keep(Kept kept, uint32_t row, uint32_t lanes) const {
    static_assert(sizeof(Kept) == kKeptBytes);
    kept = merge_lanes(kept, lanes);
    const uint32_t at = kept_at(consumer_.warp(), row);
    if (lane_index() % lanes != 0 || row >= rows_.count) return;
    Kept all = __builtin_bit_cast(Kept, ptx::load_shared2(at));
    all.merge(kept);
    const auto words = __builtin_bit_cast(ptx::Words2, all);
    ptx::store_shared2(at, words.x, words.y);
  }

  const Stage& stage_;
  const Product& product_;
  Consumer& consumer_;
  const MatrixOrder& order_;
  const MatrixRows& rows_;
};

}  // namespace megavm
