// The controller fetches instructions ahead, resolves their operands, and hands them to the other
// roles; its second warp, the waiter, sits out the waits of their headers.
#pragma once

#include "cuda/barrier.cuh"
#include "cuda/trace.cuh"

namespace megavm {

constexpr uint32_t kDynamicAhead = 2;  // instructions that a worker draws before it needs them

// Draws instructions: the worker's own queue again and again, or tickets of the common one.
class Queue {
 public:
  __device__ __forceinline__ explicit Queue(const Launch& launch) : launch_(launch) {
    const uint32_t worker = launch.dynamic ? 0 : blockIdx.x;
    begin_ = launch.queue_begin[worker];
    size_ = launch.queue_begin[worker + 1] - begin_;
  }

  // The next instruction; false when the queue says stop.
  __device__ __forceinline__ bool next() {
    if (launch_.dynamic) {
      uint32_t ticket = 0;
      if (lane_index() == 0) ticket = ptx::fetch_add_relaxed(launch_.ticket, 1);
      ticket = __shfl_sync(~0u, ticket, 0);
      step = size_ == 0 ? launch_.steps : ticket / size_;
      position = size_ == 0 ? 0 : ticket % size_;
    } else if (!started_) {
      started_ = true;
      if (size_ == 0) step = launch_.steps;
    } else if (++position == size_) {
      position = 0;
      ++step;
    }
    return step < launch_.steps;
  }

  __device__ __forceinline__ const uint32_t* words() const {
    return reinterpret_cast<const uint32_t*>(launch_.instructions + begin_ + position);
  }

  __device__ __forceinline__ Exchange exchange() const {
    const uint64_t from = reinterpret_cast<uint64_t>(launch_.exchanges + begin_ + position);
    const ptx::Words4 low = ptx::load_constant4(from), high = ptx::load_constant4(from + 16);
    return {{low.x, low.y}, low.z, low.w, high.x, high.y, high.z, high.w};
  }

  // Rows of the trace stand in the order of workers, steps, positions.
  __device__ __forceinline__ uint32_t trace_row() const {
    return begin_ * launch_.steps + step * size_ + position;
  }

  uint32_t step = 0;
  uint32_t position = 0;

