#include "vm/cpu/interpreter.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <thread>

namespace megavm {
namespace {

constexpr size_t kArenaBytes = kWorkingBytes;
constexpr int kSpins = 2000;  // 50 to 100 us of pause instructions
constexpr int kCrowdedSpins = 20;
constexpr std::chrono::milliseconds kLong{1};              // a longer wait is published to others
constexpr std::chrono::milliseconds kInterruptPeriod{50};  // between checks for Ctrl-C

// Thrown through a kernel by Worker::fault.
struct InstructionFault {
  std::string cause;
};

int64_t nanoseconds() {
  const auto now = Interpreter::Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

bool satisfied(const Condition& condition) {
  const uint32_t value = __atomic_load_n(condition.address, __ATOMIC_ACQUIRE);
  if (condition.kind == Condition::kTag) return value == condition.target;
  // Counters wrap around, so compare by difference.
  return static_cast<int32_t>(value - condition.target) >= 0;
}

}  // namespace

void Worker::fault(const char* format, ...) const {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  throw InstructionFault{text};
}

void Worker::arena_exhausted(size_t bytes) const {
  fault("it takes %zu bytes of working memory, but declares %zu (working_bytes)",
        arena_used + bytes, arena_limit);
}

void Worker::undeclared_word(uint32_t handle, int64_t row, int64_t word) const {
  fault("word %lld of row %lld of tensor %u is read, but not declared",
        static_cast<long long>(word), static_cast<long long>(row), handle);
}

Interpreter::Interpreter(const Level& level, double timeout_seconds)
    : level_(level),
      timeout_(std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::duration<double>(timeout_seconds))) {}

Interpreter::Seat& Interpreter::seat(uint32_t number) {
  while (seats_.size() <= number) {
    auto made = std::make_unique<Seat>();
    made->arena = std::make_unique<char[]>(kArenaBytes + 64);
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(made->arena.get()) + 63) / 64 * 64;
    made->worker.arena = reinterpret_cast<char*>(begin);
    made->worker.interpreter = this;
    made->worker.number = static_cast<uint32_t>(seats_.size());
    seats_.push_back(std::move(made));
  }
  return *seats_[number];
}

std::optional<Fault> Interpreter::run(Executable& executable, uint32_t steps, uint32_t epoch,
                                      bool trace, const std::function<bool()>& interrupted) {
  const std::lock_guard lock(running_);
  run_.executable = &executable;
  run_.steps = steps;
  run_.epoch = epoch;
  run_.trace = trace;
  run_.interrupted = &interrupted;
  run_.tickets = std::vector<Tickets>(executable.ranks);
  crowded_ = executable.all_workers() > num_processors();
  single_ = false;
  next_interrupt_check_ = Clock::now() + kInterruptPeriod;
  for (uint32_t i = 0; i < executable.all_workers(); ++i) {
    Seat& s = seat(i);
    s.rank = i / executable.workers;
    s.finished = false;
    s.instruction = -1;
    s.waiting = {};
  }
  if (trace) {
    size_t length = 0;
    for (const std::vector<int32_t>& queue : executable.queues) length += queue.size();
    run_.notes.assign(executable.ranks * length * steps, Note{});
  }
  const std::function<void(uint32_t)> job = [this](uint32_t number) { work(number); };
  pool_.start(job, executable.all_workers());
  work(0);
  for (int spins = 0; !pool_.finished(); ++spins) {
    if (spins < (crowded_ ? kCrowdedSpins : kSpins)) {
      pause();
      continue;
    }
    std::this_thread::yield();
    try {
      check_interrupt(*seats_[0]);
    } catch (const Stopped&) {
    }
  }
  std::optional<Fault> fault = take_fault();
  if (fault)
    executable.broken = true;
  else
    executable.steps_run += steps;
  if (trace && !fault) {
    const std::lock_guard notes_lock(executable.notes_mutex);
    executable.notes.push_back(std::move(run_.notes));
  }
  return fault;
}

