// Runs programs on threads: queues, barriers, tagged data, and faults.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "megavm/note.hpp"
#include "vm/cpu/pool.hpp"
#include "vm/cpu/worker.hpp"

namespace megavm {

// A counter that workers share, in a cache line of its own.
struct alignas(64) Counter {
  std::atomic<uint32_t> value{0};
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// A rectangle that the interpreter exchanges for an instruction: of a tagged tensor that it reads
// or writes, in words, or of a tensor with shares that it writes, in elements. The columns of a
// write count from the beginning of the rank's share; `only` one rank gets it, or all (-1).
struct ExchangedRegion {
  uint32_t tensor;
  bool write;
  int64_t row_begin, row_end;
  int64_t begin, end;
  int64_t only;
};

// A program with its tensors resolved, and its barriers. Workers, tensors and barriers of a rank
// follow those of the rank before it.
struct Executable {
  std::vector<Words> instructions;
  uint32_t ranks = 1;
  std::vector<Tensor> tensors;
  std::vector<std::vector<StoredRows>> parts;  // of each tensor
  std::vector<std::vector<int32_t>> queues;    // of a rank
  bool dynamic = false;
  uint32_t workers = 1;                                 // of a rank
  std::vector<std::vector<ExchangedRegion>> exchanged;  // per instruction; empty: none
  std::vector<uint32_t> signals;       // per barrier of a rank: signals in one step
  uint32_t shared_barriers = 0;        // the first barriers are those of all ranks
  std::vector<uint32_t> arena_limits;  // bytes per instruction; empty: all of the arena
  std::unique_ptr<Counter[]> barriers;
  uint32_t steps_run = 0;
  bool broken = false;  // a run ended early: the barriers are invalid until a reset
  // Notes of every traced run: by worker, then by step (dynamic: in the order of tickets).
  std::vector<std::vector<Note>> notes;
  std::mutex notes_mutex;

  uint32_t all_workers() const { return ranks * workers; }
  const Tensor* tensors_of(uint32_t rank) const {
    return tensors.data() + rank * (tensors.size() / ranks);
  }
  Counter& barrier(uint32_t rank, uint32_t number) const {
    return barriers[number < shared_barriers ? number : rank * signals.size() + number];
  }
};

// State of a worker when a run ended early.
struct WorkerReport {
  int64_t instruction = -1;  // -1: none
  Condition waiting;
  uint32_t value = 0;  // of the barrier or tag that it waits for
};

// Why a run ended early.
struct Fault {
  enum Kind { kInstruction, kNoProgress, kInterrupted } kind;
  std::string cause;  // message of an instruction's fault
  uint32_t worker = 0;
  std::vector<WorkerReport> workers;
};

class Interpreter {
 public:
  using Clock = std::chrono::steady_clock;

  Interpreter(const Level& level, double timeout_seconds);

  const Level& level() const { return level_; }

  // Run `steps` steps; the first has the tag `epoch` + 1. The calling thread calls `interrupted`
  // from time to time. With `trace`, notes are added to the executable. After a fault it is broken.
  std::optional<Fault> run(Executable& executable, uint32_t steps, uint32_t epoch, bool trace,
                           const std::function<bool()>& interrupted);

  // Run one instruction of a rank without its waits and signal. `arena_used`: bytes of the arena it
  // used.
  std::optional<Fault> execute_one(Executable& executable, uint32_t rank, uint32_t index,
                                   uint32_t step, uint32_t epoch, size_t* arena_used);

 private:
  // Thrown to leave a run that another worker has stopped.
  struct Stopped {};

  // The interpreter's state of a worker. Other workers read it, so it has cache lines of its own.
  struct alignas(128) Seat {
    Worker worker;
    uint32_t rank = 0;
    std::unique_ptr<char[]> arena;
    std::atomic<uint64_t> progress{0};  // instructions finished, waits satisfied
    int64_t instruction = -1;
    int64_t waited = 0;  // nanoseconds that the instruction has waited, when tracing
    // Guarded by `mutex_`: `finished` when the queue is done, `waiting` during a long wait.
    bool finished = false;
    Condition waiting;
  };

  struct alignas(64) Tickets {
    std::atomic<uint64_t> next{0};
  };

  struct Run {
    Executable* executable = nullptr;
    uint32_t steps = 0;
    uint32_t epoch = 0;
    bool trace = false;
    std::vector<Note> notes;
    const std::function<bool()>* interrupted = nullptr;
    std::vector<Tickets> tickets;  // of each rank's dynamic queue
  };

  Seat& seat(uint32_t number);
  void work(uint32_t number);
  template <bool kTrace>
  void run_queue(Seat& seat);
  template <bool kTrace>
  void run_instruction(Seat& seat, int32_t index, uint32_t step, Note* note);
  void prepare(Seat& seat, const Executable& executable, int64_t index, uint32_t step,
               uint32_t epoch);
  // Execute one instruction: wait for its tagged inputs, run the kernel, tag its results.
  void execute(Seat& seat, const Executable& executable, uint32_t index);
  void await_tagged(Seat& seat, const ExchangedRegion& region);
  void publish(const Seat& seat, const Executable& executable, const ExchangedRegion& region);
  void wait(Seat& seat, const Condition& condition);
  void wait_short(Seat& seat, const Condition& condition);
  void wait_long(Seat& seat, const Condition& condition);
  bool nothing_can_happen() const;
  uint64_t total_progress() const;
  void check_interrupt(Seat& seat);
  void stop(Fault fault);
  void throw_if_stopped() const {
    if (stopped_.load(std::memory_order_relaxed)) throw Stopped{};
  }
  std::optional<Fault> take_fault();

  const Level& level_;
  const std::chrono::nanoseconds timeout_;
  Pool pool_;
  std::mutex running_;  // one run at a time
  std::vector<std::unique_ptr<Seat>> seats_;
  Run run_;
  bool single_ = false;   // execute_one: no other worker runs, so a wait cannot succeed later
  bool crowded_ = false;  // more workers than processors: spin only briefly
  Clock::time_point next_interrupt_check_;
  std::atomic<bool> stopped_{false};
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
};

}  // namespace megavm
