// The interface of kernels, and the dispatch by opcode.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/loader.cuh"
#include "cuda/storer.cuh"

namespace megavm {

// The code of an instruction in each role. instructions/<name>/cuda.cuh specialises it, derives it
// from KernelDefaults, and declares what differs from the defaults:
//   static void load(const Operands<Instruction>&, Loader&);       loader warp: stream pages
//   static void consume(const Operands<Instruction>&, Consumer&);  all consumer warps: compute
// Instructions that share one copy of their code (Instruction.family) have another class instead,
// such as Products (instructions/product/products.cuh).
template <class Instruction>
struct Kernel;

struct KernelDefaults {
  template <class Instruction>
  static __device__ __forceinline__ void load(const Operands<Instruction>&, Loader&) {}
  template <class Instruction>
  static __device__ __forceinline__ void consume(const Operands<Instruction>&, Consumer& consumer) {
    consumer.wait_ready();
  }
};

template <class... Instructions>
struct List {
  // Call `visitor` with a null pointer of the instruction type that has this opcode.
  template <class Visitor>
  static __device__ __forceinline__ void dispatch(uint32_t opcode, Visitor&& visitor) {
    (void)((opcode == Instructions::kOpcode &&
            (visitor(static_cast<Instructions*>(nullptr)), true)) ||
           ...);
  }
};

// The kernel of one instruction, as the interpreter runs it.
template <class Instruction>
struct Alone {
  static constexpr bool kStores = false;  // whether the storer stores results, and notes their end

  static __device__ __forceinline__ bool has(uint32_t opcode) {
    return opcode == Instruction::kOpcode;
  }
  static __device__ __forceinline__ void load(const Stage& stage, Loader& loader) {
    Kernel<Instruction>::load(Operands<Instruction>(stage), loader);
  }
  static __device__ __forceinline__ void consume(const Stage& stage, Consumer& consumer) {
    // Every instruction lays the scratch out in its own way, so no warp may still use it.
    consumer.wait_scratch();
    Kernel<Instruction>::consume(Operands<Instruction>(stage), consumer);
  }
  static __device__ __forceinline__ void store(const Stage&, Storer&) {}
};

// The kernels of a program.
template <class... Kernels>
struct KernelList {
  // Call `visitor` with a null pointer of the kernel that has this opcode.
  template <class Visitor>
  static __device__ __forceinline__ void dispatch(uint32_t opcode, Visitor&& visitor) {
    (void)((Kernels::has(opcode) && (visitor(static_cast<Kernels*>(nullptr)), true)) || ...);
  }
};

}  // namespace megavm
