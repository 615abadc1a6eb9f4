// The consumers: eight warps that compute an instruction together. Each has a Consumer: its place
// in the rings, and its semaphores.
#pragma once

#include "cuda/trace.cuh"

namespace megavm {

// Whether `count` pages, from `page` on, have arrived. All lanes get lane 0's answer.
__device__ __forceinline__ bool has_arrived(const PageCursor& page, uint32_t count) {
  bool there = true;
  PageCursor each = page;
  for (uint32_t i = 0; i < count; ++i, each.advance())
    there &= page_arrived(each.slot).is_over(each.phase);
  there = __shfl_sync(~0u, there, 0);
  __syncwarp();
  if constexpr (kWarpArrivals > 1) {
    each = page;
    for (uint32_t i = 0; there && i < count; ++i, each.advance())
      page_arrived(each.slot).wait(each.phase);
  }
  return there;
}

class Consumer {
 public:
  __device__ __forceinline__ explicit Consumer(const Launch& launch) : launch_(launch) {}

  __device__ __forceinline__ uint32_t warp() const { return warp_index(); }
  __device__ __forceinline__ uint32_t thread() const { return threadIdx.x; }

  // Wait for the barriers in the header of the instruction.
  __device__ __forceinline__ void wait_ready() { stage.ready().wait(stage.phase); }

  // Wait until the tagged words that the instruction reads have likely been stored. Orders nothing.
  __device__ __forceinline__ void wait_hinted() { stage.hinted().wait(stage.phase); }
  __device__ __forceinline__ bool is_hinted() const {
    return __shfl_sync(~0u, stage.hinted().is_over(stage.phase), 0);
  }

  // Wait until the storer has finished the sums in the half of the scratch that is next; in both
  // halves.
  __device__ __forceinline__ void wait_sums() const { sums.finished().wait(sums.phase() ^ 1); }
  __device__ __forceinline__ void wait_all_sums() const {
    SumsCursor other = sums;
    wait_sums();
    other.advance();
    other.finished().wait(other.phase() ^ 1);
  }

  // Wait until no warp uses the scratch any more for an earlier instruction.
  __device__ __forceinline__ void wait_scratch() {
    if constexpr (kStorerFinishes)
      wait_all_sums();
    else
      sync();
  }

  // Between these two calls the consumers wait for results of other workers, and the loader keeps
  // fewer copies in flight.
  __device__ __forceinline__ void begin_waiting() const { set_waiting(1); }
  __device__ __forceinline__ void end_waiting() const { set_waiting(0); }

  // Wait until all consumers have called this.
  __device__ __forceinline__ void sync() {
    const Semaphore all{SemaphoreKind::kConsumers, 0};
    all.arrive_together();
    all.wait(sync_phase_);
    sync_phase_ ^= 1;
  }
  // The same, and no consumer has ended when this returns. Ends this warp if one has.
  // NOTE: `sync` does not say so much: a warp may end in it that others have already counted.
  __device__ __forceinline__ void sync_alive() {
    const Semaphore all{SemaphoreKind::kConsumers, 0};
    // Lanes decide together. A warp gives up only if the others had not all come after it saw that
    // one has ended: if they had, some may multiply already.
    static_assert(kLanes % kNumConsumers == 0);
    __syncwarp();
    if (__any_sync(~0u, has_ended(warp_index()))) all.give_up(sync_phase_);
    all.arrive_together();
    bool met = false, ended = false;
    do {
      if (ended) all.give_up(sync_phase_);
      ended = __any_sync(~0u, is_stopping() && has_ended(lane_index() % kNumConsumers));
      met = __all_sync(~0u, ptx::mbarrier_try_wait(all.address(), sync_phase_));
    } while (!met);
    sync_phase_ ^= 1;
  }
  // The same as sync, but returns false if the worker is stopping.
  __device__ __forceinline__ bool sync_unless_stopping() {
    const Semaphore all{SemaphoreKind::kConsumers, 0};
    all.arrive_together();
    const bool met = all.wait_unless_stopping(sync_phase_);
    sync_phase_ ^= 1;
    return met;
  }

  // This warp has finished reading the page.
  __device__ __forceinline__ void finish(const PageCursor& page) const {
    page_finished(page.slot).arrive_together();
  }

  // `count` pages at once, one lane per page: wait until they have arrived; finish them.
  __device__ __forceinline__ void wait_pages(uint32_t count) const {
    if (!have_arrived(page, count)) page_arrived(page.slot).give_up(page.phase);
  }
  // The same for those from `from` on, but returns false if the worker is stopping.
  __device__ __forceinline__ bool have_arrived(const PageCursor& from, uint32_t count) const {
    PageCursor mine = from;
    mine.advance(lane_index());
    while (!__all_sync(~0u, lane_index() >= count || page_arrived(mine.slot).is_over(mine.phase)))
      if (__any_sync(~0u, is_stopping())) return false;
    __syncwarp();
    PageCursor each = from;
    if constexpr (kWarpArrivals > 1)
      for (uint32_t i = 0; i < count; ++i, each.advance()) page_arrived(each.slot).wait(each.phase);
    return true;
  }
  // Wait for the pages of a step (Loader::begin_pages). False if the worker is stopping.
  __device__ __forceinline__ bool has_step_arrived(const PageCursor& first) const {
    while (!__all_sync(~0u, page_arrived(first.slot).is_step_over(first.phase)))
      if (__any_sync(~0u, is_stopping())) return false;
    return true;
  }
  // Finish the next `count` pages. A worker that stops leaves them, as some may not have arrived:
  // with `stops` they are only passed.
  __device__ __forceinline__ void finish_pages(uint32_t count, bool stops = false) {
    if constexpr (kWarpArrivals > 1) {
      for (; count > 0; --count, page.advance()) {
        if (stops) continue;
        // All pages but a step's first arrive without a wait: synccheck calls that an error.
        page_arrived(page.slot).wait(page.phase);
        finish(page);
      }
      return;
    }
    PageCursor mine = page;
    mine.advance(lane_index());
    __syncwarp();
    if (lane_index() < count && !stops) page_finished(mine.slot).arrive();
    page.advance(count);
  }

  // Address of the scratch, `offset` bytes from its start.
  __device__ __forceinline__ uint32_t scratch(uint32_t offset = 0) const {
    return scratch_at(offset);
  }

  __device__ __forceinline__ void note(const Stage& stage, Event event) const {
    if constexpr (program::kTrace)
      if (threadIdx.x == 0) megavm::note(launch_, stage, event);
  }

  StageCursor stage;
  PageCursor page;  // the next page of the ring
  SumsCursor sums;  // the next block of sums
  ScalesCursor scales;

 private:
  __device__ __forceinline__ void set_waiting(uint32_t waiting) const {
    if (threadIdx.x == 0) ptx::store_shared(ptx::shared_address(&control().waiting), waiting);
  }

  const Launch& launch_;
  uint32_t sync_phase_ = 0;
};

}  // namespace megavm
