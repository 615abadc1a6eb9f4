// Products of many rows, as matrix products of warpgroups (wgmma): weights are the operand A, rows
// of x the operand B. The consumers are two warpgroups. Each multiplies blocks of 64 stored rows
// of the weight with up to kMatrixRows rows of x, and keeps the sums in registers.
//
// When a group is multiplied, its sums are finished (matrix_finish.cuh).
//
// A group of one block would leave a warpgroup without work. It is *shared*: each warpgroup
// multiplies half of the boxes, and the sums of both are added.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "instructions/product/matrix_finish.cuh"
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
    for (uint32_t row = product_.row_begin; row < end; row += kRows) {
      rows_ = {row, min_of(kRows, end - row)};
      // No warp uses the scratch any more.
      consumer_.sync_alive();
      finisher().begin_rows();
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
      finisher().end_rows();
    }
    if (!waited) consumer_.wait_ready();
    // Products of few rows (rows.cuh) use the scratch at once.
    if constexpr (program::kAnyProduct) consumer_.sync();
  }

 private:
  __device__ __forceinline__ MatrixFinisher<Used> finisher() const {
    return {stage_, consumer_, rows_};
  }

  // Multiply and finish the group of blocks that begins with `first`. `stops`: see multiply.
  __device__ __forceinline__ void group(uint32_t first, bool stops) {
    RowScales scales(stage_, product_, rows_.first, first == 0 ? rows_.count : 0);
    const MatrixGroup group(order_, first);
    MatrixSums sums;
    sums.clear();
    sums.settle();
    if (group.blocks > kWarpgroups + warpgroup_index())
      multiply<kMaxBlocks, 1>(group, sums, scales, stops);
    else if (kTurnBoxes > 1 && group.own_boxes() % kTurnBoxes == 0)
      multiply<1, kTurnBoxes>(group, sums, scales, stops);
    else
      multiply<1, 1>(group, sums, scales, stops);
    if (first + kGroupBlocks >= order_.blocks) consumer_.note(stage_, Event::kComputed);
    while (scales.advance()) continue;
    // The pages of the last step may be overwritten, the scales are there, and no warp has ended:
    // warpgroups meet in matrix_quads.cuh.
    consumer_.sync_alive();
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) __attribute__((always_inline)) {
      finisher().finish(Epilogue<I>(stage_), group, sums);
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
    const uint32_t first_box = group.is_shared() ? warpgroup_index() * own : 0;
    const uint32_t turns = steps * (own / kBoxes);
    // Rows of x whose scale a warp computes beside a turn, and from which turn to which: what it
    // asks for has arrived by then.
    constexpr uint32_t kScales = kRows / kNumConsumers + 1;
    const uint32_t scaled = ceil_div(kScales, turns), apart = max_of(1, turns / kScales);
    uint32_t next_scales = 0;
    const StepOperands<kBlocks> operands(group, warpgroup_index());
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

  const Stage& stage_;
  const Product& product_;
  Consumer& consumer_;
  const MatrixOrder order_;
  MatrixRows rows_;
};

}  // namespace megavm
