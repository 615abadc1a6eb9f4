#include "vm/verify/races.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vm/verify/exact_order.hpp"
#include "vm/verify/fast_order.hpp"
#include "vm/verify/pieces.hpp"

namespace megavm::verify {
namespace {

// An access in one step.
struct Visit {
  Node node;
  std::int64_t access = -1;
  std::size_t kind = 0;  // FastOrder::kind of the node
};

// Visits, those of one kind side by side once they are grouped.
class VisitGroups {
 public:
  void add(const Visit& visit) { visits_.push_back(visit); }
  void group() {
    std::sort(visits_.begin(), visits_.end(), [](const Visit& a, const Visit& b) {
      return std::pair(a.kind, a.node.instruction) < std::pair(b.kind, b.node.instruction);
    });
    visits_.erase(std::unique(visits_.begin(), visits_.end(),
                              [](const Visit& a, const Visit& b) { return a.node == b.node; }),
                  visits_.end());
    for (std::size_t i = 1; i <= visits_.size(); ++i)
      if (i == visits_.size() || visits_[i].kind != visits_[i - 1].kind) ends_.push_back(i);
  }

  // Calls visit(first, end) for every group until it returns false.
  template <typename VisitGroup>
  void for_each(VisitGroup visit) const {
    const Visit* begin = visits_.data();
    for (const auto end : ends_)
      if (!visit(std::exchange(begin, visits_.data() + end), visits_.data() + end)) return;
  }

 private:
  std::vector<Visit> visits_;
  std::vector<std::size_t> ends_;  // where each group ends in visits_
};

// Reads of the same region between the same writes. All of them see the results of the same
// writers.
struct Reading {
  VisitGroups writers;
  VisitGroups readers;        // grouped by the first write that follows
  bool current = true;        // no element of the region has been written since
  std::uint64_t checked = 0;  // number of the last write that was compared with the readers
};

// What has happened to an element, in few bytes: there are many pieces.
struct Element {
  static constexpr std::uint32_t kNoReadings = 0;
  static constexpr std::uint32_t kSettled = ~0u;  // the second step has written it too

  std::int32_t writer = -1;  // the last access of the first step that wrote it; -1: none
  std::uint32_t readings = kNoReadings;  // since then: the first Link

  bool operator==(const Element&) const = default;
  // The rest repeats the first step.
  bool settled() const { return readings == kSettled; }
};

// A list of readings. Elements share links.
struct Link {
  std::uint32_t reading;
  std::uint32_t next;
  std::uint64_t checked = 0;  // number of the last write that has followed the link
};

// Visits the nodes of two steps in an order of execution, and keeps the last writer of each element
// and its readings since.
class RaceSearch {
 public:
  RaceSearch(const Index& index, ExactOrder& exact)
      : index_(index), exact_(exact), effort_(index.program) {
    const auto& program = index.program;
    surfaces_.resize(2 * program.tensors.size());
    auto maps = make_maps<Element>(
        program, effort_, [](const Access& access) { return std::optional(surface_of(access)); });
    for (auto& [number, map] : maps) {
      surfaces_[number].unsettled = map.whole().size();
      surfaces_[number].elements.emplace(std::move(map));
    }
    for (std::size_t tensor = 0; tensor < program.tensors.size(); ++tensor) {
      auto& plain = surfaces_[2 * tensor];
      auto& indexed = surfaces_[2 * tensor + 1];
      plain.mixed = indexed.mixed = plain.elements && indexed.elements;
    }
  }

  // Visits the accesses of `node`, which must have entered `order` last. Returns a race, if any.
  std::optional<Finding> visit(Node node, FastOrder& order) {
    const auto begin = index_.first_access[node.instruction];
    const auto end = index_.first_access[node.instruction + 1];
    const auto kind = order.kind(node);
    for (const bool writes : {false, true})
      for (auto number = begin; number < end; ++number)
        if (index_.program.accesses[number].write == writes)
          if (auto race = visit_access({node, static_cast<std::int64_t>(number), kind}, order))
            return race;
    return std::nullopt;
  }

