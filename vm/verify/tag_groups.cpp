#include "vm/verify/tag_groups.hpp"

#include <algorithm>
#include <utility>

namespace megavm::verify {

TagGroups::TagGroups(const ProgramView& program, std::optional<Finding>& fault)
    : needs(program.instructions.size()), memberships(program.instructions.size()) {
  const auto grids = make_grids<std::int32_t>(program, [&](const Access& access) {
    return program.tensors[access.tensor].tagged ? std::optional(access.tensor) : std::nullopt;
  });
  if (grids.empty()) return;
  CellWriters writers;  // number of the writing access; -1: none
  for (const auto& [tensor, grid] : grids) writers[tensor].assign(grid.size(), -1);
  fault = find_writers(program, grids, writers);
  if (!fault) fault = find_readers(program, grids, writers);
}

std::optional<Finding> TagGroups::find_writers(const ProgramView& program, const Grids& grids,
                                               CellWriters& writers) {
  Visits visits(program);
  for (std::size_t number = 0; number < program.accesses.size(); ++number) {
    const auto& access = program.accesses[number];
    if (!program.tensors[access.tensor].tagged || !access.write) continue;
    const auto& grid = grids.at(access.tensor);
    visits.add(grid.range(access));
    auto& cells = writers.at(access.tensor);
    std::int64_t other = -1;
    grid.for_each(grid.range(access), [&](std::size_t cell) {
      other = cells[cell];
      cells[cell] = static_cast<std::int64_t>(number);
      return other < 0;
    });
    if (other >= 0) {
      Finding finding{FindingKind::kTagAmbiguous, {}};
      finding.first_access = other;
      finding.second_access = static_cast<std::int64_t>(number);
      return finding;
    }
  }
  return std::nullopt;
}

std::optional<Finding> TagGroups::find_readers(const ProgramView& program, const Grids& grids,
                                               const CellWriters& writers) {
  std::map<std::vector<std::int64_t>, std::int32_t> by_region;
  std::map<Instructions, std::int32_t> by_members;
  Visits visits(program);
  for (std::size_t number = 0; number < program.accesses.size(); ++number) {
    const auto& access = program.accesses[number];
    if (!program.tensors[access.tensor].tagged || access.write) continue;
    const std::vector<std::int64_t> region{access.tensor, access.row_begin, access.row_end,
                                           access.column_begin, access.column_end};
    auto known = by_region.find(region);
    if (known == by_region.end()) {
      const auto& grid = grids.at(access.tensor);
      const auto& cells = writers.at(access.tensor);
      visits.add(grid.range(access));
      Instructions group;
      const bool reachable = grid.for_each(grid.range(access), [&](std::size_t cell) {
        if (cells[cell] < 0) return false;
        group.push_back(program.accesses[cells[cell]].instruction);
        return true;
      });
      if (!reachable) {
        Finding finding{FindingKind::kTagUnreachable, {}};
        finding.second_access = static_cast<std::int64_t>(number);
        return finding;
      }
      std::sort(group.begin(), group.end());
      group.erase(std::unique(group.begin(), group.end()), group.end());
      const auto [entry, is_new] =
          by_members.try_emplace(group, static_cast<std::int32_t>(members.size()));
      if (is_new) {
        for (const auto writer : group) memberships[writer].push_back(entry->second);
        members.push_back(std::move(group));
      }
      known = by_region.emplace(region, entry->second).first;
    }
    auto& groups = needs[access.instruction];
    if (std::find(groups.begin(), groups.end(), known->second) == groups.end())
      groups.push_back(known->second);
  }
  return std::nullopt;
}

}  // namespace megavm::verify
