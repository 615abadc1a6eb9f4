// Barriers: counters in global memory, between workers. Instructions signal them in every step;
// they are never reset.
#pragma once

#include "cuda/stage.cuh"

namespace megavm {

// A counter and the target that it must reach.
struct Awaited {
  const uint32_t* counter = nullptr;
  uint32_t barrier = 0;
  uint32_t target = 0;
  bool is_shared = false;  // other ranks signal it too

  Awaited() = default;

  // The target: all signals of earlier steps, and `more` signals of this one.
  __device__ __forceinline__ Awaited(const Launch& launch, uint32_t number, uint32_t step,
                                     uint32_t more)
      : counter(launch.barriers + number * kBarrierStride),
        barrier(number),
        target((launch.steps_before + step) * launch.signals[number] + more),
        is_shared(program::kRanks > 1 && number < launch.shared_barriers) {}

  // Whether the counter has reached the target. The load acquires, so the signallers' stores are
  // visible then. Stops this warp when the worker is stopping.
  __device__ __forceinline__ bool is_over() const {
    const uint32_t value =
        is_shared ? ptx::load_acquire_system(counter) : ptx::load_acquire(counter);
    if (has_reached(value)) return true;
    if (__builtin_expect(is_stopping(), 0)) stop(FaultKind::kBarrier, barrier, 0, 0, value, target);
    return false;
  }

  // The same for hints: relaxed, so it orders nothing, and it never stops the warp.
  __device__ __forceinline__ bool is_likely() const {
    return has_reached(ptx::load_relaxed(counter));
  }

 private:
  // Counters wrap around, so compare by difference.
  __device__ __forceinline__ bool has_reached(uint32_t value) const {
    return static_cast<int32_t>(value - target) >= 0;
  }
};

}  // namespace megavm
