#include "vm/verify/cells.hpp"

#include <cstdio>
#include <stdexcept>

namespace megavm::verify {
namespace {

// Compiled programs stay below a hundredth of each limit.
constexpr double kMaxCells = 1 << 22;  // of all tensors together
constexpr double kMaxVisits = 1e9;     // of cells, by all accesses

}  // namespace

void check_cells(const ProgramView& program, double cells, double visits) {
  if (cells <= kMaxCells && visits <= kMaxVisits) return;
  char text[256];
  std::snprintf(text, sizeof(text),
                "the program's %zu accesses cut its tensors into %.0f cells, which they touch %.0f "
                "times; the analysis is limited to %.0f cells and %.0f times: use larger tiles, or "
                "tiles that share their borders",
                program.accesses.size(), cells, visits, kMaxCells, kMaxVisits);
  throw std::length_error(text);
}

}  // namespace megavm::verify
