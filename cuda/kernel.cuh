// What an instruction's kernel consists of, and how it is found by its opcode.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/loader.cuh"

namespace megavm {

// What an instruction does in each role. Specialised in instructions/<name>/cuda.cuh, with
//   static void load(const Operands<Instruction>&, Loader&);      which pages it streams
//   static void consume(const Operands<Instruction>&, Consumer&); what becomes of them
// or, for a matrix product, derived from ProductKernel<Plan> (cuda/pipelines/product.cuh).
template <class Instruction>
struct Kernel;

// Base of kernels that stream nothing through the ring.
struct NoPages {
  template <class Instruction>
  static __device__ __forceinline__ void load(const Operands<Instruction>&, Loader&) {}
};

template <class... Instructions>
struct List {
  // Call `visitor` with the instruction that has this opcode.
  template <class Visitor>
  static __device__ __forceinline__ void dispatch(uint32_t opcode, Visitor&& visitor) {
    (void)((opcode == Instructions::kOpcode &&
            (visitor(static_cast<Instructions*>(nullptr)), true)) ||
           ...);
  }
};

// Whether it is a matrix product, whose consumers share their code with other products.
template <class Instruction>
concept IsProduct = requires { typename Kernel<Instruction>::Plan; };

}  // namespace megavm
