// Products of many rows, as matrix products of warpgroups (wgmma): weights are the operand A, rows
// of x the operand B. The consumers are two warpgroups. Each multiplies blocks of 64 stored rows
// of the weight with up to kMatrixRows rows of x, and keeps the sums in registers.
//
// When a group is multiplied, each warp *stages* its sums in the pages of the last step: 16 rows of
// the weight and up to 64 rows of x at a time. Then it finishes them by the epilogue of the
// instruction (epilogue.cuh). Sums that are the results themselves it stores at once.
//
// A group of one block would leave a warpgroup without work. There, each warpgroup multiplies half
// of the boxes, and the epilogue adds the sums of both.
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

  // Stage the sums of kStagedRows rows of x and of one of the blocks, from address `to` on.
  // NOTE: a switch, because ptxas makes a jump of it. Of conditions it makes predicates, and runs
  // through the stores of all parts for each.
  __device__ __forceinline__ void stage(uint32_t block, uint32_t part, uint32_t to) const {
    const uint32_t lane = lane_index(), weight_row = lane / 4, x_rows = lane % 4;
    // Row 2 x_rows + next of x, row weight_row + 8 half of the weight; see staged_at.
    uint32_t places[2][2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t next = 0; next < 2; ++next)
        places[half][next] = to + staged_at(2 * x_rows + next, weight_row + 8 * half);
    switch (block * kParts + part) {
      case 0:
        return put<0>(places);
      case 1:
        return put<1>(places);
      case 2:
        return put<2>(places);
      case 3:
        return put<3>(places);
    }
  }

  static constexpr uint32_t kParts = kRows / kStagedRows;
  static_assert(kMaxBlocks * kParts <= 4);

 private:
  template <uint32_t kNumber>
  __device__ __forceinline__ void put(const uint32_t (&places)[2][2]) const {
    if constexpr (kNumber < kMaxBlocks * kParts)
#pragma unroll
      for (uint32_t i = 0; i < kStagedRows / 2; ++i)
        // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
        ptx::store_shared(
            places[i / 2 % 2][i % 2] + i / 4 * 8 * kStagedRowBytes,
            __float_as_uint(sum[kNumber / kParts][kNumber % kParts * (kStagedRows / 2) + i]));
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
  static constexpr uint32_t kPairsOfWarp = 8;
  static constexpr uint32_t kUnitsOfWarp = kPairsOfWarp / kUnitPairs;

  __device__ __forceinline__ uint32_t warpgroup() const { return consumer_.warp() / 4; }

  // Multiply and finish the group of blocks that begins with `first`. `stops`: see multiply.
  __device__ __forceinline__ void group(uint32_t first, bool stops) {
    RowScales scales(stage_, product_, row_, first == 0 ? rows_ : 0);
    const MatrixGroup group(order_, first);
    MatrixSums sums;
    sums.clear();
    sums.settle();
    if (group.blocks > kWarpgroups)
      multiply<kMaxBlocks, 1>(group, sums, scales, stops);
    else if (kTurnBoxes > 1 && group.own_boxes() % kTurnBoxes == 0)
      multiply<1, kTurnBoxes>(group, sums, scales, stops);
    else
      multiply<1, 1>(group, sums, scales, stops);
    if (first + kGroupBlocks >= order_.blocks) consumer_.note(stage_, Event::kComputed);
    while (scales.advance()) continue;
    // The pages of the last step may be overwritten, and the scales are there.
    consumer_.sync_alive();
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) __attribute__((always_inline)) {
      finish(Epilogue<I>(stage_), group, sums);
    });
    // Copies into these pages come after the sums that were staged there.
    ptx::fence_proxy_async_shared();
    consumer_.finish_pages(group.pages);
  }

  // Where the operands of a box begin, as descriptors count.
  template <uint32_t kBlocks>
  struct BoxOperands {
    uint32_t weights[kBlocks], x;
  };

  // The operands of this warpgroup's boxes of a step whose pages begin with `page`.
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

  // Multiply the blocks of this warpgroup, up to kBlocks, by kBoxes boxes at a time. The pages of
  // the last step are not finished.
  // NOTE: a wgmma without all four warps of its warpgroup is an illegal instruction, after which
  // the GPU's context is lost. So all consumers meet before this, after the last place where one of
  // them may end. If the worker is stopping (`stops`), they multiply what the pages hold, and end
  // later.
  template <uint32_t kBlocks, uint32_t kBoxes>
  __device__ __forceinline__ void multiply(const MatrixGroup& group, MatrixSums& sums,
                                           RowScales& scales, bool stops) {
    if constexpr (!RowScales::kMayPause) {
      while (scales.advance()) continue;
      consumer_.sync_alive();
    }
    // A *turn* is kBoxes boxes of a step. All boxes of a step are there; those beyond the last
    // column are zeros.
    const uint32_t steps = ceil_div(order_.boxes(), group.boxes);
    const uint32_t own = group.own_boxes();
    const uint32_t first_box = group.is_shared() ? warpgroup() * own : 0;
    const uint32_t turns = steps * (own / kBoxes);
    // Rows of x whose scale a warp computes beside a turn, and from which turn to which: what it
    // asks for has arrived by then.
    constexpr uint32_t kScales = kRows / kNumConsumers + 1;
    const uint32_t scaled = ceil_div(kScales, turns), apart = max_of(1, turns / kScales);
    uint32_t next_scales = 0;
    const StepOperands<kBlocks> operands(group, warpgroup());
    PageCursor page = consumer_.page;  // the first of the step
    uint32_t in_step = 0;              // boxes of this warpgroup
    // NOTE: one loop over the turns of all steps. With one in the other, or with an end of the warp
    // in it, ptxas waits for every wgmma. The products of a turn are in progress until those of the
    // next one have begun.
#pragma unroll 1
    for (uint32_t turn = 0; turn < turns; ++turn) {
      if (in_step == 0) {
        stops |= !consumer_.has_step_arrived(page);
        if (turn + own / kBoxes >= turns) consumer_.note(stage_, Event::kLoadArrived);
      }
      BoxOperands<kBlocks> boxes[kBoxes];
#pragma unroll
      for (uint32_t i = 0; i < kBoxes; ++i) boxes[i] = operands.of(page, first_box + in_step + i);
      multiply_boxes<kBlocks, kBoxes>(boxes, sums);
      if constexpr (RowScales::kMayPause)
        if (turn == next_scales) {
          for (uint32_t i = 0; i < scaled && scales.advance(); ++i) continue;
          next_scales += apart;
        }
      ptx::wgmma_wait<1>();
      // A worker that stops leaves its pages: some may not have arrived.
      if (in_step == 0 && turn > 0) consumer_.finish_pages(stops ? 0 : group.pages);
      in_step += kBoxes;
      if (in_step == own) {
        in_step = 0;
        page.advance(group.pages);
      }
    }
    ptx::wgmma_wait<0>();
    sums.settle();
    if (stops) give_up(page);
  }

  // End this warp, which waited for the instruction's input, or for pages up to `page`.
  [[noreturn]] __device__ __forceinline__ void give_up(const PageCursor& page) const {
    const StageCursor& stage = consumer_.stage;
    if (!stage.ready().is_over(stage.phase)) stage.ready().give_up(stage.phase);
    page_arrived(page.slot).give_up(page.phase);
  }

  // Begin the products of several boxes.
  template <uint32_t kBlocks, uint32_t kBoxes>
  __device__ __forceinline__ void multiply_boxes(const BoxOperands<kBlocks> (&boxes)[kBoxes],
                                                 MatrixSums& sums) {
    // NOTE: no branches between these. Otherwise ptxas waits for every single wgmma.
    ptx::wgmma_fence();
#pragma unroll
    for (const BoxOperands<kBlocks>& box : boxes)
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
                ptx::operand_descriptor<k128Bytes>(
                    box.x, tile * kTileRowBytes + part * kOperandBytes, kUnitRows * kBoxRowBytes));
          }
    ptx::wgmma_commit();
  }

  // ---- The epilogue. A warp has 16 rows of each block, lane % 8 is the pair of them.

  // Where a warp stages its sums, in the pages of the last step.
  __device__ __forceinline__ uint32_t stage_of(uint32_t warp) const {
    constexpr uint32_t kOfPage = kPageBytes / kStagedBytes;
    PageCursor page = consumer_.page;
    page.advance(warp / kOfPage);
    return page.address() + warp % kOfPage * kStagedBytes;
  }

  // Stage a part of the sums of block `i`, and wait for the other warps that have sums of it.
  __device__ __forceinline__ void stage(const MatrixGroup& group, const MatrixSums& sums,
                                        uint32_t i, uint32_t part) const {
    const auto meet = [&] {
      if (group.is_shared())
        consumer_.sync();
      else
        __syncwarp();
    };
    if (part > 0 || i > 0) meet();
    sums.stage(i, part, stage_of(consumer_.warp()));
    meet();
  }

  // What the warps staged that have the same 16 rows of the weight: one warp, or in a shared group
  // one of each warpgroup, whose sums are added.
  struct Staged {
    uint32_t own, other;
    bool is_shared;

    template <class Words, class Load>
    __device__ __forceinline__ Words add(uint32_t at, Load&& load) const {
      Words words = load(own + at);
      if (is_shared) add_words(words, load(other + at));
      return words;
    }
    __device__ __forceinline__ ptx::Words4 load4(uint32_t at) const {
      return add<ptx::Words4>(at, [](uint32_t from) { return ptx::load_shared4(from); });
    }
    __device__ __forceinline__ ptx::Words2 load2(uint32_t at) const {
      return add<ptx::Words2>(at, [](uint32_t from) { return ptx::load_shared2(from); });
    }

   private:
    static __device__ __forceinline__ uint32_t sum(uint32_t a, uint32_t b) {
      return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
    }
    static __device__ __forceinline__ void add_words(ptx::Words2& to, const ptx::Words2& words) {
      to = {sum(to.x, words.x), sum(to.y, words.y)};
    }
    static __device__ __forceinline__ void add_words(ptx::Words4& to, const ptx::Words4& words) {
      to = {sum(to.x, words.x), sum(to.y, words.y), sum(to.z, words.z), sum(to.w, words.w)};
    }
  };
  __device__ __forceinline__ Staged staged_in(const MatrixGroup& group) const {
    const uint32_t warp = consumer_.warp();
    if (!group.is_shared()) return {stage_of(warp), 0, false};
    return {stage_of(warp % 4), stage_of(warp % 4 + 4), true};
  }

  // Blocks of the group that this warpgroup finishes, and block i of them. In a shared group both
  // warpgroups finish its block, and take rows in turn.
  __device__ __forceinline__ uint32_t blocks_of(const MatrixGroup& group) const {
    if (group.is_shared()) return 1;
    return (group.blocks + kWarpgroups - 1 - warpgroup()) / kWarpgroups;
  }
  __device__ __forceinline__ uint32_t block_of(const MatrixGroup& group, uint32_t i) const {
    return group.first + (group.is_shared() ? 0 : warpgroup() + i * kWarpgroups);
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
                                         const MatrixGroup& group, MatrixSums& sums) const {
    if constexpr (Epilogue<Instruction>::kPlain)
      if (epilogue.is_plain()) {
        hold_stores(consumer_.warp());
        return group.is_shared() ? store_shared_sums(epilogue, group, sums)
                                 : store_sums(epilogue, group, sums);
      }
    // A tensor that ranks gather takes no units, whose squares are added up in another order.
    if constexpr (Epilogue<Instruction>::kUnits && !program::kFixedOrder)
      if (product_.pair_begin % kUnitPairs == 0 && product_.pair_end % kUnitPairs == 0 &&
          epilogue.takes_units())
        return Units<Instruction>(*this, epilogue, group, sums).finish();
    using Kept = typename Epilogue<Instruction>::Kept;
    constexpr uint32_t kAtOnce = Epilogue<Instruction>::kAtOnce;
    constexpr uint32_t kRowStep = kLanes / kPairsOfWarp, kTurnRows = kAtOnce * kRowStep;
    static_assert(kRowStep == kMoveRows && kStagedRows % (kWarpgroups * kTurnRows) == 0);
    const uint32_t pair_in_warp = lane_index() % kPairsOfWarp;
    const Staged from = staged_in(group);
    // Rows that a warp finishes at a time, and how far it is to the next ones.
    const uint32_t first = group.is_shared() ? warpgroup() * kTurnRows : 0;
    const uint32_t apart = group.is_shared() ? kWarpgroups * kTurnRows : kTurnRows;
    hold_stores(consumer_.warp());
#pragma unroll 1
    for (uint32_t i = 0; i < blocks_of(group); ++i) {
      const uint32_t in_block = consumer_.warp() % 4 * kPairsOfWarp + pair_in_warp;
      const uint32_t unit = block_of(group, i) * kBlockUnits + in_block / kUnitPairs;
      const uint32_t pair = product_.pair(unit, in_block % kUnitPairs);
      const bool exists = unit < order_.units && product_.finishes(pair);
      // This thread's next row, among the live rows.
      uint32_t row = first + lane_index() / kPairsOfWarp;
      typename Epilogue<Instruction>::Early early = {};
      if (exists && row < rows_) epilogue.begin(row_ + row, pair, early);
#pragma unroll 1
      for (uint32_t part = 0; part * kStagedRows < rows_; ++part) {
        stage(group, sums, i, part);
#pragma unroll 1
        for (uint32_t begin = first; begin < kStagedRows; begin += apart) {
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
            const ptx::Words2 words = from.load2(staged_at(number % kStagedRows, 2 * pair_in_warp));
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
          row += apart;
          if (exists && row < rows_) epilogue.move(row_ + row, pair, apart, early);
        }
      }
    }
  }

  // Results that are the sums themselves leave the registers at once: no warp stages anything. A
  // store of a warp is eight neighbouring columns of four rows, whole sectors.
  template <uint32_t kBlock = 0, class Plain>
  __device__ __forceinline__ void store_sums(const Plain& epilogue, const MatrixGroup& group,
                                             const MatrixSums& sums) const {
    if constexpr (kBlock < kMaxBlocks) {
      if (kBlock >= blocks_of(group)) return;
      store_eights<0, kRows / 8>(epilogue, block_of(group, kBlock), sums.sum[kBlock]);
      store_sums<kBlock + 1>(epilogue, group, sums);
    }
  }

  // The same in a shared group: each warpgroup gives the other its sums of half of the rows of x,
  // and stores the other half.
  template <class Plain>
  __device__ __forceinline__ void store_shared_sums(const Plain& epilogue, const MatrixGroup& group,
                                                    MatrixSums& sums) const {
    constexpr uint32_t kHalf = kRows / 16;  // in eights of rows
    if (warpgroup() == 0) {
      exchange_sums<kHalf, 0>(sums.sum[0]);
      store_eights<0, kHalf>(epilogue, group.first, sums.sum[0]);
    } else {
      exchange_sums<0, kHalf>(sums.sum[0]);
      store_eights<kHalf, 2 * kHalf>(epilogue, group.first, sums.sum[0]);
    }
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
      uint64_t to = epilogue.plain_at(row_ + row, column);
#pragma unroll
      for (uint32_t i = 0; i < kEnd - kFirst; ++i, to += 8 * row_bytes)
#pragma unroll
        for (uint32_t next = 0; next < 2; ++next)
          // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
          if (row + 8 * i + next < rows_)
            ptx::store(to + next * row_bytes,
                       __float_as_uint(sum[4 * (kFirst + i) + 2 * half + next]));
    }
  }

  // The same, if a thread may finish a unit at a time. A lane has one of the warp's two units of a
  // block, and every sixteenth row. It finishes kTogether of them at a time, so that what one waits
  // for is hidden by the other.
  template <class Instruction>
  struct Units {
    using Kept = typename Epilogue<Instruction>::Kept;
    using OfRow = typename Epilogue<Instruction>::OfRow;
    using OfUnit = typename Epilogue<Instruction>::OfUnit;
    using Asked = typename Epilogue<Instruction>::Asked;
    static constexpr uint32_t kTurnRows = kLanes / kUnitsOfWarp;  // rows of a warp at a time
    static constexpr uint32_t kTurns = kStagedRows / kTurnRows, kTogether = min_of(2, kTurns);

    const MatrixConsumer& consumer;
    const Epilogue<Instruction>& epilogue;
    const MatrixGroup& group;
    const MatrixSums& sums;
    const Staged from;
    uint32_t first, apart;  // turns of this warp
    uint32_t of_warp, lane_row;

    // A lane's unit of a block.
    struct OfBlock {
      uint32_t pair;
      uint32_t rows;  // 0: there is no such unit
      bool beside;
    };

    __device__ __forceinline__ Units(const MatrixConsumer& consumer,
                                     const Epilogue<Instruction>& epilogue,
                                     const MatrixGroup& group, const MatrixSums& sums)
        : consumer(consumer),
          epilogue(epilogue),
          group(group),
          sums(sums),
          from(consumer.staged_in(group)),
          first(group.is_shared() ? consumer.warpgroup() : 0),
          apart(group.is_shared() ? kWarpgroups : 1),
          of_warp(lane_index() % kUnitsOfWarp),
          lane_row(lane_index() / kUnitsOfWarp) {}

    // NOTE: one copy of the code for each part of each block. So the sums that are staged already
    // occupy no registers, and nothing spills.
    template <uint32_t kBlock = 0>
    __device__ __forceinline__ void finish() const {
      if constexpr (kBlock < kMaxBlocks) {
        if (kBlock >= consumer.blocks_of(group)) return;
        const uint32_t unit = consumer.block_of(group, kBlock) * kBlockUnits +
                              consumer.consumer_.warp() % 4 * kUnitsOfWarp + of_warp;
        static_assert(kUnitsOfWarp == 2);  // lane ^ 1 has the other unit of the warp
        const uint32_t units = consumer.order_.units;
        // Lanes without a unit take the last one along, so that all know the same tensors.
        const OfBlock of_block = {consumer.product_.pair(min_of(unit, units - 1), 0),
                                  unit < units ? consumer.rows_ : 0, (unit | 1) < units};
        OfUnit of_unit = {};
        epilogue.begin_unit(of_block.pair, of_unit);
        Asked asked[kTogether] = {};
        ask(0, first, of_block, of_unit, asked);
        finish_parts<kBlock>(of_block, of_unit, asked);
        finish<kBlock + 1>();
      }
    }

   private:
    // The row of turn `number` of a part, among the rows of the group.
    __device__ __forceinline__ uint32_t row_of(uint32_t part, uint32_t number) const {
      return part * kStagedRows + number * kTurnRows + lane_row;
    }
    __device__ __forceinline__ UnitAt at(uint32_t part, uint32_t number,
                                         const OfBlock& of_block) const {
      const uint32_t row = row_of(part, number);
      return {consumer.row_ + row, of_block.pair, number < kTurns && row < of_block.rows,
              of_block.beside};
    }

    // Ask for what the rows of a turn need, and of the turns after it that come with it.
    __device__ __forceinline__ void ask(uint32_t part, uint32_t turn, const OfBlock& of_block,
                                        const OfUnit& of_unit, Asked (&asked)[kTogether]) const {
#pragma unroll
      for (uint32_t j = 0; j < kTogether; ++j) {
        const uint32_t number = turn + j * apart;
        const UnitAt here = at(part, number, of_block);
        if (here.active)
          epilogue.ask(here, consumer.template found<OfRow>(row_of(part, number)), of_unit,
                       asked[j]);
      }
    }

    template <uint32_t kBlock, uint32_t kPart = 0>
    __device__ __forceinline__ void finish_parts(const OfBlock& of_block, const OfUnit& of_unit,
                                                 Asked (&asked)[kTogether]) const {
      if constexpr (kPart < MatrixSums::kParts) {
        if (kPart * kStagedRows >= consumer.rows_) return;
        consumer.stage(group, sums, kBlock, kPart);
#pragma unroll 1
        for (uint32_t turn = first; turn < kTurns; turn += kTogether * apart) {
          Asked next[kTogether] = {};
          if (turn + kTogether * apart < kTurns)
            ask(kPart, turn + kTogether * apart, of_block, of_unit, next);
          else if (kPart + 1 < MatrixSums::kParts)
            ask(kPart + 1, first, of_block, of_unit, next);
#pragma unroll
          for (uint32_t j = 0; j < kTogether; ++j) {
            finish_turn(kPart, turn + j * apart, of_block, of_unit, asked[j]);
            asked[j] = next[j];
          }
        }
        finish_parts<kBlock, kPart + 1>(of_block, of_unit, asked);
      }
    }

    __device__ __forceinline__ void finish_turn(uint32_t part, uint32_t number,
                                                const OfBlock& of_block, const OfUnit& of_unit,
                                                Asked& asked) const {
      const uint32_t row = row_of(part, number);
      const UnitAt here = at(part, number, of_block);
      Kept kept = {};
      UnitPairs unit_sums = {};
      OfRow of_row = {};
      if (here.active) {
        const uint32_t place =
            staged_at(lane_row, of_warp * kUnitRows) + number * kTurnRows * kStagedRowBytes;
        const ptx::Words4 low = from.load4(place), high = from.load4(place ^ 16);
        float scale = 1.0f;
        if (consumer.product_.x_squares != kNone)
          scale = __uint_as_float(ptx::load_shared(scratch_at(4 * row)));
        const auto scaled = [&](uint32_t x, uint32_t y) {
          return PairSums{__uint_as_float(x) * scale, __uint_as_float(y) * scale};
        };
        unit_sums = {{scaled(low.x, low.y), scaled(low.z, low.w), scaled(high.x, high.y),
                      scaled(high.z, high.w)}};
        of_row = consumer.template found<OfRow>(row);
      }
      epilogue.finish_unit(here, of_row, unit_sums, of_unit, asked, kept);
      if constexpr (kWordsOf<Kept> > 0)
        if (epilogue.keeps()) consumer.keep(kept, row, kUnitsOfWarp);
    }
  };

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

  const Stage& stage_;
  const Product& product_;
  Consumer& consumer_;
  const MatrixOrder order_;
  uint32_t row_ = 0;   // the first of the rows of x
  uint32_t rows_ = 0;  // how many of them are live
};

}  // namespace megavm
