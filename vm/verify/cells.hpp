// The cells of a tensor: the borders of all accesses cut it, so every access is a rectangle of
// whole cells.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "vm/verify/happens_before.hpp"

namespace megavm::verify {

struct CellRange {
  std::int32_t row_begin, row_end, column_begin, column_end;

  double num_cells() const {
    return static_cast<double>(row_end - row_begin) *
           static_cast<double>(column_end - column_begin);
  }
};

class Grid {
 public:
  void cut(const Access& access) {
    rows_.push_back(access.row_begin);
    rows_.push_back(access.row_end);
    columns_.push_back(access.column_begin);
    columns_.push_back(access.column_end);
  }

  void finish() {
    for (auto* cuts : {&rows_, &columns_}) {
      std::sort(cuts->begin(), cuts->end());
      cuts->erase(std::unique(cuts->begin(), cuts->end()), cuts->end());
    }
  }

  double num_cells() const {
    if (rows_.empty()) return 0;
    return static_cast<double>(rows_.size() - 1) * static_cast<double>(width());
  }
  std::size_t size() const { return rows_.empty() ? 0 : (rows_.size() - 1) * width(); }
  std::size_t width() const { return columns_.size() - 1; }

  CellRange range(const Access& access) const {
    return {index(rows_, access.row_begin), index(rows_, access.row_end),
            index(columns_, access.column_begin), index(columns_, access.column_end)};
  }

  // Calls visit(cell number) until it returns false; returns whether every call returned true.
  template <typename Visit>
  bool for_each(const CellRange& range, Visit visit) const {
    for (std::int32_t row = range.row_begin; row < range.row_end; ++row)
      for (std::int32_t column = range.column_begin; column < range.column_end; ++column)
        if (!visit(static_cast<std::size_t>(row) * width() + static_cast<std::size_t>(column)))
          return false;
    return true;
  }

 private:
  static std::int32_t index(const std::vector<std::int64_t>& cuts, std::int64_t value) {
    return static_cast<std::int32_t>(std::lower_bound(cuts.begin(), cuts.end(), value) -
                                     cuts.begin());
  }

  std::vector<std::int64_t> rows_, columns_;
};

// Throws std::length_error if the program has too many cells.
void check_cells(const ProgramView& program, double cells);

// Counts the cells that a search visits, which bounds its time.
class Visits {
 public:
  explicit Visits(const ProgramView& program) : program_(program) {}

  // Throws std::length_error if the search has visited too many.
  void add(const CellRange& range) {
    count_ += range.num_cells();
    if (count_ > kMax) fail();
  }

 private:
  static constexpr double kMax = 1e9;

  [[noreturn]] void fail() const;

  const ProgramView& program_;
  double count_ = 0;
};

// The grids, by key_of(access), of the accesses for which it returns a key. Throws like
// check_cells.
template <typename Key, typename KeyOf>
std::map<Key, Grid> make_grids(const ProgramView& program, KeyOf key_of) {
  std::map<Key, Grid> grids;
  for (const auto& access : program.accesses)
    if (const auto key = key_of(access)) grids[*key].cut(access);
  double cells = 0;
  for (auto& [key, grid] : grids) {
    grid.finish();
    cells += grid.num_cells();
  }
  check_cells(program, cells);
  return grids;
}

}  // namespace megavm::verify