  // The first read of an activation that was not written before, if any.
  const std::optional<Finding>& unwritten() const { return unwritten_; }

 private:
  // The plain or the indexed accesses of a tensor.
  struct Surface {
    std::optional<PieceMap<Element>> elements;
    std::int64_t unsettled = 0;  // number of elements
    std::vector<Reading> readings;
    std::unordered_map<Rectangle, std::uint32_t, RectangleHash> latest;  // its last reading
    bool mixed = false;  // the tensor has plain and indexed accesses
    std::vector<Visit> visits;
  };

  const Access& access(const Visit& visit) const { return index_.program.accesses[visit.access]; }
  static std::size_t surface_of(const Access& access) {
    return 2 * static_cast<std::size_t>(access.tensor) + (access.indexed ? 1 : 0);
  }
  Surface& surface(const Access& access) { return surfaces_[surface_of(access)]; }

  std::optional<Finding> visit_access(const Visit& now, FastOrder& order) {
    const auto& access = this->access(now);
    const auto& traits = index_.program.tensors[access.tensor];
    auto& surface = this->surface(access);
    auto race = access.write     ? write(surface, now, order, traits)
                : access.earlier ? read_earlier(surface, now, order)
                                 : read(surface, now, order, traits);
    if (!race && surface.mixed) race = compare(now, order);
    return race;
  }

  std::optional<Finding> read(Surface& surface, const Visit& now, FastOrder& order,
                              const TensorTraits& traits) {
    if (surface.unsettled == 0) return std::nullopt;
    const auto [entry, is_new] = surface.latest.try_emplace(access(now).where, 0);
    if (is_new || !surface.readings[entry->second].current) {
      entry->second = static_cast<std::uint32_t>(surface.readings.size());
      surface.readings.emplace_back();
      begin_reading(surface, entry->second, now, traits, order);
    }
    auto& reading = surface.readings[entry->second];
    reading.readers.add(now);
    return traits.tagged ? std::nullopt : check(reading.writers, now, order);
  }

  // The writes of the previous step must be over. No other write conflicts: see happens_before.hpp.
  std::optional<Finding> read_earlier(Surface& surface, const Visit& now, FastOrder& order) {
    std::optional<Finding> race;
    if (now.node.step == 0) return race;
    std::int32_t before = -1;
    surface.elements->look(access(now).where, [&](const Element& element) {
      if (element.writer < 0 || element.writer == before) return true;
      before = element.writer;
      return !(race = check(writer_of(element, order), now, order));
    });
    return race;
  }

  void begin_reading(Surface& surface, std::uint32_t number, const Visit& now,
                     const TensorTraits& traits, const FastOrder& order) {
    auto& writers = surface.readings[number].writers;
    std::unordered_map<std::uint32_t, std::uint32_t> longer;  // by list: with this reading
    std::int32_t before = -1;
    surface.elements->update(access(now).where, [&](Element& element, const Rectangle& where) {
      if (element.settled()) return true;
      const auto [list, is_new] =
          longer.try_emplace(element.readings, static_cast<std::uint32_t>(links_.size()));
      if (is_new) {
        links_.push_back({number, element.readings});
        effort_.add_pieces(1);  // takes as much memory
      }
      element.readings = list->second;
      if (element.writer >= 0) {
        if (std::exchange(before, element.writer) != element.writer)
          writers.add(writer_of(element, order));
      } else if (traits.activation && !traits.tagged && !unwritten_) {
        unwritten_ = Finding{FindingKind::kUnwritten, {}};
        unwritten_->first_access = first_writer(where, surface_of(access(now)));
        unwritten_->second_access = now.access;
      }
      return true;
    });
    writers.group();
  }

  Visit writer_of(const Element& element, const FastOrder& order) const {
    const Node node{index_.program.accesses[element.writer].instruction, 0};
    return {node, element.writer, order.kind(node)};
  }

