// Products of many rows, as matrix products of warpgroups (wgmma): weights are the operand A, rows
// of x the operand B. The consumers are two warpgroups. Each multiplies blocks of 64 stored rows
// of the weight with up to kMatrixRows rows of x, and keeps the sums in registers.
//
// When a group is multiplied, each warp puts its sums into shared memory, 16 rows of the weight and
// 16 rows of x at a time, and finishes them by the epilogue of the instruction (epilogue.cuh).
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "instructions/product/epilogue.cuh"
#include "instructions/product/matrix_pages.cuh"
#include "instructions/product/row_squares.cuh"

namespace megavm {

// The scales of rows [first_row, first_row + rows): each warp has every eighth row. They are
// computed while weights are multiplied, one after the other.
class RowScales {
 public:
  // NOTE: ptxas waits for every single wgmma if the warp may end while some are in progress. It
  // ends at a tagged word that is missing, so such squares are read before.
  static constexpr bool kMayPause = (program::kAnySquares & 6) == 0;

  __device__ __forceinline__ RowScales(const Stage& stage, const Product& p, uint32_t first_row,
                                       uint32_t rows)
      : stage_(stage),
        product_(p),
        squares_(stage, p),
        first_row_(first_row),
        rows_(p.x_squares == kNone ? 0 : rows),
        next_(warp_index()) {}

  // Finish one row and begin the next. False when none is left.
  __device__ __forceinline__ bool advance() {
    if (asked_) {
      const float scale = squares_.scale();
      if (lane_index() == 0)
        ptx::store_shared(scratch_at(4 * (next_ - kNumConsumers)), __float_as_uint(scale));
    }
    asked_ = next_ < rows_;
    if (asked_) squares_.ask(source_row(first_row_ + next_));
    next_ += kNumConsumers;
    return asked_;
  }

 private:
  // The row of x. The loader has found it, or stops the worker.
  __device__ __forceinline__ uint32_t source_row(uint32_t row) const {
    if (product_.row_index == kNone) return row;
    const uint32_t found =
        static_cast<uint32_t>(constant_integer(stage_.tensors[product_.row_index], row, 0));
    return min_of(found, product_.x_rows - 1);
  }

  const Stage& stage_;
  const Product& product_;
  RowSquares squares_;
  uint32_t first_row_, rows_;
  uint32_t next_;
  bool asked_ = false;
};

// The sums of a warpgroup, of each of its blocks.
struct MatrixSums : MatrixSizes {
  float sum[kMaxBlocks][kRows / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t b = 0; b < kMaxBlocks; ++b)
#pragma unroll
      for (float& s : sum[b]) s = 0.0f;
  }

  // Keep the compiler from moving accesses to the sums across this point.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (auto& of_block : sum) ptx::settle(of_block);
  }

  // Put 16 rows of x of one of the blocks into this warp's part of the scratch.
  // NOTE: a switch, because ptxas makes a jump of it. Of conditions it makes predicates, and runs
  // through the stores of all parts for each.
  __device__ __forceinline__ void stage(uint32_t block, uint32_t part, uint32_t to) const {
    const uint32_t lane = lane_index();
    to += lane % 4 * 2 * kStagedStride + lane / 4 * 4;
    switch (block * kParts + part) {
      case 0:
        return put<0>(to);
      case 1:
        return put<1>(to);
      case 2:
        return put<2>(to);
      case 3:
        return put<3>(to);
      case 4:
        return put<4>(to);
      case 5:
        return put<5>(to);
      case 6:
        return put<6>(to);
      case 7:
        return put<7>(to);
      case 8:
        return put<8>(to);
      case 9:
        return put<9>(to);
      case 10:
        return put<10>(to);
      case 11:
        return put<11>(to);
      case 12:
        return put<12>(to);
      case 13:
        return put<13>(to);
      case 14:
        return put<14>(to);
      case 15:
        return put<15>(to);
    }
  }

 private:
  static constexpr uint32_t kParts = kRows / kStagedRows;
  static_assert(kMaxBlocks * kMaxMatrixRows / kStagedRows == 16);

  template <uint32_t kNumber>
  __device__ __forceinline__ void put(uint32_t to) const {
    if constexpr (kNumber < kMaxBlocks * kParts)
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j)
        // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
        ptx::store_shared(to + (j / 4 * 8 + j % 2) * kStagedStride + j / 2 % 2 * 32,
                          __float_as_uint(sum[kNumber / kParts][kNumber % kParts * 8 + j]));
  }
};

