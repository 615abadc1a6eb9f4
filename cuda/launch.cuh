// What the host hands to a launch, and what a launch leaves behind when it fails.
// vm/cuda/machine.py packs these structs; their sizes are asserted on both sides.
#pragma once

#include "isa.hpp"

namespace megavm {

using uint32_t = unsigned int;
using int32_t = int;
using uint64_t = unsigned long long;
using int64_t = long long;

// How the elements of a tensor lie in memory, see vm/layout.py.
enum class Layout : uint32_t { kRows = 0, kUnits = 1, kSwizzled = 2 };

// A tensor as instructions see it: a matrix. The upper 16 bits of `address` hold the dtype (bits
// 48..51), whether it is tagged (bit 52) and its layout (bits 56..59).
struct alignas(16) Tensor {
  uint64_t address;
  uint32_t rows;
  uint32_t columns;
};
static_assert(sizeof(Tensor) == 16);

// Why a warp stopped.
enum class FaultKind : uint32_t {
  kNone = 0,
  kBarrier = 1,  // thing: barrier; value, target: of its counter
  kTag = 2,      // thing: operand word of the tensor; row, word; value: epoch found, target: wanted
  kSemaphore = 3,    // thing: SemaphoreKind; row: its number; target: phase
  kInstruction = 4,  // thing: a code of vm/cuda/faults.py; row, word, value, target: its arguments
  kAborted = 5,      // another warp stopped first; the other fields as if this wait had timed out
};

struct alignas(32) FaultRecord {
  uint32_t kind;  // FaultKind, with kWaited set in an aborted wait: kAborted << 8 | kind of wait
  uint32_t position;  // static: place in the worker's queue; dynamic: instruction number
  uint32_t step;      // of the launch
  uint32_t thing;
  uint32_t row;
  uint32_t word;
  uint32_t value;
  uint32_t target;
};
static_assert(sizeof(FaultRecord) == 32);

// Counters that tell, without any ordering, that tagged words are likely there: so that one warp
// polls one word where all would poll their data. They stand behind the barriers and are counted
// alike; kNone: no hint.
struct Hint {
  uint32_t signal;  // counts the instructions that have stored their part of a tagged tensor
  uint32_t wait;    // of the tagged tensor that the instruction reads as a whole
};

// How an instruction exchanges words with others, beside its header: hints, and the tagged regions
// that cuda/tagged_rows.cuh sees to, of which the rows that are not live, or all.
struct alignas(32) Exchange {
  Hint hint;
  uint32_t num_regions;    // 0 of most instructions
  uint32_t regions_begin;  // in Launch::regions
  uint32_t row_count;      // which of Launch::counts; kNone: all rows, whatever is live
  uint32_t row_begin;      // the rows of the instruction
  uint32_t row_end;
  uint32_t tag_mask;  // the kernel stores the step's tag, exclusive-or'ed with this
};
static_assert(sizeof(Exchange) == 32);

// Words of a tagged tensor that an instruction declares.
struct alignas(32) TaggedRegion {
  uint32_t operand;  // word of the tensor
  uint32_t written;  // 0: it is read
  uint32_t row_begin, row_end;
  uint32_t word_begin, word_end;
  uint32_t reserved[2];
};
static_assert(sizeof(TaggedRegion) == 32);

// One launch. All pointers are device addresses.
struct alignas(16) Launch {
  const Words* instructions;  // static: the queues one after the other; dynamic: the one queue
  const uint32_t*
      queue_begin;        // [workers + 1] first instruction of each worker's queue; dynamic: {0, n}
  const Tensor* tensors;  // by handle
  uint32_t* barriers;     // counters, kBarrierStride words apart
  const uint32_t* signals;      // how often a step signals each barrier
  uint32_t* ticket;             // dynamic: tickets drawn so far in this launch, 0 at its start
  const Exchange* exchanges;    // of the instructions, in the order of `instructions`
  const TaggedRegion* regions;  // that the exchanges name
  FaultRecord* faults;          // [workers][kNumWarps]
  uint32_t* abort;              // 0, or 1 when a warp has faulted
  uint64_t* trace;              // see cuda/trace.cuh; null unless compiled in
  uint64_t timeout;             // ns that a wait may take
  uint32_t epoch;               // steps run on the memory before: step s writes tag epoch + s + 1
  uint32_t steps_before;        // steps run by this executable before
  uint32_t steps;               // steps of this launch
  uint32_t first_step;          // number of the launch's first step (for an instruction run alone)
  uint32_t dynamic;             // 1: one queue for all workers
  uint32_t alone;               // 1: an instruction run alone, without waits, signal and hints
  const uint32_t* counts;       // [32] tensors of numbers of live rows that exchanges name, or kNone
};
static_assert(sizeof(Launch) == 128);

constexpr uint32_t kBarrierStride = 32;  // a counter has a 128-byte line of its own

}  // namespace megavm
