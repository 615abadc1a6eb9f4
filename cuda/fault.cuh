// How a launch ends early: a warp that cannot go on records the cause, sets `stopping`, and exits.
// The other warps do the same at their next wait.
#pragma once

#include "cuda/config.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"
#include "faults.hpp"

namespace megavm {

extern __shared__ __align__(1024) unsigned char shared_memory[];

// State that every wait needs. It is kept in shared memory to save registers.
struct alignas(16) Control {
  uint64_t timeout;
  FaultRecord* faults;
  uint32_t* abort;
  uint32_t stopping;  // 1: all warps of this worker stop at their next wait
  uint32_t aborted;   // 1: they stop because another worker has faulted; or kBehind
  uint32_t waiting;   // 1: the consumers wait for results of other workers, see Loader
  uint32_t rank;
};
static_assert(sizeof(Control) <= kControlBytes);
// Control::aborted of a worker that begins when another one, most often of an earlier launch, has
// faulted. It ends at once.
constexpr uint32_t kBehind = 2;

// The instruction that a warp executes and, when it stops, the cause. FaultRecord has the same
// fields and says what they mean.
struct alignas(16) Current {
  uint32_t position;
  uint32_t step;
  uint32_t kind;
  uint32_t thing;
  uint32_t row, word, value, target;
};
static_assert(sizeof(Current) == kCurrentBytes);

__device__ __forceinline__ Control& control() {
  return *reinterpret_cast<Control*>(shared_memory + kControlAt);
}

// NOTE: read from the special register at every use. A cached value would occupy a register in the
// whole kernel.
__device__ __forceinline__ uint32_t warp_index() { return ptx::thread_index() / kLanes; }
__device__ __forceinline__ uint32_t lane_index() { return ptx::lane_index(); }

__device__ __forceinline__ Current& current() {
  return reinterpret_cast<Current*>(shared_memory + kCurrentAt)[warp_index()];
}

__device__ __forceinline__ void set_current(uint32_t position, uint32_t step) {
  ptx::store_shared2(ptx::shared_address(&current()), position, step);
}

// Record why this warp stops, and exit. The controller passes the record to the host
// (report_faults). This must be inlined: a call would cost every wait registers.
[[noreturn]] __device__ __forceinline__ void stop(FaultKind kind, uint32_t thing, uint32_t row,
                                                  uint32_t word, uint32_t value, uint32_t target) {
  const uint32_t address = ptx::shared_address(&current());
  ptx::store_shared4(address + 16, {row, word, value, target});
  ptx::store_shared2(address + 8, static_cast<uint32_t>(kind), thing);
  ptx::store_shared(ptx::shared_address(&control().stopping), 1);
  ptx::exit();
}

// The same for semaphores, packed into one word to keep the many waits small: 1, kind, number,
// phase (1, 15, 8, 8 bits).
[[noreturn]] __device__ __forceinline__ void stop_waiting(uint32_t semaphore) {
  // Keep the record of another lane of this warp: it is more specific.
  const uint32_t address = ptx::shared_address(&current());
  if (ptx::load_shared(address + 8) == 0) ptx::store_shared(address + 12, 1u << 31 | semaphore);
  ptx::exit();
}

// Stop because the instruction cannot be executed. The arguments appear in the fault's message.
[[noreturn]] __device__ __forceinline__ void stop_instruction(Fault fault, uint32_t row,
                                                              uint32_t word, uint32_t value,
                                                              uint32_t target) {
  stop(FaultKind::kInstruction, static_cast<uint32_t>(fault), row, word, value, target);
  __builtin_unreachable();
}

// End this warp if one of its lanes has ended. All lanes call this: at the end of an instruction,
// because lanes that go on would give the fault the name of the next one, or lose it if that was
// the last; and where lanes use what another one has looked up.
__device__ __forceinline__ void end_together() {
  // The lanes that vote are those that have not ended.
  if (__ballot_sync(~0u, true) != ~0u) ptx::exit();
}

// Whether a lane of a warp has ended before the end of the queue.
__device__ __forceinline__ bool has_ended(uint32_t warp) {
  const uint32_t record = ptx::shared_address(shared_memory) + kCurrentAt + warp * kCurrentBytes;
  return ptx::load_shared_volatile(record + 8) != 0 || ptx::load_shared_volatile(record + 12) != 0;
}

// Whether this worker is stopping. Every waiting loop asks this. Only the controller watches the
// time (see Watch).
__device__ __forceinline__ bool is_stopping() {
  return ptx::load_shared_volatile(ptx::shared_address(&control().stopping)) != 0;
}

// Unordered, and any answer is correct: it only tunes the loader. racecheck would report it, so it
// is disabled there.
__device__ __forceinline__ bool are_consumers_waiting() {
  if constexpr (kWarpArrivals > 1) return false;
  return ptx::load_shared_volatile(ptx::shared_address(&control().waiting)) != 0;
}

// The controller's last act: wait until the other warps have stopped, or 10 ms have passed (a warp
// that finished its work before records no cause), then tell the host and the other workers.
__device__ __forceinline__ void report_faults() {
  constexpr uint64_t kLongest = 10'000'000;  // ns
  const uint32_t warp = lane_index();
  const uint64_t since = ptx::global_timer();
  bool silent = true;
  while (silent) {
    __nanosleep(100000);
    silent = warp < kNumWarps && warp != kControllerWarp && !has_ended(warp);
    const bool in_time = ptx::global_timer() - since < kLongest;
    silent = __any_sync(~0u, silent) && __all_sync(~0u, in_time);
  }
  __syncwarp();
  if (warp < kNumWarps) {
    const Current& why = reinterpret_cast<const Current*>(shared_memory + kCurrentAt)[warp];
    FaultRecord& record = control().faults[blockIdx.x * kNumWarps + warp];
    // A warp that stopped at a semaphore has kind 0 and a packed word, see stop_waiting.
    const bool waited = why.kind == 0 && why.thing >> 31;
    const uint32_t kind = waited ? static_cast<uint32_t>(FaultKind::kSemaphore) : why.kind;
    record.kind = control().aborted ? static_cast<uint32_t>(FaultKind::kAborted) << 8 | kind : kind;
    record.position = why.position;
    record.step = why.step;
    record.thing = waited ? why.thing >> 16 & 0x7fff : why.thing;
    record.row = waited ? why.thing >> 8 & 0xff : why.row;
    record.word = why.word;
    record.value = why.value;
    record.target = waited ? why.thing & 0xff : why.target;
  }
  __threadfence();
  __syncwarp();
  static_assert(program::kRanks <= kLanes);
  if (warp >= program::kRanks) return;  // lane i tells rank i
  const uint64_t apart = (uint64_t{warp} - control().rank) << kRankShift;
  ptx::store_relaxed(
      reinterpret_cast<uint32_t*>(reinterpret_cast<uint64_t>(control().abort) + apart), 1);
}

// The controller's watch for a worker that makes no progress. All lanes call it together.
struct Watch {
  uint32_t turns = 0;
  uint64_t since = 0;

  // Check the time and the other workers on every 64th call; true when this worker must stop.
  __device__ __forceinline__ bool is_over() {
    if (++turns % 64 != 0) return false;
    const uint64_t now = ptx::global_timer();
    if (since == 0) since = now;
    const bool late = now - since > control().timeout;
    const bool aborted = ptx::load_relaxed(control().abort) != 0;
    if (!__any_sync(~0u, late || aborted || is_stopping())) return false;
    if (aborted) *const_cast<volatile uint32_t*>(&control().aborted) = 1;
    *const_cast<volatile uint32_t*>(&control().stopping) = 1;
    return true;
  }
};

}  // namespace megavm
