// The controller fetches instructions ahead, resolves their operands, and hands them to the other
// roles through stages. Its second warp, the waiter, waits for their barriers and hints.
#pragma once

#include "cuda/barrier.cuh"
#include "cuda/trace.cuh"

namespace megavm {

constexpr uint32_t kDynamicAhead = 2;  // most instructions that a worker has drawn, not finished

// Draws instructions: the worker's own queue once per step, or tickets of the common queue.
class Queue {
 public:
  __device__ __forceinline__ explicit Queue(const Launch& launch) : launch_(launch) {
    const uint32_t worker = launch.dynamic ? 0 : blockIdx.x;
    begin_ = launch.queue_begin[worker];
    size_ = launch.queue_begin[worker + 1] - begin_;
  }

  // Advance to the next instruction; false when there is none left. All lanes call it together.
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
    if constexpr (!program::kAnyTaggedRows) {
      const ptx::Words2 hint = ptx::load_constant2(from);
      return {{hint.x, hint.y}, 0, 0, 0, 0, 0, 0};
    }
    const ptx::Words4 low = ptx::load_constant4(from), high = ptx::load_constant4(from + 16);
    return {{low.x, low.y}, low.z, low.w, high.x, high.y, high.z, high.w};
  }

  // Whether the worker has no other instruction of the step after this one. Those of a common queue
  // count one by one.
  __device__ __forceinline__ bool ends_step() const {
    return launch_.dynamic || position + 1 == size_;
  }