// The consumers' part.
template <class Used>
class MatrixConsumer : MatrixSizes {
 public:
  __device__ __forceinline__ MatrixConsumer(const Stage& stage, const Product& p,
                                            Consumer& consumer)
      : stage_(stage), product_(p), consumer_(consumer), order_(p.tiling) {}

  __device__ __forceinline__ void run() {
    const uint32_t end = live_end(stage_, product_);
    bool waited = false;
#pragma unroll 1
    for (row_ = product_.row_begin; row_ < end; row_ += kRows) {
      rows_ = min_of(kRows, end - row_);
      // No warp uses the scratch any more.
      consumer_.sync_alive();
      forget_kept();
      look_up_rows();
#pragma unroll 1
      for (uint32_t first = 0; first < order_.blocks; first += kGroupBlocks) {
        if (first > 0) consumer_.sync_alive();
        bool stops = false;
        if (!waited) {
          stops = !consumer_.stage.ready().wait_unless_stopping(consumer_.stage.phase);
          consumer_.note(stage_, Event::kInputs);
        }
        waited = true;
        group(first, stops);
      }
      end_rows();
    }
    if (!waited) consumer_.wait_ready();
    // Products of few rows (rows.cuh) use the scratch at once.
    if constexpr (program::kAnyProduct) consumer_.sync();
  }

 private:
  __device__ __forceinline__ uint32_t warpgroup() const { return consumer_.warp() / 4; }

  // Multiply and finish the group of blocks that begins with `first`. `stops`: see multiply.
  __device__ __forceinline__ void group(uint32_t first, bool stops) {
    RowScales scales(stage_, product_, row_, first == 0 ? rows_ : 0);
    const MatrixGroup group(order_, first);
    MatrixSums sums;
    sums.clear();
    sums.settle();
    if (group.blocks <= kWarpgroups)
      multiply<1>(group, sums, scales, stops);
    else
      multiply<kMaxBlocks>(group, sums, scales, stops);
    if (first + kGroupBlocks >= order_.blocks) consumer_.note(stage_, Event::kComputed);
    if (first == 0 && product_.x_squares != kNone) {
      while (scales.advance()) continue;
      consumer_.sync();
    }
    Used::dispatch(stage_.words.header.opcode,
                   [&]<class I>(I*) { finish(Epilogue<I>(stage_), group, sums); });
  }

  // Where the operands of a box begin, as descriptors count.
  template <uint32_t kBlocks>
  struct BoxOperands {
    uint32_t weights[kBlocks], x;
  };

  // The operands of box `box` of a step whose pages begin with `page`.
  // NOTE: nothing but sums, because this stands between the products of two boxes.
  template <uint32_t kBlocks>
  class StepOperands {
   public:
    __device__ __forceinline__ StepOperands(const MatrixGroup& group, uint32_t warpgroup)
        : box_units_(group.blocks * group.box_bytes() / kUnit) {
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        // If the warpgroup has fewer blocks, it multiplies another one in their place.
        const uint32_t block = min_of(warpgroup + i * kWarpgroups, group.blocks - 1);
        weights_[i] = (group.x_pages * kPageBytes + block * group.box_bytes()) / kUnit;
      }
    }

