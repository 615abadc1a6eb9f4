// Tagged words: which instructions wait for which.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "vm/verify/happens_before.hpp"
#include "vm/verify/index.hpp"
#include "vm/verify/pieces.hpp"

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
  // The access that writes an element; -1: none.
  struct Writer {
    std::int64_t access = -1;
    bool operator==(const Writer&) const = default;
  };
  using Writers = std::map<std::size_t, PieceMap<Writer>>;  // by tensor

  std::optional<Finding> find_writers(const ProgramView& program, Writers& writers);
  std::optional<Finding> find_readers(const ProgramView& program, const Writers& writers);
  // The number of the group of these writers, which may be new.
  std::int32_t number_of(Instructions group, std::map<Instructions, std::int32_t>& by_members);
};

}  // namespace megavm::verify
