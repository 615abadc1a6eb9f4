// Tagged words: which instructions wait for which.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "vm/verify/cells.hpp"
#include "vm/verify/happens_before.hpp"
#include "vm/verify/index.hpp"

namespace megavm::verify {

// Readers of the same set of writers share a *group*. A group is complete in a step when all its
// writers have written their words of that step.
class TagGroups {
 public:
  // Sets `fault` if a word has two writers, or if a word that is read has none.
  TagGroups(const ProgramView& program, std::optional<Finding>& fault);

  bool empty() const { return members.empty(); }

  std::vector<Instructions> members;      // by group: its writers
  std::vector<Instructions> needs;        // by instruction: the groups that it waits for
  std::vector<Instructions> memberships;  // by instruction: the groups that it writes for

 private:
  using Grids = std::map<std::int32_t, Grid>;                             // by tensor
  using CellWriters = std::map<std::int32_t, std::vector<std::int64_t>>;  // by tensor and cell

  std::optional<Finding> find_writers(const ProgramView& program, const Grids& grids,
                                      CellWriters& writers);
  std::optional<Finding> find_readers(const ProgramView& program, const Grids& grids,
                                      const CellWriters& writers);
};

}  // namespace megavm::verify
