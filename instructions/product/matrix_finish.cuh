// How matrix products finish their sums: a warpgroup stages its sums in the pages of the last step,
// and finishes them by the epilogue of the instruction (epilogue.cuh), quads at a time
// (matrix_quads.cuh), or else pairs. Sums that are the results themselves it stores at once.
//
// In a shared group, which both warpgroups multiplied, each gives the other its sums of half of the
// rows, adds those of the other half, and finishes these.
#pragma once

#include "instructions/product/matrix_quads.cuh"

namespace megavm {

template <class Used>
class MatrixFinisher : MatrixSizes {
 public:
  __device__ __forceinline__ MatrixFinisher(const Stage& stage, Consumer& consumer,
                                            const MatrixRows& rows)
      : stage_(stage), consumer_(consumer), rows_(rows) {}

  // Before the first group.
  __device__ __forceinline__ void begin_rows() const {
    forget_kept();
    look_up_rows();
  }

  // Make the sums of a group complete. Returns the rows that this warpgroup finishes, whose sums
  // come first then.
  __device__ __forceinline__ MatrixRows complete(const MatrixGroup& group, MatrixSums& sums) const {
    return group.is_shared() ? share(sums.sum[0]) : MatrixRows{0, rows_.count};
  }

  // Finish these rows of a group, whose sums are complete and take the pages of its last step. They
  // are gone then.
  template <class Instruction>
  __device__ __forceinline__ void finish(const Epilogue<Instruction>& epilogue,
                                         const MatrixGroup& group, const MatrixRows& rows,
                                         MatrixSums& sums) const {
    // NOTE: looked up anew, because registers that are kept meanwhile are spilled, and come back
    // one after the other from the second-level cache.
    const Product product = epilogue.product();
    hold_stores(consumer_.warp());
    if constexpr (Epilogue<Instruction>::kPlain)
      if (epilogue.is_plain()) return store_sums(epilogue, product, group, rows, sums);
    // Quads round as pairs do, if the compiler joins the same multiplications with additions: not
    // where the bits must be the same whatever the alignment of a rank's columns.
    if constexpr (Epilogue<Instruction>::kQuads && !program::kFixedOrder)
      if (product.pair_begin % kUnitPairs == 0 && product.pair_end % kUnitPairs == 0 &&
          epilogue.takes_quads())
        return MatrixQuads<Instruction, MatrixFinisher>{{}, *this, epilogue, product, rows}.finish(
            group, sums);
    finish_pairs(epilogue, product, group, rows, sums);
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
  friend struct MatrixQuads;

  // Finish a pair at a time. A lane has one of the pairs of a block, and every fourth row. It looks
  // up kAtOnce rows before it finishes the first of them.
  template <class Instruction>
  __device__ __forceinline__ void finish_pairs(const Epilogue<Instruction>& epilogue,
                                               const Product& product, const MatrixGroup& group,
                                               const MatrixRows& rows, MatrixSums& sums) const {
    using Kept = typename Epilogue<Instruction>::Kept;
    constexpr uint32_t kAtOnce = Epilogue<Instruction>::kAtOnce;
    constexpr uint32_t kRowStep = 4, kTurnRows = kAtOnce * kRowStep;
    static_assert(kBlockRows == 2 * kLanes);
    static_assert(kRowStep == kMoveRows && kStagedRows / 2 % kTurnRows == 0);
    const uint32_t from = staged(group);
#pragma unroll 1
    for (uint32_t i = 0; i < turns_of(group); ++i) {
      const uint32_t unit = block_of(group, i) * kBlockUnits + lane_index() / kUnitPairs;
      const uint32_t pair = product.pair(unit, lane_index() % kUnitPairs);
      const bool exists =
          i < blocks_of(group) && unit < product.tiling.units && product.finishes(pair);
      // This thread's next row, among the live rows.
      uint32_t row = rows.first + consumer_.warp() % 4;
      typename Epilogue<Instruction>::Early early = {};
      if (exists && row < rows.end()) epilogue.begin(rows_.first + row, pair, early);
#pragma unroll 1
      for (uint32_t begin = rows.first; begin < all_rows(group, rows); begin += kTurnRows) {
        const uint32_t staged = begin - rows.first;
        if (staged % kStagedRows == 0) stage(sums, staged / kStagedRows, from);
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
        Kept kept[kAtOnce] = {};
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          const uint32_t number = row + j * kRowStep;
          const ptx::Words2 words = ptx::load_shared2(
              from + staged_at((number - rows.first) % kStagedRows, 2 * lane_index()));
          float scale = 1.0f;
          if (product.x_squares != kNone) scale = scale_of_row(number);
          PairSums pair_sums = {__uint_as_float(words.x) * scale, __uint_as_float(words.y) * scale};
          const PairAt at = {rows_.first + number, pair, is_active(j), 1};
          epilogue.complete(at, pair_sums);
          epilogue.finish(at, pair_sums, of_row[j], kept[j]);
        }
        if constexpr (kWordsOf<Kept> > 0)
          if (epilogue.keeps()) keep_of_lanes(kept, row, kRowStep);
        row += kTurnRows;
        if (exists && row < rows.end()) epilogue.move(rows_.first + row, pair, kTurnRows, early);
      }
      sums.next_block();
    }
  }

