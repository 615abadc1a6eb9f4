// Barriers: counters in memory that instructions signal, step after step, and that never go back.
#pragma once

#include "cuda/stage.cuh"

namespace megavm {

// A counter and what it is awaited to reach.
struct Awaited {
  const uint32_t* counter = nullptr;
  uint32_t barrier = 0;
  uint32_t target = 0;

  Awaited() = default;

  // `more` signals in a step of the launch, and all of the steps before.
  __device__ __forceinline__ Awaited(const Launch& launch, uint32_t number, uint32_t step,
                                     uint32_t more)
      : counter(launch.barriers + number * kBarrierStride),
        barrier(number),
        target((launch.steps_before + step) * launch.signals[number] + more) {}

  // Whether the counter is there; what its signallers stored can be read then. It stops the warp
  // when the worker is to stop.
  __device__ __forceinline__ bool is_over() const {
    const uint32_t value = ptx::load_acquire(counter);
    if (has_reached(value)) return true;
    if (__builtin_expect(is_stopping(), 0)) stop(FaultKind::kBarrier, barrier, 0, 0, value, target);
    return false;
  }

  // The same without any ordering, and without a word when the worker is to stop.
  __device__ __forceinline__ bool is_likely() const {
    return has_reached(ptx::load_relaxed(counter));
  }

 private:
  // Counters wrap around: compare differences.
  __device__ __forceinline__ bool has_reached(uint32_t value) const {
    return static_cast<int32_t>(value - target) >= 0;
  }
};

}  // namespace megavm
