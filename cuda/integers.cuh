// Integers by their size; NVRTC has no <cstdint>.
#pragma once

namespace megavm {

using uint32_t = unsigned int;
using int32_t = int;
using uint64_t = unsigned long long;
using int64_t = long long;

}  // namespace megavm
