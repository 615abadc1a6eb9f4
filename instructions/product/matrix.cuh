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

namespace megavm {

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
      if (product_.x_squares != kNone) {
        consumer_.scales.finished().arrive_together();
        consumer_.scales.advance();
      }
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
    const MatrixGroup group(order_, first);
    MatrixSums sums;
    sums.clear();
    sums.settle();
    if (group.blocks > kWarpgroups + warpgroup_index())
      multiply<kMaxBlocks, 1>(group, sums, stops);
    else if (kTurnBoxes > 1 && group.own_boxes() % kTurnBoxes == 0)
      multiply<1, kTurnBoxes>(group, sums, stops);
    else
      multiply<1, 1>(group, sums, stops);
    if (product_.x_squares != kNone) consumer_.scales.arrived().wait(consumer_.scales.phase());
    if (first + kGroupBlocks >= order_.blocks) consumer_.note(stage_, Event::kComputed);
    // The pages of the last step may be overwritten, the scales are there, and no warp has ended:
    // warpgroups meet in matrix_quads.cuh.
    consumer_.sync_alive();
    const MatrixRows rows = finisher().complete(group, sums);
    Used::dispatch(stage_.words.header.opcode, [&]<class I>(I*) __attribute__((always_inline)) {
      finisher().finish(Epilogue<I>(stage_), group, rows, sums);
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
  // NOTE: only sums and moves to uniform registers, because this stands between the products of two
  // boxes.
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
        found.weights[i] = ptx::uniform(in_ring(step + weights_[i] + box * box_units_));
      found.x = ptx::uniform(in_ring(step + box * (kBoxBytes / kUnit)));
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
  __device__ __forceinline__ void multiply(const MatrixGroup& group, MatrixSums& sums, bool stops) {
    // A *turn* is kBoxes boxes of a step. All boxes of a step are there; those beyond the last
    // column are zeros.
    // NOTE: constants where all groups in which a warpgroup has two blocks have the same, as no
    // register is left for them in this loop.
    constexpr bool kTwoBlocks = kBlocks == kMaxBlocks;
    const uint32_t own = kTwoBlocks ? 1 : group.own_boxes();
    const uint32_t pages = kTwoBlocks ? kMostStepPages : group.pages;
    const uint32_t steps = kTwoBlocks ? order_.boxes() : ceil_div(order_.boxes(), group.boxes);
    const uint32_t first_box = !kTwoBlocks && group.is_shared() ? warpgroup_index() * own : 0;
    const StepOperands<kBlocks> operands(group, warpgroup_index());
    uint32_t in_step = 0;  // boxes of this warpgroup
    // NOTE: one loop over the turns of all steps. With one in the other, or with an end of the warp
    // in it, ptxas waits for every wgmma. Each turn is waited for, so that its pages are free at
    // once: meanwhile the other warpgroup multiplies.
#pragma unroll 1
    for (uint32_t left = steps * (own / kBoxes); left > 0; --left) {
      if (in_step == 0) {
        stops |= !consumer_.has_step_arrived(consumer_.page);
        if (left <= own / kBoxes) consumer_.note(stage_, Event::kLoadArrived);
      }
      BoxOperands<kBlocks> boxes[kBoxes];
#pragma unroll
      for (uint32_t i = 0; i < kBoxes; ++i)
        boxes[i] = operands.of(consumer_.page, first_box + in_step + i);
      multiply_boxes<kBlocks, kBoxes>(boxes, sums);
      ptx::wgmma_wait<0>();
      in_step += kBoxes;
      if (in_step == own) {
        in_step = 0;
        // NOTE: passed even if the worker is stopping: all warps of a wgmma must have the same
        // operands.
        if (left > 1) consumer_.finish_pages(pages, stops);
      }
    }
    sums.settle();
    if (stops) give_up();
  }

  // End this warp, which waited for the instruction's input, or for pages up to the next ones.
  [[noreturn]] __device__ __forceinline__ void give_up() const {
    const StageCursor& stage = consumer_.stage;
    if (!stage.ready().is_over(stage.phase)) stage.ready().give_up(stage.phase);
    page_arrived(consumer_.page.slot).give_up(consumer_.page.phase);
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
