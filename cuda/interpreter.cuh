// The interpreter: one persistent CTA per SM, its warps specialised by role. An instruction has a
// stage of a ring; semaphores pass it from role to role:
//   controller  fetches it and resolves its operands             -> resolved
//   waiter      waits for its barriers (lane 0), hint (lane 1)   -> ready, hinted
//   loader      streams its weights or KV rows into pages        -> page_arrived
//   consumers   compute, free the pages                          -> page_finished, stored
//   storer      finishes products of one row, computes scales of rows, signals barriers
// The controller reuses the stage when loader, storer and both lanes of the waiter have arrived at
// `released`. A stage with trace_row == kNone ends the other roles.
#pragma once

#include "cuda/controller.cuh"
#include "cuda/kernel.cuh"
#include "cuda/storer.cuh"
#include "cuda/tagged_rows.cuh"

namespace megavm {

// Used: the KernelList of the program.
template <class Used>
__device__ __forceinline__ void run_loader(const Launch& launch) {
  Loader loader(launch);
  while (true) {
    loader.wait_resolved();
    const Stage& stage = stage_at(loader.stage.slot);
    if (stage.trace_row == kNone) return loader.finish_deferred();
    if (lane_index() == 0) {
      set_current(stage.position, stage.step - launch.first_step);
      note(launch, stage, Event::kLoadBegin);
    }
    Used::dispatch(stage.words.header.opcode, [&]<class K>(K*) { K::load(stage, loader); });
    end_together();
    __syncwarp();
    if (lane_index() == 0) note(launch, stage, Event::kLoadIssued);
    loader.stage.released().arrive_together();
    loader.stage.advance();
  }
}

template <class Used>
__device__ __forceinline__ void run_consumer(const Launch& launch) {
  Consumer consumer(launch);
  while (true) {
    consumer.stage.resolved().wait(consumer.stage.phase);
    const Stage& stage = stage_at(consumer.stage.slot);
    if (stage.trace_row == kNone) return;
    if (lane_index() == 0) set_current(stage.position, stage.step - launch.first_step);
    consumer.note(stage, Event::kBegin);
    Used::dispatch(stage.words.header.opcode, [&]<class K>(K*) __attribute__((always_inline)) {
      K::consume(stage, consumer);
      if constexpr (!K::kStores) consumer.note(stage, Event::kEnd);
    });
    end_together();
    consumer.stage.stored().arrive_together();
    consumer.stage.advance();
  }
}

template <class Used>
__device__ __forceinline__ void run_storer(const Launch& launch) {
  Storer storer(launch);
  while (true) {
    storer.stage.resolved().wait(storer.stage.phase);
    const Stage& stage = stage_at(storer.stage.slot);
    if (stage.trace_row == kNone) return;
    if (lane_index() == 0) set_current(stage.position, stage.step - launch.first_step);
    begin_tagged_rows(launch, stage, storer.stage);
    Used::dispatch(stage.words.header.opcode, [&]<class K>(K*) { K::store(stage, storer); });
    storer.stage.stored().wait(storer.stage.phase);
    end_together();
    __syncwarp();
    end_tagged_rows(launch, stage, stage.tagged_row);
    if (lane_index() == 0) {
      storer.publish(stage);
      storer.note(stage, Event::kSignalled);
    }
    storer.stage.released().arrive_together();
    storer.stage.advance();
  }
}

__device__ __forceinline__ void initialise(const Launch& launch) {
  if (threadIdx.x == 0) {
    // First, because it takes longest.
    const uint32_t aborted = ptx::load_relaxed(launch.abort) != 0 ? kBehind : 0;
#pragma unroll 1
    for (uint32_t i = 0; i < kPages; ++i) {
      page_arrived(i).init(1);
      page_finished(i).init(kNumConsumers * kWarpArrivals);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < kStages; ++i) {
      const StageCursor stage{i, 0};
      stage.resolved().init(kWarpArrivals);
      stage.ready().init(program::kAnyByMachine ? 2 : 1);  // waiter; storer, or the waiter again
      stage.stored().init(kNumConsumers * kWarpArrivals);
      stage.earlier().init(1);
      stage.hinted().init(1);
      stage.released().init(2 * kWarpArrivals + 2);  // loader, storer; waiter (waits, hints)
    }
    Semaphore{SemaphoreKind::kConsumers, 0}.init(kNumConsumers * kWarpArrivals);
    for (uint32_t half = 0; half < 2; ++half) {
      const SumsCursor sums{half};
      sums.arrived().init(kNumConsumers * kWarpArrivals);
      sums.finished().init(kWarpArrivals);
      const ScalesCursor scales{half};
      scales.arrived().init(kWarpArrivals);
      scales.finished().init(kNumConsumers * kWarpArrivals);
    }
    control() = {launch.timeout, launch.faults, launch.abort, 0, aborted, 0, launch.rank};
    ptx::fence_mbarrier_init();
  }
  if (lane_index() == 0) current() = {};
  __syncthreads();
}

// The megakernel. Grid: the workers of the program.
template <class Used>
__device__ __forceinline__ void run(const Launch& launch) {
  initialise(launch);
  // Its launch adds nothing to the records.
  if (__builtin_expect(control().aborted == kBehind, 0)) return;
  if (warp_index() < kNumConsumers) {
    ptx::grow_registers<kConsumerRegisters>();
    run_consumer<Used>(launch);
  } else {
    ptx::shrink_registers<kRoleRegisters>();
    if (warp_index() == kLoaderWarp) run_loader<Used>(launch);
    if (warp_index() == kControllerWarp) run_controller(launch);
    if (warp_index() == kStorerWarp) run_storer<Used>(launch);
    if (warp_index() == kWaiterWarp) run_waiter(launch);
  }
}

}  // namespace megavm
