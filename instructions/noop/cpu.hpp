#pragma once

#include "vm/cpu/worker.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const Noop&, Worker&) {}

}  // namespace megavm::MEGAVM_LEVEL
