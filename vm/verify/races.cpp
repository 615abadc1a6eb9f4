#include "vm/verify/races.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "vm/verify/cells.hpp"
#include "vm/verify/exact_order.hpp"
#include "vm/verify/fast_order.hpp"

namespace megavm::verify {
namespace {

// An access in one step.
struct Visit {
  Node node;
  std::int64_t access = -1;
};

// Reads of the same region between the same writes. All of them see the results of the same
// writers.
struct Reading {
  std::vector<Visit> writers;
  std::vector<Visit> readers;
  bool current = true;        // no cell of the region has been written since
  std::uint64_t checked = 0;  // number of the last write that was compared with the readers
};

struct Cell {
  Visit writer;                         // the last one
  Visit earlier_writer;                 // of the first step, once the second has written
  std::vector<std::uint32_t> readings;  // since the last write
  bool settled = false;                 // written in the second step: the rest repeats the first
};

// Visits the nodes of two steps in an order of execution, and keeps the last writer of each cell
// and its readings since.
class RaceSearch {
 public:
  RaceSearch(const Index& index, ExactOrder& exact)
      : index_(index), exact_(exact), visits_(index.program) {
    const auto& program = index.program;
    surfaces_.resize(2 * program.tensors.size());
    auto grids = make_grids<std::size_t>(
        program, [](const Access& access) { return std::optional(surface_of(access)); });
    for (auto& [number, grid] : grids) surfaces_[number].grid = std::move(grid);
    for (std::size_t tensor = 0; tensor < program.tensors.size(); ++tensor) {
      auto& plain = surfaces_[2 * tensor];
      auto& indexed = surfaces_[2 * tensor + 1];
      plain.mixed = indexed.mixed = plain.grid.size() > 0 && indexed.grid.size() > 0;
    }
  }

  // Visits the accesses of `node`, which must have entered `order` last. Returns a race, if any.
  std::optional<Finding> visit(Node node, FastOrder& order) {
    const auto begin = index_.first_access[node.instruction];
    const auto end = index_.first_access[node.instruction + 1];
    for (const bool writes : {false, true})
      for (auto number = begin; number < end; ++number)
        if (index_.program.accesses[number].write == writes)
          if (auto race = visit_access({node, static_cast<std::int64_t>(number)}, order))
            return race;
    return std::nullopt;
  }

  // The first read of an activation that was not written before, if any.
  const std::optional<Finding>& unwritten() const { return unwritten_; }

 private:
  // The plain or the indexed accesses of a tensor.
  struct Surface {
    Grid grid;
    std::vector<Cell> cells;
    std::vector<Reading> readings;
    std::map<std::array<std::int32_t, 4>, std::uint32_t> latest;  // by region: its last reading
    bool mixed = false;  // the tensor has plain and indexed accesses
    std::vector<Visit> visits;
  };

  const Access& access(const Visit& visit) const { return index_.program.accesses[visit.access]; }
  static std::size_t surface_of(const Access& access) {
    return 2 * static_cast<std::size_t>(access.tensor) + (access.indexed ? 1 : 0);
  }
  Surface& surface(const Access& access) { return surfaces_[surface_of(access)]; }

  std::optional<Finding> visit_access(const Visit& now, FastOrder& order) {
    const auto& access = index_.program.accesses[now.access];
    const auto& traits = index_.program.tensors[access.tensor];
    auto& surface = this->surface(access);
    if (surface.cells.empty()) surface.cells.resize(surface.grid.size());
    const auto range = surface.grid.range(access);
    auto race = access.write     ? write(surface, range, now, order, traits)
                : access.earlier ? read_earlier(surface, range, now, order)
                                 : read(surface, range, now, order, traits);
    if (!race && surface.mixed) race = compare(now, order);
    return race;
  }

  std::optional<Finding> read(Surface& surface, const CellRange& range, const Visit& now,
                              FastOrder& order, const TensorTraits& traits) {
    const auto [entry, is_new] = surface.latest.try_emplace(
        {range.row_begin, range.row_end, range.column_begin, range.column_end}, 0);
    if (is_new || !surface.readings[entry->second].current) {
      entry->second = static_cast<std::uint32_t>(surface.readings.size());
      surface.readings.emplace_back();
      begin_reading(surface, range, entry->second, now, traits);
    }
    auto& reading = surface.readings[entry->second];
    if (!traits.tagged)
      for (const auto& writer : reading.writers)
        if (auto race = check(writer, now, order)) return race;
    reading.readers.push_back(now);
    return std::nullopt;
  }

  // The writes of the previous step must be over. No other write conflicts: see happens_before.hpp.
  std::optional<Finding> read_earlier(Surface& surface, const CellRange& range, const Visit& now,
                                      FastOrder& order) {
    std::optional<Finding> race;
    if (now.node.step == 0) return race;
    visits_.add(range);
    Node before;
    surface.grid.for_each(range, [&](std::size_t place) {
      const auto& cell = surface.cells[place];
      const auto& writer = cell.settled ? cell.earlier_writer : cell.writer;
      if (!writer.node || writer.node == before) return true;
      before = writer.node;
      return !(race = check(writer, now, order));
    });
    return race;
  }

