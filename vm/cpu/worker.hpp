// The machine as a kernel sees it: tensors, the step, working memory, and faults.
//
// Kernels are compiled once per instruction-set level, and the linker would keep one level's copy
// of a function for all. So functions here are always inlined, or defined in interpreter.cpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "megavm/isa.hpp"

#define MEGAVM_INLINE inline __attribute__((always_inline))

namespace megavm {

// Rows of a tensor that are stored together.
struct StoredRows {
  void* data;
  int64_t count;
};

// A tensor of the program, resolved. Instructions see a matrix of `rows` x `columns`.
struct Tensor {
  void* data;               // of the first part
  const StoredRows* parts;  // one, unless it is a weight in parts
  int64_t rows;
  int64_t columns;
  int64_t own_columns;  // that this rank writes: from share_begin on
  int64_t share_begin;
  int64_t shape[4];
  DType dtype;
  bool tagged;  // stored as Word[rows][columns * dtype_bytes / 4]

  // Number of this rank among those that gather the tensor; 0 if none do.
  int64_t rank_of_share() const { return share_begin / own_columns; }
};

// Four bytes of a tagged tensor, and the epoch of the step that wrote them.
struct alignas(8) Word {
  uint32_t value;
  uint32_t epoch;
};

// The tag that a kernel of step `epoch` stores with a word: the tag of a far step, for which no
// worker waits. The interpreter gives all words the step's tag when the kernel has returned.
MEGAVM_INLINE uint32_t unpublished(uint32_t epoch) { return epoch ^ kFarTag; }

// A condition that a worker waits for: a counter reaches `target`, or a tagged word carries epoch
// `target`.
struct Condition {
  enum Kind : uint32_t { kNothing, kBarrier, kTag };
  Kind kind = kNothing;
  const uint32_t* address = nullptr;
  uint32_t target = 0;
  uint32_t object = 0;  // barrier, or tensor handle
  int64_t row = 0;      // of the tagged word
  int64_t word = 0;
};

class Interpreter;

struct Worker {
  // The running instruction's view of memory, and the tensors of all ranks, one rank's after the
  // other's.
  const Tensor* tensors = nullptr;
  const Tensor* all_tensors = nullptr;
  size_t num_tensors = 0;        // each rank has so many
  uint32_t step = 0;             // number of the step within its launch
  uint32_t epoch = 0;            // tag of the step
  int64_t live_end = INT64_MAX;  // end of the live rows that the running instruction has found

  // Working memory: a bump allocator, empty at the start of each instruction.
  char* arena = nullptr;
  size_t arena_limit = 0;  // bytes that the running instruction may use
  size_t arena_used = 0;

  Interpreter* interpreter = nullptr;
  uint32_t number = 0;

  MEGAVM_INLINE const Tensor& tensor(uint32_t handle) const { return tensors[handle]; }

  // The tensor that a kernel writes: the own one, unless `only` another rank gets the values. Then
  // it has the columns of the own share.
  MEGAVM_INLINE Tensor written(uint32_t handle, uint32_t only) const {
    if (only == kNone) return tensor(handle);
    Tensor to = all_tensors[only * num_tensors + handle];
    to.share_begin = tensor(handle).share_begin;
    return to;
  }

  template <typename T>
  MEGAVM_INLINE T* data(uint32_t handle) const {
    return static_cast<T*>(tensors[handle].data);
  }

  // Address of a row of a weight that may have parts. The next rows of the same part follow it.
  template <typename T>
  MEGAVM_INLINE const T* weight_row(uint32_t handle, int64_t row) const {
    const StoredRows* part = tensors[handle].parts;
    for (; row >= part->count; ++part) row -= part->count;
    return static_cast<const T*>(part->data) + row * tensors[handle].columns;
  }

  // `count` uninitialised elements, aligned to a cache line.
  template <typename T>
  MEGAVM_INLINE T* allocate(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > arena_limit - arena_used) arena_exhausted(bytes);
    T* result = reinterpret_cast<T*>(arena + arena_used);
    arena_used += bytes;
    return result;
  }

  // End the launch: the running instruction reads a tagged word that it does not declare.
  [[noreturn]] void undeclared_word(uint32_t handle, int64_t row, int64_t word) const;

  // End the launch: `format` is a printf format of one sentence about the running instruction.
  [[noreturn]] __attribute__((format(printf, 2, 3))) void fault(const char* format, ...) const;

  [[noreturn]] void arena_exhausted(size_t bytes) const;
};

using Kernel = void (*)(const Words&, Worker&);

// The kernels of one instruction-set level, by opcode; null if no instruction has the opcode.
struct Level {
  const char* name;
  const Kernel* kernels;
};

}  // namespace megavm
