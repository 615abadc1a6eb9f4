// Proves that a program neither deadlocks nor races, whatever the timing of its workers.
//
// Model. A launch runs steps 0, 1, 2, ... of the program. An instruction waits for the barriers in
// its header, reads, writes, and signals. A read of a tagged word waits for the word of the same
// step. The entries of a static queue run in order, step after step. Nothing but waits orders the
// entries of a dynamic queue, so the proof holds for any number of workers.
//
// The system is monotone: running one instruction never disables another. Whether an instruction
// can run therefore does not depend on earlier choices, and one greedy execution decides it.
//
// Deadlock. No target exceeds the number of signals in one step, so after a whole step every
// counter stands where the next step starts to count. A program that finishes one step therefore
// finishes any number of steps.
//
// Dead rows. The live rows decide which of the declared accesses an instruction makes, and nothing
// else: it waits for every tagged word that it declares as read and tags every word that it
// declares as written, however many rows are live. Every machine keeps this rule: the CPU's
// interpreter for all instructions (cpu/interpreter.cpp), the GPU's storer for the words that
// kernels leave to it (cuda/tagged_rows.cuh), and the reference. A proof for all rows live
// therefore holds for any number of live rows.
//
// Races. Every execution must order two conflicting accesses. A barrier orders all of the signaller
// before the waiter. A tagged word orders, before the *writes* of its reader, the reads of its
// writer and everything that is ordered before the writer. It does not order the writer's other
// writes, and it does not hold back the reader's other reads, which a machine may issue while it
// waits for the word. A writer that *reads late* (vm/isa.py, TagOrder) tags words while it still
// reads: its words order what was ordered before it, but none of its own reads. If an instruction
// *writes early*, the words that it reads order nothing before its writes, only before its signal.
// Two steps suffice: an element that is written at all is written in every step, so a conflict over
// a longer distance is a chain of conflicts over shorter ones.
//
// Earlier reads. An *earlier* read (vm/tensors.py, Region) sees what previous steps wrote into an
// indexed tensor. The writes of its own step and of later steps go to other places and do not
// conflict with it; only the last writers of the previous step must be over before it. The analysis
// compares writes of different steps as if they went to the same places, so writes of still earlier
// steps are over by then too. A machine may issue such a read while earlier entries of the queue
// still run, as soon as all signals of earlier steps to the barriers of the header have come: of a
// wait, whatever its target, only that orders the read.
//
// Fast rule and exact rule. A wait for all signals of a step orders every signaller before the
// waiter only if no signaller can run a step ahead and signal twice. The fast rule assumes this,
// then checks it against the order that it derived (the first execution to break the assumption
// would contradict itself); a barrier that fails the check is then taken to order nothing. The
// exact rule decides a pair that the fast rule leaves unordered: it withholds the first access,
// runs everything that can run, and looks whether the second access is reached.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megavm/isa.hpp"

namespace megavm::verify {

struct WaitFor {
  std::int32_t barrier;  // -1: unused
  std::int64_t target;
};

// The synchronisation of an instruction.
struct Synchronisation {
  WaitFor waits[kMaxWaits];
  std::int32_t signal;  // -1: none
  bool reads_late;      // its tagged words do not order its reads
  bool writes_early;    // it stores before its tagged inputs arrive; it has no tagged results
};

// Half-open ranges.
struct Rectangle {
  std::int64_t row_begin, row_end;
  std::int64_t column_begin, column_end;

  bool operator==(const Rectangle&) const = default;
  std::int64_t size() const { return (row_end - row_begin) * (column_end - column_begin); }
  bool has(std::int64_t row, std::int64_t column) const {
    return row_begin <= row && row < row_end && column_begin <= column && column < column_end;
  }
};

// Indexed: rows are entries of an index, see vm/tensors.py.
struct Access {
  std::int32_t instruction;
  std::int32_t tensor;
  Rectangle where;
  bool write;
  bool indexed;
  bool earlier;
};

struct TensorTraits {
  bool tagged;
  bool activation;          // must be written before it is read
  bool comparable_columns;  // plain and indexed accesses number the columns alike
};

// Accesses are sorted by instruction and concern only tensors that instructions may write.
struct ProgramView {
  std::vector<Synchronisation> instructions;
  std::vector<std::vector<std::int32_t>> queues;  // one for each rank if dynamic
  std::int32_t barriers = 0;
  bool dynamic = false;
  std::vector<Access> accesses;
  std::vector<TensorTraits> tensors;
};

// The head of a queue that cannot run.
struct Blocked {
  std::int32_t instruction;
  std::int32_t barrier;  // -1: it waits for tagged words
  std::int64_t value;
  std::int64_t target;
  std::int32_t missing;  // a signaller or writer that it needs and that has not run
};

enum class FindingKind { kDeadlock, kUnordered, kUnwritten, kTagUnreachable, kTagAmbiguous };

// The first fault. Accesses are numbers in ProgramView::accesses; -1 means none.
struct Finding {
  FindingKind kind;
  std::vector<Blocked> blocked;  // kDeadlock
  // kUnordered, kTagAmbiguous: the access that came first; kUnwritten: a write that comes too late
  std::int64_t first_access = -1;
  std::int64_t second_access = -1;  // the access at fault
  int first_step = 0, second_step = 0;
};

struct Analysis {
  std::optional<Finding> fault;
  // Whether the proof needs the order of static queues in addition to barriers and tagged words.
  bool needs_queue_order = false;
};

// Throws std::length_error if the program exceeds the limits of the analysis.
Analysis analyse(ProgramView program);

}  // namespace megavm::verify