  // Rows of the trace are ordered by worker, then step, then position.
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

// The table in which lane i finds the tensor of operand word i.
__device__ __forceinline__ const Tensor* table_of(const Launch& launch, uint32_t opcode) {
  if constexpr (program::kRanks > 1)
    if (opcode < kNumOpcodes && kGatheredMask[opcode] >> lane_index() & 1) return launch.written;
  return launch.tensors;
}

// The copy of a tagged tensor that an instruction of a step uses as operand `word` (words.cuh). Of
// words that the storer publishes, it is the one that the step makes empty.
__device__ __forceinline__ uint32_t copy_of(const Launch& launch, uint32_t step,
                                            const Exchange& exchange, uint32_t word) {
  const uint32_t copy = (launch.first_copy + launch.first_step + step) % kCopies;
  if (program::kAnyByMachine && exchange.by_machine >> word & 1) return copy ^ kCopies / 2;
  return copy;
}

// The first row of an instruction whose words the storer handles; kNone, the usual case, if it
// handles none. `live`: lane i has the number of live rows that Launch::counts[i] names.
__device__ __forceinline__ uint32_t first_tagged_row(const Exchange& exchange, uint32_t live) {
  if constexpr (!program::kAnyTaggedRows) return kNone;
  live = __shfl_sync(~0u, live, exchange.row_count % kLanes);
  if (exchange.num_regions == 0) return kNone;
  if (exchange.row_count == kNone) return 0;
  return live >= exchange.row_end ? kNone : max_of(exchange.row_begin, live);
}

__device__ __forceinline__ void run_controller(const Launch& launch) {
  const uint32_t lane = lane_index();
  static_assert(kNumCounts == kLanes && kInstructionWords == kLanes, "one lane for each");
  // The numbers of live rows are constant within a launch, so they are read once.
  const uint32_t counted = program::kAnyTaggedRows ? __ldg(launch.counts + lane) : kNone;
  const uint32_t live = counted == kNone ? 0 : constant_integer(launch.tensors[counted], 0, 0);
  Queue queue(launch);
  StageCursor cursor;
  StageCursor drawn;  // the stage that must be released before another ticket is drawn
  uint32_t count = 0;
  while (true) {
    if (launch.dynamic && count >= kDynamicAhead) {
      if (!drawn.released().wait_watching(drawn.phase)) return report_faults();
      drawn.advance();
    }
    ++count;
    // Fetch the words of the next instruction, one per lane, and look up the tensors that they
    // name, before its stage is free: in steps of many small instructions the other roles wait for
    // stages.
    const bool more = queue.next();
    uint32_t word = 0, tagged_row = kNone;
    bool names_tensor = false;
    ptx::Words4 entry = {};
    Exchange exchange = {};
    if (more) {
      word = __ldg(queue.words() + lane);
      exchange = queue.exchange();
      const uint32_t opcode = __shfl_sync(~0u, word, 0), mask = tensor_mask(opcode);
      const uint32_t handle = __shfl_sync(~0u, word, (lane + kHeaderWords) % kLanes);
      names_tensor = lane < kOperandWords && (mask >> lane & 1) && handle != kNone;
      if (names_tensor)
        entry = ptx::load_constant4(reinterpret_cast<uint64_t>(table_of(launch, opcode) + handle));
      if (entry.y >> (kTaggedShift - 32) & 1)
        entry.y ^= copy_of(launch, queue.step, exchange, lane) << (kCopyShift - 32);
      tagged_row = first_tagged_row(exchange, live);
    }
    // Wait for a free stage.
    if (!cursor.released().wait_watching(cursor.phase ^ 1)) return report_faults();
    Stage& stage = stage_at(cursor.slot);
    if (lane == 0) {
      set_current(queue.position, queue.step);
      stage.position = queue.position;
      stage.step = launch.first_step + queue.step;
      stage.ends_step = queue.ends_step();
      stage.trace_row = more ? queue.trace_row() : kNone;
    }
    if (more) {
      reinterpret_cast<uint32_t*>(&stage.words)[lane] = word;
      if (names_tensor) ptx::store_shared4(ptx::shared_address(&stage.tensors[lane]), entry);
      if (lane == 0) stage.exchange.hint = exchange.hint;
      if (program::kAnyTaggedRows && lane == 0)
        stage.exchange = exchange, stage.tagged_row = tagged_row;
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
  // Keep watching until every stage is released.
  for (uint32_t i = 1; i < kStages; ++i) {
    cursor.advance();
    if (!cursor.released().wait_watching(cursor.phase ^ 1)) return report_faults();
  }
}

// Number of a tensor's writers that must be done before its words are polled. The others store
// theirs while the first polls are in flight.
__device__ __forceinline__ uint32_t hinted_at(uint32_t writers) {
  return writers - writers / kHintSlack;
}

// The waiter. Lane 0 waits for the barriers in the headers, instruction by instruction. If an
// instruction reads rows of earlier steps, it first waits for the signals of these, which suffice
// for such reads. Lane 1 waits for hints. A lane of their own keeps a late hint from delaying later
// barriers. Before the first instruction of a step, both lanes wait until all workers have ended
// the last step but one (words.cuh).
__device__ __forceinline__ void run_waiter(const Launch& launch) {
  if (lane_index() > 1) return;
  const bool hints = lane_index() == 1;
  StageCursor cursor;
  StageCursor before;  // stage of the previous instruction, unless is_first
  bool is_first = true;
  Awaited awaited;
  bool waiting = false;
  bool begins_step = false;  // whether the end of an earlier step is waited for
  bool is_new = true;        // whether the instruction was not looked at yet
  bool earlier = false;      // whether only signals of earlier steps are waited for
  uint32_t next_wait = 0;    // index of the next wait in the header
  while (true) {
    if (waiting) {
      waiting = !hints        ? !awaited.is_over()
                : begins_step ? !awaited.is_over_quietly()
                              : !awaited.is_likely();
      if (waiting) {
        // A stop is not reported here: the consumers report the word that is missing.
        if (hints && __builtin_expect(is_stopping(), 0)) return;
        __nanosleep(20);
        continue;
      }
    }
    const Stage& stage = stage_at(cursor.slot);
    if (is_new) {
      cursor.resolved().wait(cursor.phase);
      if (stage.trace_row == kNone) return;
      if (!hints) set_current(stage.position, stage.step - launch.first_step);
      is_new = false;
      begins_step = waiting = megavm::begins_step(launch, stage);
      if (waiting) awaited = Awaited::end_before(launch, stage.step - launch.first_step);
      earlier = kCopiesAhead && !hints && reads_earlier_rows(stage);
      next_wait = 0;
      if (waiting) continue;
    }
    begins_step = false;
    // Find the next barrier or hint to wait for; an instruction that is run alone has none.
    const uint32_t step = stage.step - launch.first_step;
    const uint32_t end = launch.alone ? 0 : hints ? 1 : kMaxWaits;
    while (next_wait < end && !waiting) {
      const Wait& wait = stage.words.header.waits[next_wait++];
      const uint32_t number = hints ? stage.exchange.hint.wait : wait.barrier;
      if (number == kNone) continue;
      const uint32_t more = hints ? hinted_at(launch.signals[number]) : earlier ? 0 : wait.target;
      awaited = Awaited(launch, number, step, more);
      waiting = true;
    }
    if (waiting) continue;
    if (earlier) {
      cursor.earlier().arrive();
      earlier = false;
      next_wait = 0;
      continue;
    }
    // Consumers may begin an instruction while results of the previous one are still being stored.
    // In programs of the compiler, barriers and tagged words order all conflicting accesses, so
    // this is correct. A program may also rely on the order of its queue (kInOrder). Then an
    // instruction becomes ready when the storer has released the previous one, so that all of its
    // results are stored. Semaphores make them visible to this worker's warps; the storer's fence
    // orders them before any later word that another worker reads.
    if constexpr (program::kInOrder)
      if (!hints && !is_first && !before.released().is_over(before.phase)) {
        if (__builtin_expect(is_stopping(), 0)) before.released().give_up(before.phase);
        __nanosleep(20);
        next_wait = end;
        continue;
      }
    if (!hints) note(launch, stage, Event::kReady);
    (hints ? cursor.hinted() : cursor.ready()).arrive();
    // Nobody waits for this one, whose phases are those of the stage.
    if (kCopiesAhead && !hints && !reads_earlier_rows(stage)) cursor.earlier().arrive();
    // The second arrival, in place of the storer, which looks for no words of this instruction.
    if (program::kAnyByMachine && !hints && !awaits_words(stage)) cursor.ready().arrive();
    cursor.released().arrive();
    before = cursor;
    is_first = false;
    cursor.advance();
    is_new = true;
  }
}

}  // namespace megavm
