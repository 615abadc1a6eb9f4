// Stages: the ring of instructions in flight in a worker, with their operands resolved.
#pragma once

#include "cuda/exchange.cuh"
#include "cuda/semaphore.cuh"

namespace megavm {

struct Stage {
  Words words;
  Tensor tensors[kOperandWords];  // by operand word; unset for words that name no tensor
  uint32_t position;              // see FaultRecord
  uint32_t step;                  // number of the step within its launch
  uint32_t ends_step;             // 1: the worker's last instruction of the step
  Exchange exchange;
  uint32_t trace_row;   // see trace.cuh; kNone: no instruction, the queue has ended
  uint32_t tagged_row;  // the first row whose words the storer handles; kNone: it handles none
};
static_assert(sizeof(Stage) == kStageBytes);

// Whether the storer handles all tagged words of an instruction, see tagged_rows.cuh.
__device__ __forceinline__ bool is_by_machine(const Stage& stage) {
  return program::kAnyByMachine && (stage.exchange.by_machine & kByMachine) != 0;
}

// Whether the storer waits for tagged words that the instruction reads before it begins.
__device__ __forceinline__ bool awaits_words(const Stage& stage) {
  if (is_by_machine(stage)) return true;
  return program::kAnyByMachine && (stage.exchange.by_machine & kAwaitsDead) != 0 &&
         stage.tagged_row != kNone;
}

// Whether the instruction's indexed reads are of rows that earlier steps wrote, and of no others
// (Region.earlier in vm/tensors.py).
__device__ __forceinline__ bool reads_earlier_rows(const Stage& stage) {
  const uint32_t opcode = stage.words.header.opcode;
  const uint32_t word = opcode < kNumOpcodes ? kEarlierOperand[opcode] : kNone;
  return word != kNone && stage.words.operands[word] != kNone;
}

// Address of the scratch, `offset` bytes from its start. Instructions use the same scratch in turn.
__device__ __forceinline__ uint32_t scratch_at(uint32_t offset = 0) {
  return ptx::shared_address(shared_memory) + kScratchAt + offset;
}

__device__ __forceinline__ Stage& stage_at(uint32_t slot) {
  return reinterpret_cast<Stage*>(shared_memory + kStagesAt)[slot];
}

// A position in the worker's sequence of instructions. The semaphores of its stage:
//   resolved  the controller has filled the stage
//   ready     the instruction's barriers have reached their targets; the storer has found the words
//             for which it looks first (tagged_rows.cuh)
//   earlier   what earlier steps signalled to these barriers has come, so that rows which earlier
//             steps wrote may be read
//   hinted    the tagged words that it reads have likely been stored
//   stored    the consumers are done with it
//   released  loader, storer and waiter are done with it: the stage may be reused
struct StageCursor : RingCursor<kStages> {
  __device__ __forceinline__ Semaphore resolved() const {
    return {SemaphoreKind::kStageResolved, slot};
  }
  __device__ __forceinline__ Semaphore ready() const { return {SemaphoreKind::kStageReady, slot}; }
  __device__ __forceinline__ Semaphore earlier() const {
    return {SemaphoreKind::kStageEarlier, slot};
  }
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

// An instruction as its kernel sees it: its fields, and the tensors that they name.
template <class Instruction>
struct Operands {
  const Instruction& inst;
  const Stage& stage;

  __device__ __forceinline__ explicit Operands(const Stage& stage)
      : inst(reinterpret_cast<const Instruction&>(stage.words)), stage(stage) {}

  // The tensor of an operand, which is given as a member of the instruction.
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
  __device__ __forceinline__ uint32_t step() const { return stage.step; }
};

}  // namespace megavm
