// Stages: the ring of instructions in flight, with their operands resolved.
#pragma once

#include "cuda/semaphore.cuh"
#include "cuda/tensor.cuh"

namespace megavm {

struct Stage {
  Words words;
  Tensor tensors[kOperandWords];  // by operand word, for those that are tensors
  uint32_t position;              // see FaultRecord
  uint32_t step;                  // of the launch
  uint32_t tag;                   // of the step's tagged words
  Exchange exchange;
  uint32_t is_held;  // 1: nothing may be stored before the storer has found the words it looks for
  uint32_t trace_row;   // see trace.cuh; kNone: no instruction follows, and this is none
  uint32_t tagged_row;  // the first row whose words the storer sees to; kNone: there is none
};
static_assert(sizeof(Stage) == kStageBytes);

// Whether the storer sees to all tagged words of an instruction, see tagged_rows.cuh.
__device__ __forceinline__ bool is_by_machine(const Stage& stage) {
  return program::kAnyByMachine && stage.exchange.tag_mask != 0;
}

// The scratch, shared memory that instructions share, `offset` bytes from its beginning.
__device__ __forceinline__ uint32_t scratch_at(uint32_t offset = 0) {
  return ptx::shared_address(shared_memory) + kScratchAt + offset;
}

__device__ __forceinline__ Stage& stage_at(uint32_t slot) {
  return reinterpret_cast<Stage*>(shared_memory + kStagesAt)[slot];
}

// A place in the worker's sequence of instructions.
struct StageCursor : RingCursor<kStages> {
  __device__ __forceinline__ Semaphore resolved() const {
    return {SemaphoreKind::kStageResolved, slot};
  }
  __device__ __forceinline__ Semaphore ready() const { return {SemaphoreKind::kStageReady, slot}; }
  __device__ __forceinline__ Semaphore hinted() const {
    return {SemaphoreKind::kStageHinted, slot};
  }
  __device__ __forceinline__ Semaphore stored() const {
    return {SemaphoreKind::kStageStored, slot};
  }
  __device__ __forceinline__ Semaphore released() const {
    return {SemaphoreKind::kStageReleased, slot};
  }
};

// An instruction as its kernel sees it.
template <class Instruction>
struct Operands {
  const Instruction& inst;
  const Stage& stage;

  __device__ __forceinline__ explicit Operands(const Stage& stage)
      : inst(reinterpret_cast<const Instruction&>(stage.words)), stage(stage) {}

  // The tensor of an operand, given as a member of the instruction.
  __device__ __forceinline__ const Tensor& operator[](uint32_t Instruction::* operand) const {
    return stage.tensors[word(operand)];
  }
  __device__ __forceinline__ bool has(uint32_t Instruction::* operand) const {
    return inst.*operand != kNone;
  }
  __device__ __forceinline__ OperandWord word(uint32_t Instruction::* operand) const {
    return static_cast<uint32_t>(reinterpret_cast<const char*>(&(inst.*operand)) -
                                 reinterpret_cast<const char*>(&inst)) /
               4 -
           kHeaderWords;
  }
  // The tag of words that are read, and of those that are stored: that of a step far away where the
  // storer publishes them.
  __device__ __forceinline__ uint32_t tag() const { return stage.tag; }
  __device__ __forceinline__ uint32_t out_tag() const {
    return program::kAnyByMachine ? stage.tag ^ stage.exchange.tag_mask : stage.tag;
  }
  __device__ __forceinline__ uint32_t step() const { return stage.step; }
};

}  // namespace megavm
