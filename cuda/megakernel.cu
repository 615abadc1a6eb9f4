// Entry point of the kernel. program.hpp is generated for the program: it has the program's
// constants and lists the instructions that it uses.
#include "program.hpp"

extern "C" __global__ void __launch_bounds__(megavm::kNumThreads, 1)
    megavm_kernel(const __grid_constant__ megavm::Launch launch) {
  megavm::run<megavm::Used>(launch);
}