 private:
  const Launch& launch_;
  uint32_t begin_;
  uint32_t size_;
  bool started_ = false;
};

__device__ __forceinline__ uint32_t tensor_mask(uint32_t opcode) {
  return opcode < kNumOpcodes ? kTensorMask[opcode] : 0;
}

// The first row of an instruction whose words the storer sees to; kNone if there is none, as in
// nearly every case. `live`: of Launch::counts, each in its lane.
__device__ __forceinline__ uint32_t first_tagged_row(const Exchange& exchange, uint32_t live) {
  live = __shfl_sync(~0u, live, exchange.row_count % kLanes);
  if (exchange.num_regions == 0) return kNone;
  if (exchange.row_count == kNone) return 0;
  return live >= exchange.row_end ? kNone : max_of(exchange.row_begin, live);
}

__device__ __forceinline__ void run_controller(const Launch& launch) {
  const uint32_t lane = lane_index();
  static_assert(kNumCounts == kLanes && kInstructionWords == kLanes, "one lane for each");
  // A launch changes none of these numbers.
  const uint32_t counted = __ldg(launch.counts + lane);
  const uint32_t live = counted == kNone ? 0 : constant_integer(launch.tensors[counted], 0, 0);
  Queue queue(launch);
  StageCursor cursor;
  StageCursor drawn;  // the stage that must be released before another ticket is drawn
  uint32_t count = 0;
  while (true) {
    // Wait for a free stage.
    if (!cursor.released().wait_watching(cursor.phase ^ 1)) return report_faults();
    if (launch.dynamic && count >= kDynamicAhead) {
      if (!drawn.released().wait_watching(drawn.phase)) return report_faults();
      drawn.advance();
    }
    ++count;
    Stage& stage = stage_at(cursor.slot);
    const bool more = queue.next();
    if (lane == 0) {
      set_current(queue.position, queue.step);
      stage.position = queue.position;
      stage.step = launch.first_step + queue.step;
      stage.tag = launch.epoch + launch.first_step + queue.step + 1;
      if (program::kAnyByMachine) stage.is_held = 1;
      stage.trace_row = more ? queue.trace_row() : kNone;
    }
    if (more) {
      // Fetch the words and look up the tensors they name.
      const uint32_t word = __ldg(queue.words() + lane);
      const Exchange exchange = queue.exchange();
      reinterpret_cast<uint32_t*>(&stage.words)[lane] = word;
      const uint32_t mask = tensor_mask(__shfl_sync(~0u, word, 0));
      const uint32_t handle = __shfl_sync(~0u, word, (lane + kHeaderWords) % kLanes);
      if (lane < kOperandWords && (mask >> lane & 1) && handle != kNone) {
        const ptx::Words4 entry =
            ptx::load_constant4(reinterpret_cast<uint64_t>(launch.tensors + handle));
        ptx::store_shared4(ptx::shared_address(&stage.tensors[lane]), entry);
      }
      const uint32_t tagged_row = first_tagged_row(exchange, live);
      if (lane == 0) stage.exchange = exchange, stage.tagged_row = tagged_row;
    }
    __syncwarp();
    if (lane == 0 && more) {
      note_worker(launch, stage);
      note(launch, stage, Event::kFetched);
    }
    cursor.resolved().arrive_together();
    if (!more) break;
    cursor.advance();
  }
  // Keep the watch until all is done.
  for (uint32_t i = 1; i < kStages; ++i) {
    cursor.advance();
    if (!cursor.released().wait_watching(cursor.phase ^ 1)) return report_faults();
  }
}

// How many of a tensor's writers are enough to begin to poll its words: the last ones store theirs
// while the first polls are on their way.
__device__ __forceinline__ uint32_t hinted_at(uint32_t writers) {
  return writers - writers / kHintSlack;
}

// The waiter. Lane 0 sits out the waits of the headers, instruction by instruction; lane 1 does the
// same for hints, which must not hold up the waits of later instructions.
__device__ __forceinline__ void run_waiter(const Launch& launch) {
  if (lane_index() > 1) return;
  const bool hints = lane_index() == 1;
  StageCursor cursor;
  StageCursor before;  // of the instruction before, if there is one
  bool is_first = true;
  Awaited awaited;
  bool waiting = false;
  uint32_t next_wait = 0;  // of the header
  while (true) {
    if (waiting) {
      waiting = hints ? !awaited.is_likely() : !awaited.is_over();
      if (waiting) {
        // Which word a hint spoke of the consumers find out.
        if (hints && __builtin_expect(is_stopping(), 0)) return;
        __nanosleep(20);
        continue;
      }
    }
    const Stage& stage = stage_at(cursor.slot);
    if (next_wait == 0) {
      cursor.resolved().wait(cursor.phase);
      if (stage.trace_row == kNone) return;
      if (!hints) set_current(stage.position, stage.step - launch.first_step);
    }
    // The next thing to wait for; there is none when the instruction is run alone.
    const uint32_t step = stage.step - launch.first_step;
    const uint32_t end = launch.alone ? 0 : hints ? 1 : kMaxWaits;
    while (next_wait < end && !waiting) {
      const Wait& wait = stage.words.header.waits[next_wait++];
      const uint32_t number = hints ? stage.exchange.hint.wait : wait.barrier;
      if (number == kNone) continue;
      awaited =
          Awaited(launch, number, step, hints ? hinted_at(launch.signals[number]) : wait.target);
      waiting = true;
    }
    if (waiting) continue;
    // Consumers turn to an instruction while the storer, or another of them, still stores what the
    // one before it has computed. That is right where barriers and tagged words order all that
    // conflicts, as in every program of the compiler. Where the queue does, an instruction is ready
    // only when the storer has released the one before it: everything is stored then, and visible
    // to this worker's warps (they learn of it through semaphores) and, by the storer's fence, to
    // whoever sees a word that is stored later.
    if constexpr (program::kInOrder)
      if (!hints && !is_first && !before.released().is_over(before.phase)) {
        if (__builtin_expect(is_stopping(), 0)) before.released().give_up(before.phase);
        __nanosleep(20);
        next_wait = end;
        continue;
      }
    // The storer looks for the words of some instructions first; it says so when it has to stop.
    if (!hints && is_by_machine(stage) &&
        ptx::load_shared_acquire(ptx::shared_address(&stage.is_held)) != 0) {
      if (__builtin_expect(is_stopping(), 0)) return;
      __nanosleep(20);
      next_wait = end;
      continue;
    }
    if (!hints) note(launch, stage, Event::kReady);
    (hints ? cursor.hinted() : cursor.ready()).arrive();
    cursor.released().arrive();
    before = cursor;
    is_first = false;
    cursor.advance();
    next_wait = 0;
  }
}

}  // namespace megavm
