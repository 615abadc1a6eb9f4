#include "vm/verify/cells.hpp"

#include <cstdio>
#include <stdexcept>

namespace megavm::verify {
namespace {

// Of all tensors together: half a gigabyte. A batch of 64 of Llama 8B on 8 ranks has 4.5 million.
constexpr double kMaxCells = 1 << 23;

}  // namespace

void check_cells(const ProgramView& program, double cells) {
  if (cells <= kMaxCells) return;
  char text[256];
  std::snprintf(text, sizeof(text),
                "the program's %zu accesses cut its tensors into %.0f cells, the analysis is "
                "limited to %.0f: use larger tiles, or tiles that share their borders",
                program.accesses.size(), cells, kMaxCells);
  throw std::length_error(text);
}

void Visits::fail() const {
  char text[256];
  std::snprintf(text, sizeof(text),
                "the program's %zu accesses touch the cells into which they cut its tensors more "
                "than %.0f times, to which the analysis is limited: use larger tiles, or tiles "
                "that share their borders",
                program_.accesses.size(), kMax);
  throw std::length_error(text);
}

}  // namespace megavm::verify
