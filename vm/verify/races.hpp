// Races: conflicting accesses of two steps that nothing orders.
#pragma once

#include <optional>

#include "vm/verify/happens_before.hpp"
#include "vm/verify/index.hpp"
#include "vm/verify/tag_groups.hpp"

namespace megavm::verify {

// Returns a race, or a read of an activation that is not yet written; nothing if the program has
// neither. `sequence` is an order in which a step runs.
std::optional<Finding> find_fault(const Index& index, const TagGroups& tags,
                                  const Instructions& sequence);

}  // namespace megavm::verify