  // The first access that writes the first element of a rectangle, anywhere in the step; -1 if none
  // does.
  std::int64_t first_writer(const Rectangle& where, std::size_t surface) const {
    const auto& accesses = index_.program.accesses;
    const auto writer = std::find_if(accesses.begin(), accesses.end(), [&](const Access& access) {
      return access.write && surface_of(access) == surface &&
             access.where.has(where.row_begin, where.column_begin);
    });
    return writer == accesses.end() ? -1 : writer - accesses.begin();
  }

  std::optional<Finding> write(Surface& surface, const Visit& now, FastOrder& order,
                               const TensorTraits& traits) {
    std::optional<Finding> race;
    if (surface.unsettled == 0) return race;
    std::int32_t before = -1;
    ++writes_;
    surface.elements->update(access(now).where, [&](Element& element, const Rectangle& where) {
      if (element.settled()) return true;
      // The readers of a tagged word have waited for its writer.
      const bool reader_vouches = traits.tagged && element.readings != Element::kNoReadings;
      if (element.writer >= 0 && element.writer != before && !reader_vouches) {
        if ((race = check(writer_of(element, order), now, order))) return false;
        before = element.writer;
      }
      if ((race = check_readers(surface, element.readings, now, order))) return false;
      if (now.node.step == kAnalysedSteps - 1) {
        element.readings = Element::kSettled;
        surface.unsettled -= where.size();
      } else {
        element = {static_cast<std::int32_t>(now.access)};
      }
      return true;
    });
    return race;
  }

  // A race of a write with the readers of the readings in a list.
  std::optional<Finding> check_readers(Surface& surface, std::uint32_t list, const Visit& now,
                                       FastOrder& order) {
    while (list != Element::kNoReadings &&
           std::exchange(links_[list].checked, writes_) != writes_) {
      auto& reading = surface.readings[links_[list].reading];
      if (std::exchange(reading.current, false)) reading.readers.group();
      if (std::exchange(reading.checked, writes_) != writes_)
        if (auto race = check(reading.readers, now, order)) return race;
      list = links_[list].next;
    }
    return std::nullopt;
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
      if (comparable && (access.where.column_end <= earlier.where.column_begin ||
                         earlier.where.column_end <= access.where.column_begin))
        continue;
      if (auto race = check(before, now, order)) return race;
    }
    surface(access).visits.push_back(now);
    return std::nullopt;
  }

  // A race of `now` with one of the visits. All of them write, or all read.
  std::optional<Finding> check(const VisitGroups& groups, const Visit& now, FastOrder& order) {
    std::optional<Finding> race;
    groups.for_each([&](const Visit* begin, const Visit* end) {
      if (!follows(*begin, now, order))
        for (auto before = begin; before != end && !race; ++before)
          race = check_exactly(*before, now);
      return !race;
    });
    return race;
  }
  std::optional<Finding> check(const Visit& before, const Visit& now, FastOrder& order) {
    return follows(before, now, order) ? std::nullopt : check_exactly(before, now);
  }

  // Whether the fast rule orders `now` after all nodes of the kind of `before`, or none of them can
  // race with it.
  bool follows(const Visit& before, const Visit& now, FastOrder& order) const {
    if (before.node.step == kAnalysedSteps - 1) return true;
    return access(now).earlier    ? order.over_before_earlier_reads(before.node)
           : !access(now).write   ? order.over_before_reads(before.node)
           : access(before).write ? order.over_before_writes(before.node)
                                  : order.read_before_writes(before.node);
  }

  // A race, unless it is one instruction in one step, or the exact rule orders the two accesses.
  std::optional<Finding> check_exactly(const Visit& before, const Visit& now) {
    if (before.node == now.node ||
        exact_.ordered(before.node, access(before).write, now.node, ExactOrder::point(access(now))))
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
  Effort effort_;
  std::vector<Surface> surfaces_;  // by tensor: plain, indexed
  std::vector<Link> links_{{}};    // the first stands for no readings
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