std::optional<Fault> Interpreter::execute_one(Executable& executable, uint32_t rank, uint32_t index,
                                              uint32_t step, uint32_t epoch, size_t* arena_used) {
  const std::lock_guard lock(running_);
  single_ = true;
  run_.trace = false;
  run_.executable = &executable;
  Seat& s = seat(0);
  s.rank = rank;
  s.waiting = {};
  try {
    prepare(s, executable, index, step, epoch);
    execute(s, executable, index);
  } catch (const InstructionFault& fault) {
    stop({Fault::kInstruction, fault.cause, 0, {}});
  } catch (const Stopped&) {
  }
  *arena_used = s.worker.arena_used;
  return take_fault();
}

// The fault of the run that has ended, with the state of each worker.
std::optional<Fault> Interpreter::take_fault() {
  stopped_ = false;
  std::optional<Fault> fault;
  fault.swap(fault_);
  if (!fault) return fault;
  const uint32_t workers = single_ ? 1 : run_.executable->all_workers();
  for (uint32_t i = 0; i < workers; ++i) {
    const Seat& s = *seats_[i];
    WorkerReport report{s.instruction, s.waiting, 0};
    if (s.waiting.kind != Condition::kNothing)
      report.value = __atomic_load_n(s.waiting.address, __ATOMIC_RELAXED);
    fault->workers.push_back(report);
  }
  return fault;
}

void Interpreter::work(uint32_t number) {
  Seat& s = *seats_[number];
  try {
    run_.trace ? run_queue<true>(s) : run_queue<false>(s);
    s.instruction = -1;
  } catch (const InstructionFault& fault) {
    stop({Fault::kInstruction, fault.cause, number, {}});
  } catch (const Stopped&) {
  }
  const std::lock_guard lock(mutex_);
  s.finished = true;
}

// Run all steps of the worker's own queue, or draw tickets of the common queue of its rank.
template <bool kTrace>
void Interpreter::run_queue(Seat& seat) {
  Executable& executable = *run_.executable;
  Note* note = kTrace ? run_.notes.data() : nullptr;
  if (executable.dynamic) {
    const std::vector<int32_t>& queue = executable.queues[0];
    const uint64_t end = uint64_t{run_.steps} * queue.size();
    if constexpr (kTrace) note += seat.rank * end;
    while (true) {
      const uint64_t ticket = run_.tickets[seat.rank].next.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= end) return;
      run_instruction<kTrace>(seat, queue[ticket % queue.size()],
                              static_cast<uint32_t>(ticket / queue.size()),
                              kTrace ? note + ticket : nullptr);
    }
  }
  if constexpr (kTrace)
    for (uint32_t i = 0; i < seat.worker.number; ++i)
      note += executable.queues[i % executable.workers].size() * run_.steps;
  for (uint32_t step = 0; step < run_.steps; ++step)
    for (const int32_t index : executable.queues[seat.worker.number % executable.workers])
      run_instruction<kTrace>(seat, index, step, kTrace ? note++ : nullptr);
}

// Prepare the worker's state for one instruction of one step.
void Interpreter::prepare(Seat& seat, const Executable& executable, int64_t index, uint32_t step,
                          uint32_t epoch) {
  Worker& worker = seat.worker;
  worker.tensors = executable.tensors_of(seat.rank);
  worker.all_tensors = executable.tensors.data();
  worker.num_tensors = executable.tensors.size() / executable.ranks;
  worker.step = step;
  worker.epoch = epoch;
  worker.arena_used = 0;
  worker.arena_limit =
      executable.arena_limits.empty() ? kArenaBytes : executable.arena_limits[index];
  seat.instruction = index;
}