  void begin_reading(Surface& surface, const CellRange& range, std::uint32_t number,
                     const Visit& now, const TensorTraits& traits) {
    visits_.add(range);
    auto& writers = surface.readings[number].writers;
    surface.grid.for_each(range, [&](std::size_t place) {
      auto& cell = surface.cells[place];
      if (cell.settled) return true;
      cell.readings.push_back(number);
      if (cell.writer.node) {
        if (writers.empty() || !(writers.back().node == cell.writer.node))
          writers.push_back(cell.writer);
      } else if (traits.activation && !traits.tagged && !unwritten_) {
        unwritten_ = Finding{FindingKind::kUnwritten, {}};
        unwritten_->first_access = writer_of(surface, place, this->access(now));
        unwritten_->second_access = now.access;
      }
      return true;
    });
    const auto key = [](const Visit& v) { return std::pair(v.node.step, v.node.instruction); };
    std::sort(writers.begin(), writers.end(),
              [&](const Visit& a, const Visit& b) { return key(a) < key(b); });
    writers.erase(std::unique(writers.begin(), writers.end(),
                              [](const Visit& a, const Visit& b) { return a.node == b.node; }),
                  writers.end());
  }

  // The first access that writes a cell, anywhere in the step; -1 if none does. `like`: an access
  // of the same surface.
  std::int64_t writer_of(const Surface& surface, std::size_t place, const Access& like) const {
    const auto& accesses = index_.program.accesses;
    for (std::size_t number = 0; number < accesses.size(); ++number) {
      const auto& access = accesses[number];
      if (!access.write || surface_of(access) != surface_of(like)) continue;
      const bool elsewhere = surface.grid.for_each(
          surface.grid.range(access), [place](std::size_t cell) { return cell != place; });
      if (!elsewhere) return static_cast<std::int64_t>(number);
    }
    return -1;
  }

  std::optional<Finding> write(Surface& surface, const CellRange& range, const Visit& now,
                               FastOrder& order, const TensorTraits& traits) {
    std::optional<Finding> race;
    Node before;
    ++writes_;
    visits_.add(range);
    surface.grid.for_each(range, [&](std::size_t place) {
      auto& cell = surface.cells[place];
      if (cell.settled) return true;
      // The readers of a tagged word have waited for its writer.
      const bool reader_vouches = traits.tagged && !cell.readings.empty();
      if (cell.writer.node && !reader_vouches && !(cell.writer.node == before)) {
        if ((race = check(cell.writer, now, order))) return false;
        before = cell.writer.node;
      }
      for (const auto number : cell.readings) {
        auto& reading = surface.readings[number];
        reading.current = false;
        if (std::exchange(reading.checked, writes_) == writes_) continue;
        for (const auto& reader : reading.readers)
          if ((race = check(reader, now, order))) return false;
      }
      cell.earlier_writer = std::exchange(cell.writer, now);
      cell.readings.clear();
      cell.settled = now.node.step == kAnalysedSteps - 1;
      return true;
    });
    return race;
  }

  // Checks an access of a tensor with plain and indexed accesses against all of the other kind, as
  // their rows cannot be compared.
  std::optional<Finding> compare(const Visit& now, FastOrder& order) {
    const auto& access = this->access(now);
    auto& other = surfaces_[2 * static_cast<std::size_t>(access.tensor) + (access.indexed ? 0 : 1)];
    const bool comparable = index_.program.tensors[access.tensor].comparable_columns;
    for (const auto& before : other.visits) {
      const auto& earlier = this->access(before);
      if (!access.write && !earlier.write) continue;
      if (comparable &&
          (access.column_end <= earlier.column_begin || earlier.column_end <= access.column_begin))
        continue;
      if (auto race = check(before, now, order)) return race;
    }
    surface(access).visits.push_back(now);
    return std::nullopt;
  }

  // A race, unless one of the rules orders the two accesses.
  std::optional<Finding> check(const Visit& before, const Visit& now, FastOrder& order) {
    const bool writes = access(now).write, wrote = access(before).write;
    if (before.node == now.node || before.node.step == kAnalysedSteps - 1) return std::nullopt;
    const bool ordered = access(now).earlier ? order.over_before_earlier_reads(before.node)
                         : !writes           ? order.over_before_reads(before.node)
                         : wrote             ? order.over_before_writes(before.node)
                                             : order.read_before_writes(before.node);
    if (ordered || exact_.ordered(before.node, wrote, now.node, ExactOrder::point(access(now))))
      return std::nullopt;
    Finding finding{FindingKind::kUnordered, {}};
    finding.first_access = before.access;
    finding.second_access = now.access;
    finding.first_step = before.node.step;
    finding.second_step = now.node.step;
    return finding;
  }

  const Index& index_;
  ExactOrder& exact_;
  Visits visits_;
  std::vector<Surface> surfaces_;  // by tensor: plain, indexed
  std::uint64_t writes_ = 0;
  std::optional<Finding> unwritten_;
};

}  // namespace

std::optional<Finding> find_fault(const Index& index, const TagGroups& tags,
                                  const Instructions& sequence) {
  const auto& program = index.program;
  std::vector<char> trusted(index.signallers.size(), 0);  // by barrier: an instruction waits for it
  for (const auto& instruction : program.instructions)
    for (const auto& wait : instruction.waits)
      if (wait.barrier >= 0) trusted[wait.barrier] = 1;

  // A race is one even if a trusted barrier does not deserve it, because the exact rule has
  // confirmed it. The absence of races proves nothing until the steps of all trusted barriers are
  // apart: remove the barriers whose steps overlap, and search again.
  ExactOrder exact(index, tags);
  for (;;) {
    const auto order = program.dynamic ? make_event_order(index, tags, trusted)
                                       : make_queue_order(index, tags, trusted);
    RaceSearch races(index, exact);
    for (std::int32_t step = 0; step < kAnalysedSteps; ++step)
      for (const auto instruction : sequence) {
        order->enter({instruction, step});
        if (auto fault = races.visit({instruction, step}, *order)) return fault;
      }
    bool stable = true;
    for (std::int32_t barrier = 0; barrier < program.barriers; ++barrier)
      if (trusted[barrier] && !order->steps_are_apart(barrier)) trusted[barrier] = stable = false;
    if (stable) return races.unwritten();
  }
}

}  // namespace megavm::verify
