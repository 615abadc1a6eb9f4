// The one entry point. program.hpp is generated from the program: its constants and the
// instructions it uses.
#include "program.hpp"

extern "C" __global__ void __launch_bounds__(megavm::kNumThreads, 1)
    megavm_kernel(const __grid_constant__ megavm::Launch launch) {
  megavm::run<megavm::Used>(launch);
}