    __device__ __forceinline__ BoxOperands<kBlocks> of(const PageCursor& page, uint32_t box) const {
      const uint32_t step = page.slot * (kPageBytes / kUnit);
      BoxOperands<kBlocks> found;
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i)
        found.weights[i] = in_ring(step + weights_[i] + box * box_units_);
      found.x = in_ring(step + box * (kBoxBytes / kUnit));
      return found;
    }

   private:
    static constexpr uint32_t kUnit = ptx::kOperandUnit;
    static __device__ __forceinline__ uint32_t in_ring(uint32_t offset) {
      constexpr uint32_t kRing = kPages * kPageBytes / kUnit;
      return ptx::operand_start(PageCursor{}.address()) + min_of(offset, offset - kRing);
    }

    uint32_t weights_[kBlocks];  // where box 0 begins, counted from the step
    uint32_t box_units_;         // from one box to the next
  };

  // Multiply the blocks of this warpgroup, up to kBlocks.
  // NOTE: a wgmma without all four warps of its warpgroup is an illegal instruction, after which
  // the GPU's context is lost. So all consumers meet before this, after the last place where one of
  // them may end. If the worker is stopping (`stops`), they multiply what the pages hold, and end
  // later.
  template <uint32_t kBlocks>
  __device__ __forceinline__ void multiply(const MatrixGroup& group, MatrixSums& sums,
                                           RowScales& scales, bool stops) {
    if constexpr (!RowScales::kMayPause) {
      while (scales.advance()) continue;
      consumer_.sync_alive();
    }
    const uint32_t boxes = order_.boxes();
    // Rows of x whose scale a warp computes beside a box, and from which box to which: what it asks
    // for has arrived by then.
    constexpr uint32_t kScales = kRows / kNumConsumers + 1;
    const uint32_t scaled = ceil_div(kScales, boxes), apart = max_of(1, boxes / kScales);
    uint32_t next_scales = 0;
    const StepOperands<kBlocks> operands(group, warpgroup());
    PageCursor page = consumer_.page;  // the first of the step
    uint32_t in_step = 0;
    // NOTE: one loop over the boxes of all steps. With one in the other, or with an end of the warp
    // in it, ptxas waits for every wgmma. The products of a box are in progress until those of the
    // next one have begun.
#pragma unroll 1
    for (uint32_t box = 0; box < boxes; ++box) {
      if (in_step == 0) {
        stops |= !consumer_.has_step_arrived(page);
        if (box + group.boxes >= boxes) consumer_.note(stage_, Event::kLoadArrived);
      }
      multiply_box<kBlocks>(operands.of(page, in_step), sums);
      if constexpr (RowScales::kMayPause)
        if (box == next_scales) {
          for (uint32_t i = 0; i < scaled && scales.advance(); ++i) continue;
          next_scales += apart;
        }
      ptx::wgmma_wait<1>();
      // A worker that stops leaves its pages: some may not have arrived.
      if (in_step == 0 && box > 0) consumer_.finish_pages(stops ? 0 : group.pages);
      if (++in_step == group.boxes) {
        in_step = 0;
        page.advance(group.pages);
      }
    }
    ptx::wgmma_wait<0>();
    sums.settle();
    if (stops) give_up(page);
    consumer_.finish_pages(group.pages);
  }

  // End this warp, which waited for the instruction's input, or for pages up to `page`.
  [[noreturn]] __device__ __forceinline__ void give_up(const PageCursor& page) const {
    const StageCursor& stage = consumer_.stage;
    if (!stage.ready().is_over(stage.phase)) stage.ready().give_up(stage.phase);
    page_arrived(page.slot).give_up(page.phase);
  }

  // Begin the products of a box.
  template <uint32_t kBlocks>
  __device__ __forceinline__ void multiply_box(const BoxOperands<kBlocks>& box, MatrixSums& sums) {
    // NOTE: no branches between these. Otherwise ptxas waits for every single wgmma.
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t tile = 0; tile < kBoxTiles; ++tile)
#pragma unroll
      for (uint32_t part = 0; part < 2; ++part)
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) {
          using enum ptx::OperandSwizzle;
          ptx::wgmma<kRows>(
              sums.sum[i],
              ptx::operand_descriptor<k64Bytes>(
                  box.weights[i], tile * kTileBytes + part * kOperandBytes, kUnitBytes),
              ptx::operand_descriptor<k128Bytes>(box.x, tile * kTileRowBytes + part * kOperandBytes,
                                                 kUnitRows * kBoxRowBytes));
        }
    ptx::wgmma_commit();
  }

  // ---- The epilogue. A warp has 16 rows of each block, lane % 8 is the pair of them.

  __device__ __forceinline__ uint32_t staged_at() const {
    return scratch_at(kStagedAt) + consumer_.warp() * kStagedRows * kStagedStride;
  }
  __device__ __forceinline__ uint32_t kept_at(uint32_t warp, uint32_t row) const {
    return scratch_at(kKeptAt) + (warp * kRows + row) * kKeptBytes;
  }

  __device__ __forceinline__ void forget_kept() const {
    for (uint32_t i = lane_index(); i < kRows; i += kLanes)
      ptx::store_shared2(kept_at(consumer_.warp(), i), 0, 0);
    __syncwarp();
  }

  template <class Instruction>
  __device__ __forceinline__ void finish(const Epilogue<Instruction>& epilogue,
                                         const MatrixGroup& group, const MatrixSums& sums) const {
    const uint32_t blocks = (group.blocks + kWarpgroups - 1 - warpgroup()) / kWarpgroups;
    if constexpr (Epilogue<Instruction>::kUnits)
      if (product_.pair_begin % kUnitPairs == 0 && product_.pair_end % kUnitPairs == 0 &&
          epilogue.takes_units())
        return finish_units(epilogue, group, blocks, sums);
    using Kept = typename Epilogue<Instruction>::Kept;
    constexpr uint32_t kAtOnce = Epilogue<Instruction>::kAtOnce;
    constexpr uint32_t kRowStep = kLanes / kPairsOfWarp;
    static_assert(kRowStep == kMoveRows);
    const uint32_t pair_in_warp = lane_index() % kPairsOfWarp;
    hold_stores(consumer_.warp());
#pragma unroll 1
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint32_t block = group.first + warpgroup() + i * kWarpgroups;
      const uint32_t in_block = consumer_.warp() % 4 * kPairsOfWarp + pair_in_warp;
      const uint32_t unit = block * kBlockUnits + in_block / kUnitPairs;
      const uint32_t pair = product_.pair(unit, in_block % kUnitPairs);
      const bool exists = unit < order_.units && product_.finishes(pair);
      // This thread's next row, among the live rows.
      uint32_t row = lane_index() / kPairsOfWarp;
      typename Epilogue<Instruction>::Early early = {};
      if (exists && row < rows_) epilogue.begin(row_ + row, pair, early);
#pragma unroll 1
      for (uint32_t part = 0; part * kStagedRows < rows_; ++part) {
        sums.stage(i, part, staged_at());
        __syncwarp();
#pragma unroll 1
        for (uint32_t begin = 0; begin < kStagedRows; begin += kAtOnce * kRowStep) {
          const auto is_active = [&](uint32_t j) { return exists && row + j * kRowStep < rows_; };
          typename Epilogue<Instruction>::Early of_row[kAtOnce];
#pragma unroll
          for (uint32_t j = 0; j < kAtOnce; ++j) {
            of_row[j] = early;
            const uint32_t number = row_ + row + j * kRowStep;
            if (!is_active(j)) continue;
            epilogue.move(number, pair, j * kRowStep, of_row[j]);
            epilogue.await(number, pair, of_row[j]);
          }
#pragma unroll
          for (uint32_t j = 0; j < kAtOnce; ++j) {
            const uint32_t number = row + j * kRowStep;
            const uint32_t staged = begin + lane_index() / kPairsOfWarp + j * kRowStep;
            const ptx::Words2 words =
                ptx::load_shared2(staged_at() + staged * kStagedStride + pair_in_warp * 8);
            float scale = 1.0f;
            if (product_.x_squares != kNone)
              scale = __uint_as_float(ptx::load_shared(scratch_at(4 * number)));
            const PairSums pair_sums = {__uint_as_float(words.x) * scale,
                                        __uint_as_float(words.y) * scale};
            Kept kept = {};
            epilogue.finish({row_ + number, pair, is_active(j), 1}, pair_sums, of_row[j], kept);
            if constexpr (kWordsOf<Kept> > 0)
              if (epilogue.keeps()) keep(kept, number, kPairsOfWarp);
          }
          row += kAtOnce * kRowStep;
          if (exists && row < rows_) epilogue.move(row_ + row, pair, kAtOnce * kRowStep, early);
        }
        __syncwarp();
      }
    }
  }

  // The same, if a thread may finish a unit at a time. A lane has one of the warp's two units of a
  // block, and every sixteenth row.
  template <class Instruction>
  __device__ __forceinline__ void finish_units(const Epilogue<Instruction>& epilogue,
                                               const MatrixGroup& group, uint32_t blocks,
                                               const MatrixSums& sums) const {
    using Kept = typename Epilogue<Instruction>::Kept;
    using OfRow = typename Epilogue<Instruction>::OfRow;
    static_assert(kStagedRows * kUnitsOfWarp == kLanes);
    const uint32_t of_warp = lane_index() % kUnitsOfWarp, lane_row = lane_index() / kUnitsOfWarp;
    hold_stores(consumer_.warp());
#pragma unroll 1
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint32_t block = group.first + warpgroup() + i * kWarpgroups;
      const uint32_t unit = block * kBlockUnits + consumer_.warp() % 4 * kUnitsOfWarp + of_warp;
      const uint32_t pair = product_.pair(unit, 0);
      const uint32_t rows = unit < order_.units ? rows_ : 0;
      typename Epilogue<Instruction>::OfUnit of_unit = {};
      typename Epilogue<Instruction>::Asked asked = {};
      if (rows > 0) epilogue.begin_unit(pair, of_unit);
      if (lane_row < rows) epilogue.ask(row_ + lane_row, found<OfRow>(lane_row), of_unit, asked);
#pragma unroll 1
      for (uint32_t part = 0; part * kStagedRows < rows_; ++part) {
        sums.stage(i, part, staged_at());
        __syncwarp();
        const uint32_t row = part * kStagedRows + lane_row, next_row = row + kStagedRows;
        const uint32_t from = staged_at() + lane_row * kStagedStride + of_warp * 4 * kUnitRows;
        const ptx::Words4 low = ptx::load_shared4(from), high = ptx::load_shared4(from + 16);
        float scale = 1.0f;
        if (product_.x_squares != kNone && row < rows)
          scale = __uint_as_float(ptx::load_shared(scratch_at(4 * row)));
        typename Epilogue<Instruction>::Asked next = {};
        if (next_row < rows) epilogue.ask(row_ + next_row, found<OfRow>(next_row), of_unit, next);
        const auto scaled = [&](uint32_t x, uint32_t y) {
          return PairSums{__uint_as_float(x) * scale, __uint_as_float(y) * scale};
        };
        const UnitPairs unit_sums = {{scaled(low.x, low.y), scaled(low.z, low.w),
                                      scaled(high.x, high.y), scaled(high.z, high.w)}};
        Kept kept = {};
        if (row < rows)
          epilogue.finish_unit(row_ + row, found<OfRow>(row), pair, unit_sums, of_unit, asked,
                               kept);
        if constexpr (kWordsOf<Kept> > 0)
          if (epilogue.keeps()) keep(kept, row, kUnitsOfWarp);
        asked = next;
        __syncwarp();
      }
    }
  }

  // What the epilogue looked up of a row.
  template <class OfRow>
  __device__ __forceinline__ OfRow found(uint32_t row) const {
    if constexpr (kWordsOf<OfRow> == 0)
      return {};
    else
      return __builtin_bit_cast(OfRow,
                                ptx::load_shared2(scratch_at(kOfRowsAt) + kOfRowBytes * row));
  }

  // Let the epilogue look up what it needs of each row, a row by a thread, for all warps.
  __device__ __forceinline__ void look_up_rows() {
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) {
      if constexpr (Epilogue<I>::kUnits) {
        using OfRow = typename Epilogue<I>::OfRow;
        if constexpr (kWordsOf<OfRow> > 0) {
          static_assert(sizeof(OfRow) == kOfRowBytes);
          for (uint32_t row = consumer_.thread(); row < rows_; row += kNumConsumerThreads) {
            const auto words =
                __builtin_bit_cast(ptx::Words2, Epilogue<I>(stage_).look_up(row_ + row));
            ptx::store_shared2(scratch_at(kOfRowsAt) + kOfRowBytes * row, words.x, words.y);
          }
          consumer_.sync_alive();
        }
      }
    });
  }

  // Add what the lanes of a row of x kept to what the warp kept of it.
  // `lanes`: neighbouring lanes have the same row.
  template <class Kept>
  __device__ __forceinline__ void keep(Kept kept, uint32_t row, uint32_t lanes) const {
    static_assert(sizeof(Kept) == kKeptBytes);
    kept = merge_lanes(kept, lanes);
    const uint32_t at = kept_at(consumer_.warp(), row);
    if (lane_index() % lanes != 0 || row >= rows_) return;
    Kept all = __builtin_bit_cast(Kept, ptx::load_shared2(at));
    all.merge(kept);
    const auto words = __builtin_bit_cast(ptx::Words2, all);
    ptx::store_shared2(at, words.x, words.y);
  }

  // When all pairs of these rows are finished: a warp for each row stores what all warps kept.
  __device__ __forceinline__ void end_rows() {
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) {
      using Kept = typename Epilogue<I>::Kept;
      if constexpr (kWordsOf<Kept> > 0) {
        const Epilogue<I> epilogue(stage_);
        if (!epilogue.keeps()) return;
        consumer_.sync();
#pragma unroll 1
        for (uint32_t row = consumer_.warp(); row < rows_; row += kNumConsumers) {
          Kept all = {};
          if (lane_index() < kNumConsumers)
            all = __builtin_bit_cast(Kept, ptx::load_shared2(kept_at(lane_index(), row)));
          epilogue.end(row_ + row, merge_lanes(all));
        }
      }
    });
  }

  static constexpr uint32_t kPairsOfWarp = 8;
  static constexpr uint32_t kUnitsOfWarp = kPairsOfWarp / kUnitPairs;

  const Stage& stage_;
  const Product& product_;
  Consumer& consumer_;
  const MatrixOrder order_;
  uint32_t row_ = 0;   // the first of the rows of x
  uint32_t rows_ = 0;  // how many of them are live
};

}  // namespace megavm
