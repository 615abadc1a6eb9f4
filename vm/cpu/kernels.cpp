// All kernels at one instruction-set level. Compiled once per level; MEGAVM_LEVEL is its name.
#include "megavm/kernel_table.hpp"

#define MEGAVM_STRING_OF(x) #x
#define MEGAVM_STRING(x) MEGAVM_STRING_OF(x)

namespace megavm::MEGAVM_LEVEL {

extern const Level kLevel;
const Level kLevel = {MEGAVM_STRING(MEGAVM_LEVEL), kKernels};

}  // namespace megavm::MEGAVM_LEVEL