  // Stage a part of the rows of the first block (MatrixSums::stage), with all consumers, because an
  // epilogue of pairs may end its warp.
  // NOTE: a switch, because ptxas makes a jump of it. Of conditions it makes predicates, and runs
  // through the stores of all parts for each.
  __device__ __forceinline__ void stage(const MatrixSums& sums, uint32_t part, uint32_t to) const {
    static_assert(MatrixSums::kParts <= 2);
    consumer_.sync();
    switch (part) {
      case 0:
        sums.stage<0>(to);
        break;
      case 1:
        sums.stage<MatrixSums::kParts - 1>(to);
        break;
    }
    consumer_.sync();
  }

  // Results that are the sums themselves leave the registers at once: no warp stages anything. A
  // store of a warp is eight neighbouring columns of four rows, whole sectors.
  template <class Plain>
  __device__ __forceinline__ void store_sums(const Plain& epilogue, const Product& product,
                                             const MatrixGroup& group, const MatrixRows& rows,
                                             MatrixSums& sums) const {
    constexpr uint32_t kEights = kRows / 8;
    if (group.is_shared())
      return store_eights<kEights / 2>(epilogue, product, group.first, rows, sums.sum[0]);
#pragma unroll 1
    for (uint32_t i = 0; i < blocks_of(group); ++i) {
      store_eights<kEights>(epilogue, product, block_of(group, i), rows, sums.sum[0]);
      sums.next_block();
    }
  }

  // Exchange the sums of a shared group. Returns the rows of which this warpgroup has all sums. No
  // warp has ended then.
  __device__ __forceinline__ MatrixRows share(float (&sum)[kRows / 2]) const {
    constexpr uint32_t kHalf = kRows / 2;
    if (warpgroup_index() == 0) {
      exchange_sums<kHalf, 0>(sum);
      return {0, min_of(kHalf, rows_.count)};
    }
    exchange_sums<0, kHalf>(sum);
    return {kHalf, max_of(kHalf, rows_.count) - kHalf};
  }

  // Give the other warpgroup the sums of half of the rows, from kGiven on, and add its sums to
  // those from kKept on, which then come first.
  template <uint32_t kGiven, uint32_t kKept>
  __device__ __forceinline__ void exchange_sums(float (&sum)[kRows / 2]) const {
    constexpr uint32_t kFours = kRows / 16;  // each has two rows of x and of the weight
    static_assert(kFours * kLanes * 16 <= kGivenBytes);
    const uint32_t warp = consumer_.warp(), lane = 16 * lane_index();
    const uint32_t own = place_of(warp) + lane, other = place_of(warp ^ 4) + lane;
#pragma unroll
    for (uint32_t i = 0; i < kFours; ++i) {
      const float* given = sum + kGiven / 2 + 4 * i;
      ptx::store_shared4(own + i * kLanes * 16,
                         {__float_as_uint(given[0]), __float_as_uint(given[1]),
                          __float_as_uint(given[2]), __float_as_uint(given[3])});
    }
    consumer_.sync_alive();
#pragma unroll
    for (uint32_t i = 0; i < kFours; ++i) {
      const ptx::Words4 words = ptx::load_shared4(other + i * kLanes * 16);
      const float* kept = sum + kKept / 2 + 4 * i;
      float* to = sum + 4 * i;
      to[0] = kept[0] + __uint_as_float(words.x), to[1] = kept[1] + __uint_as_float(words.y);
      to[2] = kept[2] + __uint_as_float(words.z), to[3] = kept[3] + __uint_as_float(words.w);
    }
  }

