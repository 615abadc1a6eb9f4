// The compiled instruction-set levels that this processor can run.
#pragma once

#include <vector>

#include "vm/cpu/worker.hpp"

namespace megavm {

// In ascending order of speed; the first is the generic level.
const std::vector<const Level*>& levels();

}  // namespace megavm
