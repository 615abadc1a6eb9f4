#include "vm/verify/pieces.hpp"

#include <cstdio>
#include <stdexcept>

namespace megavm::verify {

void Effort::fail_for_pieces() const {
  char text[256];
  std::snprintf(
      text, sizeof(text),
      "the program's %zu accesses cut its tensors into more than %td pieces, to which the "
      "analysis is limited: use larger tiles, or tiles that share their borders",
      program_.accesses.size(), kMaxPieces);
  throw std::length_error(text);
}

void Effort::fail_for_visits() const {
  char text[256];
  std::snprintf(text, sizeof(text),
                "the program's %zu accesses touch the pieces into which they cut its tensors more "
                "than %zu times, to which the analysis is limited: use larger tiles, or tiles that "
                "share their borders",
                program_.accesses.size(), kMaxVisits);
  throw std::length_error(text);
}

}  // namespace megavm::verify