  // Store the sums of a block and of these rows, up to kEights times eight.
  template <uint32_t kEights, class Plain>
  __device__ __forceinline__ void store_eights(const Plain& epilogue, const Product& product,
                                               uint32_t block, const MatrixRows& rows,
                                               const float (&sum)[kRows / 2]) const {
    const uint32_t lane = lane_index(), row = rows.first + lane % 4 * 2;
    const uint32_t unit = block * kBlockUnits + consumer_.warp() % 4 * 2;
    const uint32_t column = 2 * product.pair(unit, 0) + lane / 4;
    const uint64_t row_bytes = epilogue.plain_at(1, 0) - epilogue.plain_at(0, 0);
    uint64_t to = epilogue.plain_at(rows_.first + row, column);
    // Two units follow each other: the end of the rows that have them.
    uint32_t end[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
      end[half] =
          unit + half < product.tiling.units && epilogue.has_column(column + half * kUnitRows)
              ? rows_.count
              : 0;
#pragma unroll
    for (uint32_t i = 0; i < kEights; ++i, to += 8 * row_bytes)
#pragma unroll
      for (uint32_t next = 0; next < 2; ++next)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half)
          // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
          if (row + 8 * i + next < end[half])
            ptx::store(to + next * row_bytes + half * kUnitRows * sizeof(float),
                       __float_as_uint(sum[4 * i + 2 * half + next]));
  }

  // Where this warpgroup stages its sums, in the pages of the last step. In a shared group, where
  // it has read those that the other one gave it: nobody else reads there.
  __device__ __forceinline__ uint32_t staged(const MatrixGroup& group) const {
    return place_of(warpgroup_index() * 4 ^ (group.is_shared() ? 4 : 0));
  }
  // Where a warp leaves the sums that it gives away.
  __device__ __forceinline__ uint32_t place_of(uint32_t warp) const {
    constexpr uint32_t kOfPage = kPageBytes / kGivenBytes;
    PageCursor page = consumer_.page;
    page.advance(warp / kOfPage);
    return page.address() + warp % kOfPage * kGivenBytes;
  }

  // Of the warpgroup that finishes more blocks, or more rows.
  __device__ __forceinline__ uint32_t turns_of(const MatrixGroup& group) const {
    return ceil_div(group.blocks, kWarpgroups);
  }
  __device__ __forceinline__ uint32_t all_rows(const MatrixGroup& group,
                                               const MatrixRows& rows) const {
    return group.is_shared() ? rows.first + min_of(kRows / 2, rows_.count) : rows_.count;
  }

  // Blocks of the group that this warpgroup finishes, and block i of them. In a shared group both
  // warpgroups finish its block, each half of the rows.
  __device__ __forceinline__ uint32_t blocks_of(const MatrixGroup& group) const {
    if (group.is_shared()) return 1;
    return (group.blocks + kWarpgroups - 1 - warpgroup_index()) / kWarpgroups;
  }
  __device__ __forceinline__ uint32_t block_of(const MatrixGroup& group, uint32_t i) const {
    return group.first + (group.is_shared() ? 0 : warpgroup_index() + i * kWarpgroups);
  }

  __device__ __forceinline__ float scale_of_row(uint32_t row) const {
    return __uint_as_float(ptx::load_shared(scale_at(consumer_.scales, row)));
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
      if constexpr (Epilogue<I>::kQuads) {
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

  // Add what a thread kept of a row to what was kept of it in one of kNumConsumers places, which no
  // other thread uses.
  template <class Kept>
  __device__ __forceinline__ void keep(const Kept& kept, uint32_t place, uint32_t row) const {
    static_assert(sizeof(Kept) == kKeptBytes);
    Kept all = __builtin_bit_cast(Kept, ptx::load_shared2(kept_at(place, row)));
    all.merge(kept);
    const auto words = __builtin_bit_cast(ptx::Words2, all);
    ptx::store_shared2(kept_at(place, row), words.x, words.y);
  }

  // Add what all lanes kept of rows of x, which are `apart`, to what the warp kept of them. Their
  // pairs ascend.
  template <class Kept, uint32_t kCount>
  __device__ __forceinline__ void keep_of_lanes(Kept (&kept)[kCount], uint32_t row,
                                                uint32_t apart) const {
    static_assert(sizeof(Kept) == kKeptBytes);
    // Mostly no lane has anything to add to what was kept before.
    Kept all[kCount];
    bool grows = false;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t mine = min_of(row + i * apart, kRows - 1);
      all[i] = __builtin_bit_cast(Kept, ptx::load_shared2(kept_at(consumer_.warp(), mine)));
      grows |= row + i * apart < rows_.count && all[i].grows_by(kept[i]);
    }
    if (!__any_sync(~0u, grows)) return;
    Kept::merge_ascending(kept);
    if (lane_index() != 0) return;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i, row += apart) {
      if (row >= rows_.count) return;
      all[i].merge(kept[i]);
      const auto words = __builtin_bit_cast(ptx::Words2, all[i]);
      ptx::store_shared2(kept_at(consumer_.warp(), row), words.x, words.y);
    }
  }

  const Stage& stage_;
  Consumer& consumer_;
  const MatrixRows& rows_;
};

}  // namespace megavm
