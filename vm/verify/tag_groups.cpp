#include "vm/verify/tag_groups.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace megavm::verify {

TagGroups::TagGroups(const ProgramView& program, std::optional<Finding>& fault)
    : needs(program.instructions.size()), memberships(program.instructions.size()) {
  Effort effort(program);
  auto writers = make_maps<Writer>(program, effort, [&](const Access& access) {
    const auto tensor = static_cast<std::size_t>(access.tensor);
    return program.tensors[tensor].tagged ? std::optional(tensor) : std::nullopt;
  });
  if (writers.empty()) return;
  fault = find_writers(program, writers);
  if (!fault) fault = find_readers(program, writers);
}

std::optional<Finding> TagGroups::find_writers(const ProgramView& program, Writers& writers) {
  for (std::size_t number = 0; number < program.accesses.size(); ++number) {
    const auto& access = program.accesses[number];
    if (!program.tensors[access.tensor].tagged || !access.write) continue;
    const Writer writer{static_cast<std::int64_t>(number)};
    Writer other;
    writers.at(access.tensor).update(access.where, [&](Writer& before, const Rectangle&) {
      other = std::exchange(before, writer);
      return other.access < 0;
    });
    if (other.access >= 0) {
      Finding finding{FindingKind::kTagAmbiguous, {}};
      finding.first_access = other.access;
      finding.second_access = writer.access;
      return finding;
    }
  }
  return std::nullopt;
}

std::optional<Finding> TagGroups::find_readers(const ProgramView& program, const Writers& writers) {
  using Groups = std::unordered_map<Rectangle, std::int32_t, RectangleHash>;
  std::vector<Groups> by_region(program.tensors.size());
  std::map<Instructions, std::int32_t> by_members;
  for (std::size_t number = 0; number < program.accesses.size(); ++number) {
    const auto& access = program.accesses[number];
    if (!program.tensors[access.tensor].tagged || access.write) continue;
    auto& known = by_region[access.tensor];
    const auto [entry, is_new] = known.try_emplace(access.where, -1);
    if (is_new) {
      Instructions group;
      const bool reachable =
          writers.at(access.tensor).look(access.where, [&](const Writer& writer) {
            if (writer.access < 0) return false;
            group.push_back(program.accesses[writer.access].instruction);
            return true;
          });
      if (!reachable) {
        Finding finding{FindingKind::kTagUnreachable, {}};
        finding.second_access = static_cast<std::int64_t>(number);
        return finding;
      }
      std::sort(group.begin(), group.end());
      group.erase(std::unique(group.begin(), group.end()), group.end());
      entry->second = number_of(std::move(group), by_members);
    }
    auto& groups = needs[access.instruction];
    if (std::find(groups.begin(), groups.end(), entry->second) == groups.end())
      groups.push_back(entry->second);
  }
  return std::nullopt;
}

std::int32_t TagGroups::number_of(Instructions group,
                                  std::map<Instructions, std::int32_t>& by_members) {
  const auto [entry, is_new] =
      by_members.try_emplace(group, static_cast<std::int32_t>(members.size()));
  if (is_new) {
    for (const auto writer : group) memberships[writer].push_back(entry->second);
    members.push_back(std::move(group));
  }
  return entry->second;
}

}  // namespace megavm::verify
