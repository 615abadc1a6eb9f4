// Semaphores: mbarriers in shared memory, between the warps of a worker.
#pragma once

#include "cuda/fault.cuh"

namespace megavm {

// Index of the first semaphore of a kind. Kinds 0 and 1 have one per page, 2 to 7 one per stage, 8
// has one, 9 to 12 have two, one for each place in the scratch.
__device__ constexpr uint32_t first_semaphore(SemaphoreKind kind) {
  const uint32_t number = static_cast<uint32_t>(kind);
  if (number < 2) return number * kPages;
  const uint32_t stages = 2 * kPages + (min_of(number, 8) - 2) * kStages;
  return number < 9 ? stages : stages + 1 + (number - 9) * 2;
}
static_assert(8 * (first_semaphore(SemaphoreKind::kScalesFinished) + 2) <= kSemaphoreBytes);

struct Semaphore {
  SemaphoreKind kind;
  uint32_t number;

  __device__ __forceinline__ uint32_t address() const {
    return ptx::shared_address(shared_memory) + kSemaphoresAt +
           8 * (first_semaphore(kind) + number);
  }

  __device__ __forceinline__ void init(uint32_t count) const {
    ptx::mbarrier_init(address(), count);
  }
  __device__ __forceinline__ void arrive() const { ptx::mbarrier_arrive(address()); }
  // Called by all lanes of the warp. Counts as kWarpArrivals arrivals.
  __device__ __forceinline__ void arrive_together() const {
    __syncwarp();
    if (kWarpArrivals == kLanes || lane_index() == 0) arrive();
  }
  __device__ __forceinline__ bool is_over(uint32_t phase) const {
    return ptx::mbarrier_test_wait(address(), phase);
  }

  // The same between steps of a matrix product. Those of 128 rows are bound by the power that the
  // GPU may take: they suspend the thread for a short time, which takes less than polling.
  __device__ __forceinline__ bool is_step_over(uint32_t phase) const {
    return program::kMatrixRows >= 128 ? ptx::mbarrier_try_wait(address(), phase) : is_over(phase);
  }

  // Wait until the phase of this parity is complete.
  __device__ __forceinline__ void wait(uint32_t phase) const {
    while (!ptx::mbarrier_try_wait(address(), phase))
      if (__builtin_expect(is_stopping(), 0)) give_up(phase);
  }
  // The same, but returns false if the worker is stopping.
  __device__ __forceinline__ bool wait_unless_stopping(uint32_t phase) const {
    while (!ptx::mbarrier_try_wait(address(), phase))
      if (__builtin_expect(is_stopping(), 0)) return false;
    return true;
  }
  // The same for the controller, which also watches for a timeout: false when the worker must stop.
  __device__ __forceinline__ bool wait_watching(uint32_t phase) const {
    Watch watch;
    while (!__all_sync(~0u, ptx::mbarrier_try_wait(address(), phase)))
      if (watch.is_over()) return false;
    return true;
  }
  [[noreturn]] __device__ __forceinline__ void give_up(uint32_t phase) const {
    stop_waiting(static_cast<uint32_t>(kind) << 16 | number << 8 | phase);
  }
};

// ---- What one role passes to another through two places in the scratch, in turn.

template <SemaphoreKind kArrived, SemaphoreKind kFinished>
struct PlacesCursor {
  uint32_t number = 0;  // counts what was passed in the launch

  __device__ __forceinline__ uint32_t half() const { return number & 1; }
  __device__ __forceinline__ uint32_t phase() const { return number >> 1 & 1; }
  __device__ __forceinline__ void advance() { ++number; }
  __device__ __forceinline__ Semaphore arrived() const { return {kArrived, half()}; }
  __device__ __forceinline__ Semaphore finished() const { return {kFinished, half()}; }
};
// Blocks of sums, from consumers to the storer.
using SumsCursor = PlacesCursor<SemaphoreKind::kSumsArrived, SemaphoreKind::kSumsFinished>;
// The scales of up to kMatrixRows rows of a matrix product, from the storer to the consumers.
using ScalesCursor = PlacesCursor<SemaphoreKind::kScalesArrived, SemaphoreKind::kScalesFinished>;

// ---- Rings.

// A place in an endless sequence that goes round a ring: its slot, and the parity of the round.
template <uint32_t kSlots>
struct RingCursor {
  uint32_t slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  // No further than one round.
  __device__ __forceinline__ void advance(uint32_t slots) {
    slot += slots;
    if (slot >= kSlots) {
      slot -= kSlots;
      phase ^= 1;
    }
  }
};

// ---- The ring of pages.

__device__ __forceinline__ Semaphore page_arrived(uint32_t slot) {
  return {SemaphoreKind::kPageArrived, slot};
}
__device__ __forceinline__ Semaphore page_finished(uint32_t slot) {
  return {SemaphoreKind::kPageFinished, slot};
}

struct PageCursor : RingCursor<kPages> {
  __device__ __forceinline__ uint32_t address() const {
    return ptx::shared_address(shared_memory) + slot * kPageBytes;
  }
};

}  // namespace megavm
