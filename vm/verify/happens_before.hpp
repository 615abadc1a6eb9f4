// Proves that a program neither deadlocks nor races, whatever the timing of its workers.
//
// The model. A launch runs steps 0, 1, 2, ... of the program. An instruction waits for the barriers
// in its header, reads, writes, signals. A read of a tagged word waits for the word of the same
// step. Static queues run in order, step after step; entries of a dynamic queue are ordered by
// nothing but waits, so that the proof holds for any number of workers.
//
// The system is monotone: running one instruction never disables another. So whether something can
// run does not depend on choices made before, and one greedy execution decides it.
//
// Deadlock. Every target is at most what one step signals, so after a whole step all counters stand
// where the next step counts from. A program that finishes one step from there therefore finishes
// any number.
//
// Dead rows. Which rows are live decides which of the declared accesses are made, and nothing else:
// an instruction waits for every tagged word that it declares as read and tags every word that it
// declares as written, whatever the number of live rows. All machines keep this: the CPU's
// interpreter for every instruction (cpu/interpreter.cpp), the GPU's consumers for what the kernels
// do not see to (cuda/tagged_rows.cuh), the reference as well. So what is proved with all rows live
// holds for any number of them.
//
// Races. Two conflicting accesses must be ordered in every execution. A barrier orders all of the
// signaller before the waiter. A tagged word orders, before the *writes* of its reader, the reads
// of its writer and all that is ordered before the writer; it says nothing about the writer's other
// writes, and it does not hold back other reads of the reader, which a machine may issue while it
// waits for the word. A writer that reads late (vm/isa.py, TagOrder) tags words while it still
// reads: of its own reads its words say nothing, of what was ordered before it the same. The words
// that an instruction reads which *writes early* order nothing before its writes, but before its
// signal. Two steps
// suffice: each element that is written at all is written in every step, so a conflict over a
// longer distance is a chain of conflicts over shorter ones.
//
// An *earlier* read (vm/isa.py) sees what the steps before wrote into an indexed tensor. The writes
// of its own and of later steps go to other places, so it conflicts with none of them; only the
// last writers of the step before must be over before it. Writes of different steps are compared as
// if they went to the same places, so those of still earlier steps are over by then too. A machine
// may make such a read as soon as the waits of the header are satisfied, while entries before it in
// the queue still run: only those waits order it.
//
// Fast rule and exact rule. A wait for all signals of a step orders every signaller before the
// waiter only if no signaller can be a step ahead and signal twice. The fast rule assumes that, and
// checks on what follows from it that it is so (if not, a first execution to break it would
// contradict itself); barriers for which it is not so are then taken to order nothing. A pair that
// the fast rule does not order is decided exactly: withhold the first access, run all that can run,
// see if the second is reached.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megavm/isa.hpp"

namespace megavm {

struct WaitFor {
  std::int32_t barrier;  // -1: unused
  std::int64_t target;
};

// What the analysis knows of an instruction, beside its accesses.
struct Synchronisation {
  WaitFor waits[kMaxWaits];
  std::int32_t signal;  // -1: none
  bool reads_late;      // its tagged words say nothing of its reads
  bool writes_early;    // it stores before its tagged inputs are there; it has no tagged results
};

// A rectangle of a tensor (half-open ranges). Indexed: rows are entries of an index, see vm/isa.py.
struct Access {
  std::int32_t instruction;
  std::int32_t tensor;
  std::int64_t row_begin, row_end;
  std::int64_t column_begin, column_end;
  bool write;
  bool indexed;
  bool earlier;
};

struct TensorTraits {
  bool tagged;
  bool activation;          // must be written before it is read
  bool comparable_columns;  // columns of plain and of indexed accesses are the same
};

// Accesses are sorted by instruction and concern tensors that instructions write.
struct ProgramView {
  std::vector<Synchronisation> instructions;
  std::vector<std::vector<std::int32_t>> queues;  // one when dynamic
  std::int32_t barriers = 0;
  bool dynamic = false;
  std::vector<Access> accesses;
  std::vector<TensorTraits> tensors;
};

// The head of a queue that cannot run.
struct Blocked {
  std::int32_t instruction;
  std::int32_t barrier;  // -1: a tagged word
  std::int64_t value;
  std::int64_t target;
  std::int32_t missing;  // an instruction that has not run and would have to: signaller or writer
};

enum class FindingKind { kDeadlock, kUnordered, kUnwritten, kTagUnreachable, kTagAmbiguous };

// The first fault found. Accesses are numbers in ProgramView::accesses, -1 where there is none.
struct Finding {
  FindingKind kind;
  std::vector<Blocked> blocked;  // kDeadlock
  // kUnordered, kTagAmbiguous: the access that came first; kUnwritten: one that writes it later
  std::int64_t first_access = -1;
  std::int64_t second_access = -1;  // the access at fault
  int first_step = 0, second_step = 0;
};

struct Analysis {
  std::optional<Finding> fault;  // the first one, if there is one
  // Whether the proof rests on the order of static queues, beside barriers and tagged words.
  bool needs_queue_order = false;
};

// Throws std::length_error when the program is beyond the limits of the analysis.
Analysis analyse(const ProgramView& program);

}  // namespace megavm
