// The storer warp finishes products of one row, computes the scales of rows of matrix products, and
// publishes results: when all results of an instruction are stored, it signals the instruction's
// hint and barrier, and at the end of a step that of the step. So no consumer waits for a fence.
#pragma once

#include "cuda/barrier.cuh"
#include "cuda/trace.cuh"

namespace megavm {

class Storer {
 public:
  __device__ __forceinline__ explicit Storer(const Launch& launch) : launch_(launch) {}

  __device__ __forceinline__ void note(const Stage& stage, Event event) const {
    megavm::note(launch_, stage, event);
  }

  // Announce that all results of an instruction are stored. One lane calls it. The semaphore
  // `stored` has made the consumers' stores visible to this thread; the release passes them on to
  // every worker that acquires the barrier. A hint orders nothing, so it is relaxed.
  __device__ __forceinline__ void publish(const Stage& stage) const {
    if constexpr (program::kInOrder) fence();
    if (stage.exchange.hint.signal != kNone)
      ptx::add_relaxed(launch_.barriers + stage.exchange.hint.signal * kBarrierStride, 1);
    if (launch_.alone) return;
    signal(stage.words.header.signal);
    if (stage.ends_step && launch_.step_barriers != kNone)
      signal(step_barrier(launch_, stage.step - launch_.first_step));
  }

  StageCursor stage;
  SumsCursor sums;  // the next block of sums
  ScalesCursor scales;

 private:
  __device__ __forceinline__ void signal(uint32_t barrier) const {
    if (barrier == kNone) return;
    uint32_t* counter = launch_.barriers + barrier * kBarrierStride;
    if (!all_ranks_signal(launch_, barrier)) return ptx::add_release(counter, 1);
    // One fence, then a relaxed add to the counter of every rank: a release to each would wait
    // anew.
    ptx::fence_system();
    const uint64_t first = reinterpret_cast<uint64_t>(counter) - on_rank(0, launch_.rank);
#pragma unroll
    for (uint32_t rank = 0; rank < program::kRanks; ++rank)
      ptx::add_relaxed_system(on_rank(first, rank), 1);
  }

  static __device__ __forceinline__ void fence() {
    program::kRanks > 1 ? ptx::fence_system() : ptx::fence_gpu();
  }

  const Launch& launch_;
};

}  // namespace megavm