// `note` is used with kTrace only.
template <bool kTrace>
void Interpreter::run_instruction(Seat& seat, int32_t index, uint32_t step, Note* note) {
  Executable& executable = *run_.executable;
  if constexpr (kTrace) {
    note->fetched = nanoseconds();
    note->worker = seat.worker.number;
    seat.waited = 0;
  }
  throw_if_stopped();
  if (seat.worker.number == 0) check_interrupt(seat);
  prepare(seat, executable, index, step, run_.epoch + step + 1);
  const Words& words = executable.instructions[index];
  // Wait for the barriers in the header.
  for (const Wait& w : words.header.waits) {
    if (w.barrier == kNone) continue;
    Condition condition;
    condition.kind = Condition::kBarrier;
    condition.address =
        reinterpret_cast<const uint32_t*>(&executable.barrier(seat.rank, w.barrier).value);
    condition.target = (executable.steps_run + step) * executable.signals[w.barrier] + w.target;
    condition.object = w.barrier;
    wait(seat, condition);
  }
  if constexpr (kTrace) note->ready = note->fetched + seat.waited;
  // Execute, then signal. The release makes the results visible to workers that acquire the
  // counter.
  execute(seat, executable, static_cast<uint32_t>(index));
  if constexpr (kTrace) {
    note->inputs = note->fetched + seat.waited;
    note->end = nanoseconds();
  }
  if (words.header.signal != kNone) {
    executable.barrier(seat.rank, words.header.signal)
        .value.fetch_add(1, std::memory_order_release);
    if constexpr (kTrace) note->signalled = nanoseconds();
  }
  seat.progress.store(seat.progress.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// The live rows decide what a kernel computes. An instruction waits for and tags exactly the
// words that it declares, so the order that the verifier proves holds for any number of live rows.
// Kernels need no order of their own: all tagged inputs have arrived before a kernel begins, and
// its results are tagged only after it has returned.
void Interpreter::execute(Seat& seat, const Executable& executable, uint32_t index) {
  const Words& words = executable.instructions[index];
  const Kernel kernel = level_.kernels[words.header.opcode];
  if (executable.exchanged.empty()) return kernel(words, seat.worker);
  const std::vector<ExchangedRegion>& regions = executable.exchanged[index];
  for (const ExchangedRegion& region : regions)
    if (!region.write) await_tagged(seat, region);
  seat.worker.live_end = INT64_MAX;
  kernel(words, seat.worker);
  for (const ExchangedRegion& region : regions)
    if (region.write) publish(seat, executable, region);
}

// Wait until every word of the region carries the epoch of the step.
void Interpreter::await_tagged(Seat& seat, const ExchangedRegion& region) {
  const Tensor& t = seat.worker.tensor(region.tensor);
  const int64_t words = t.columns * dtype_bytes(t.dtype) / 4;
  Condition condition;
  condition.kind = Condition::kTag;
  condition.target = seat.worker.epoch;
  condition.object = region.tensor;
  for (int64_t row = region.row_begin; row < region.row_end; ++row)
    for (int64_t word = region.begin; word < region.end; ++word) {
      condition.address = &(static_cast<const Word*>(t.data) + row * words + word)->epoch;
      condition.row = row;
      condition.word = word;
      wait(seat, condition);
    }
}

// Give every word of the region the tag of the step; send a share to the other ranks first. Words
// of dead rows keep their values. The releases order the kernel's accesses before the tags, as the
// release of a signal does for a tensor without tags. A kernel stores for one rank alone by itself.
void Interpreter::publish(const Seat& seat, const Executable& executable,
                          const ExchangedRegion& region) {
  if (region.only >= 0) return;
  const Tensor& own = seat.worker.tensor(region.tensor);
  const uint32_t ranks = own.own_columns < own.columns ? executable.ranks : 1;
  const int64_t unit = own.tagged ? 4 : dtype_bytes(own.dtype);
  const int64_t columns = own.columns * dtype_bytes(own.dtype) / unit;
  const int64_t first = own.share_begin * dtype_bytes(own.dtype) / unit + region.begin;
  const int64_t count = region.end - region.begin;
  // The own copy comes last: the next ranks wait longest for theirs.
  for (uint32_t i = 1; i <= ranks; ++i) {
    const uint32_t rank = ranks == 1 ? seat.rank : (seat.rank + i) % ranks;
    const Tensor& to = executable.tensors_of(rank)[region.tensor];
    for (int64_t row = region.row_begin; row < region.row_end; ++row) {
      const int64_t at = row * columns + first;
      const bool sends = rank != seat.rank && row < seat.worker.live_end;
      if (!own.tagged) {
        if (sends)
          std::memcpy(static_cast<char*>(to.data) + at * unit,
                      static_cast<const char*>(own.data) + at * unit,
                      static_cast<size_t>(count * unit));
        continue;
      }
      Word* const words = static_cast<Word*>(to.data) + at;
      const Word* const values = static_cast<const Word*>(own.data) + at;
      for (int64_t word = 0; word < count; ++word) {
        if (sends) __atomic_store_n(&words[word].value, values[word].value, __ATOMIC_RELAXED);
        __atomic_store_n(&words[word].epoch, seat.worker.epoch, __ATOMIC_RELEASE);
      }
    }
  }
}

void Interpreter::wait(Seat& seat, const Condition& condition) {
  if (satisfied(condition)) return;
  if (!run_.trace) return wait_short(seat, condition);
  const int64_t begin = nanoseconds();
  wait_short(seat, condition);
  seat.waited += nanoseconds() - begin;
}

void Interpreter::wait_short(Seat& seat, const Condition& condition) {
  const int spins = single_ ? 0 : crowded_ ? kCrowdedSpins : kSpins;
  bool done = false;
  for (int i = 0; i < spins && !done; ++i) {
    pause();
    done = satisfied(condition);
  }
  if (!done) wait_long(seat, condition);
  seat.progress.store(seat.progress.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// Yield the processor while waiting. Stops the run when no worker can make progress any more.
void Interpreter::wait_long(Seat& seat, const Condition& condition) {
  const auto publish = [&](const Condition& value) {
    const std::lock_guard lock(mutex_);
    seat.waiting = value;
  };
  if (single_) {
    publish(condition);
    stop({Fault::kNoProgress, "", 0, {}});
    throw Stopped{};
  }
  const Clock::time_point start = Clock::now();
  Clock::time_point last_change = start;
  uint64_t progress = total_progress();
  bool published = false;
  while (!satisfied(condition)) {
    if (stopped_.load(std::memory_order_relaxed)) {
      publish(condition);
      throw Stopped{};
    }
    std::this_thread::yield();
    const Clock::time_point now = Clock::now();
    if (now - start < kLong) continue;
    if (!published) publish(condition);
    published = true;
    if (seat.worker.number == 0) check_interrupt(seat);
    const uint64_t current = total_progress();
    if (current != progress) {
      progress = current;
      last_change = now;
    } else if (now - last_change > timeout_ && nothing_can_happen()) {
      stop({Fault::kNoProgress, "", seat.worker.number, {}});
    }
    if (now - last_change > 4 * kLong) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (published) publish({});
}

// Whether every worker has finished or waits for a condition that is not satisfied. A worker that
// is merely slow is no reason to stop.
bool Interpreter::nothing_can_happen() const {
  const std::lock_guard lock(mutex_);
  for (uint32_t i = 0; i < run_.executable->all_workers(); ++i) {
    const Seat& s = *seats_[i];
    if (s.finished) continue;
    if (s.waiting.kind == Condition::kNothing || satisfied(s.waiting)) return false;
  }
  return true;
}

uint64_t Interpreter::total_progress() const {
  uint64_t total = 0;
  for (uint32_t i = 0; i < run_.executable->all_workers(); ++i)
    total += seats_[i]->progress.load(std::memory_order_relaxed);
  return total;
}

void Interpreter::check_interrupt(Seat& seat) {
  const Clock::time_point now = Clock::now();
  if (now < next_interrupt_check_) return;
  next_interrupt_check_ = now + kInterruptPeriod;
  if (!(*run_.interrupted)()) return;
  stop({Fault::kInterrupted, "", seat.worker.number, {}});
  throw Stopped{};
}

void Interpreter::stop(Fault fault) {
  const std::lock_guard lock(mutex_);
  if (!fault_) fault_ = std::move(fault);
  stopped_.store(true, std::memory_order_relaxed);
}

}  // namespace megavm
