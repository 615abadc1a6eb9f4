// The interface of an instruction's kernel, and the dispatch by opcode.
#pragma once

#include "cuda/consumer.cuh"
#include "cuda/loader.cuh"

namespace megavm {

// The code of an instruction in each role. instructions/<name>/cuda.cuh specialises it, with
//   static void load(const Operands<Instruction>&, Loader&);       loader warp: stream pages
//   static void consume(const Operands<Instruction>&, Consumer&);  all consumer warps: compute
// or, for a matrix product, derives it from ProductKernel<Plan> (cuda/pipelines/plan.cuh).
template <class Instruction>
struct Kernel;

// Base of kernels that stream no pages.
struct NoPages {
  template <class Instruction>
  static __device__ __forceinline__ void load(const Operands<Instruction>&, Loader&) {}
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

// Whether the instruction is a matrix product. All products share the code of the loader, the
// consumers and, with one row, the storer.
template <class Instruction>
concept IsProduct = requires { typename Kernel<Instruction>::Plan; };

}  // namespace megavm
