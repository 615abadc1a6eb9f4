// Which compiled instruction-set levels this processor can run.
#pragma once

#include <vector>

#include "vm/cpu/worker.hpp"

namespace megavm {

// From the plainest to the fastest.
const std::vector<const Level*>& levels();

}  // namespace megavm
