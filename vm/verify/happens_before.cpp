#include "vm/verify/happens_before.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace megavm {
namespace {

constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max() / 2;
constexpr int kAnalysedSteps = 2;

// The analysis is bounded. Programs of the compiler stay below a hundredth of each.
constexpr double kMaxCells = 1 << 22;       // of all tensors together
constexpr double kMaxVisits = 1e9;          // of cells, by all accesses
constexpr double kMaxExecuted = 4e9;        // instructions, for the exact rule
constexpr std::size_t kMaxKept = 1u << 29;  // bytes of its results

using Instructions = std::vector<std::int32_t>;

// An instruction in one of the analysed steps.
struct Node {
  std::int32_t instruction = -1;
  std::int32_t step = 0;

  bool operator==(const Node& other) const {
    return instruction == other.instruction && step == other.step;
  }
  explicit operator bool() const { return instruction >= 0; }
};

// ---- Cells: a tensor cut along the borders of all accesses, so that an access is a rectangle of
// cells.

struct CellRange {
  std::int32_t row_begin, row_end, column_begin, column_end;
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

  // Calls visit(cell number) until it returns false; returns whether it never did.
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

// The grids of those accesses that `wanted` takes, by `place(access)`. Throws where they would have
// too many cells, or accesses too many of them.
template <typename Key, typename Place>
std::map<Key, Grid> make_grids(const ProgramView& program, Place place) {
  std::map<Key, Grid> grids;
  for (const auto& access : program.accesses)
    if (const auto key = place(access)) grids[*key].cut(access);
  double cells = 0, visits = 0;
  for (auto& [key, grid] : grids) {
    grid.finish();
    cells += grid.num_cells();
  }
  for (const auto& access : program.accesses)
    if (const auto key = place(access)) {
      const auto range = grids.at(*key).range(access);
      visits += static_cast<double>(range.row_end - range.row_begin) *
                static_cast<double>(range.column_end - range.column_begin);
    }
  if (cells <= kMaxCells && visits <= kMaxVisits) return grids;
  char text[256];
  std::snprintf(text, sizeof(text),
                "the program's %zu accesses cut its tensors into %.0f cells, which they touch %.0f "
                "times; the analysis is limited to %.0f cells and %.0f times: use larger tiles, or "
                "tiles that share their borders",
                program.accesses.size(), cells, visits, kMaxCells, kMaxVisits);
  throw std::length_error(text);
}

// ---- The program, indexed the ways the analysis needs it.

struct Place {
  std::int32_t queue, position;
};

struct Index {
  explicit Index(const ProgramView& view) : program(view) {
    const auto count = view.instructions.size();
    signallers.resize(static_cast<std::size_t>(view.barriers));
    places.resize(count);
    for (std::size_t queue = 0; queue < view.queues.size(); ++queue) {
      const auto& entries = view.queues[queue];
      for (std::size_t position = 0; position < entries.size(); ++position) {
        const auto instruction = entries[position];
        places[instruction] = {static_cast<std::int32_t>(queue),
                               static_cast<std::int32_t>(position)};
        const auto signal = view.instructions[instruction].signal;
        if (signal >= 0) signallers[signal].push_back(instruction);
      }
    }
    first_access.assign(count + 1, 0);
    for (const auto& access : view.accesses) ++first_access[access.instruction + 1];
    for (std::size_t i = 0; i < count; ++i) first_access[i + 1] += first_access[i];
  }

  std::int64_t signals(std::int32_t barrier) const {
    return static_cast<std::int64_t>(signallers[barrier].size());
  }

  const ProgramView& program;
  std::vector<Place> places;
  std::vector<Instructions>
      signallers;  // by barrier; those of one queue stand together, in its order
  std::vector<std::size_t> first_access;  // by instruction
};

// ---- Tagged words: who waits for whom.

// Readers of the same set of writers share a *group*. A group is complete in a step when all its
// writers have written their words of that step.
class TagGroups {
 public:
  TagGroups(const ProgramView& program, std::optional<Finding>& fault)
      : needs(program.instructions.size()), memberships(program.instructions.size()) {
    const auto grids = make_grids<std::int32_t>(program, [&](const Access& access) {
      return program.tensors[access.tensor].tagged ? std::optional(access.tensor) : std::nullopt;
    });
    if (grids.empty()) return;
    std::map<std::int32_t, std::vector<std::int64_t>>
        writers;  // by cell: number of the writing access
    for (const auto& [tensor, grid] : grids) writers[tensor].assign(grid.size(), -1);
    fault = find_writers(program, grids, writers);
    if (!fault) fault = find_readers(program, grids, writers);
  }

  bool empty() const { return members.empty(); }

  std::vector<Instructions> members;      // by group: the writers
  std::vector<Instructions> needs;        // by instruction: groups it waits for
  std::vector<Instructions> memberships;  // by instruction: groups it is a writer of

 private:
  using Grids = std::map<std::int32_t, Grid>;
  using CellWriters = std::map<std::int32_t, std::vector<std::int64_t>>;

  std::optional<Finding> find_writers(const ProgramView& program, const Grids& grids,
                                      CellWriters& writers) {
    for (std::size_t number = 0; number < program.accesses.size(); ++number) {
      const auto& access = program.accesses[number];
      if (!program.tensors[access.tensor].tagged || !access.write) continue;
      const auto& grid = grids.at(access.tensor);
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

  std::optional<Finding> find_readers(const ProgramView& program, const Grids& grids,
                                      const CellWriters& writers) {
    std::map<std::vector<std::int64_t>, std::int32_t> by_region;
    std::map<Instructions, std::int32_t> by_members;
    for (std::size_t number = 0; number < program.accesses.size(); ++number) {
      const auto& access = program.accesses[number];
      if (!program.tensors[access.tensor].tagged || access.write) continue;
      const std::vector<std::int64_t> region{access.tensor, access.row_begin, access.row_end,
                                             access.column_begin, access.column_end};
      auto known = by_region.find(region);
      if (known == by_region.end()) {
        const auto& grid = grids.at(access.tensor);
        const auto& cells = writers.at(access.tensor);
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
};

// ---- Execution: run whatever can run, for a number of steps, with one instruction possibly
// withheld.

class Execution {
 public:
  enum class Withhold { kNothing, kWrites, kReads };  // kWrites: but its tagged words appear

  Execution(const Index& index, const TagGroups& tags, int steps)
      : index_(index),
        tags_(tags),
        steps_(steps),
        counters_(index.signallers.size(), 0),
        barrier_waiters_(index.signallers.size()),
        group_counts_(tags.members.size() * static_cast<std::size_t>(steps), 0),
        group_waiters_(group_counts_.size()) {}

  // Runs to the end. With ``withhold``, what reaches the last step is taken to go on forever:
  // sound, as that can only let more run, and what is kept back by a withheld instruction stops
  // long before.
  void run(Node withheld, Withhold withhold) {
    withheld_ = withheld;
    withhold_ = withhold;
    const auto actors = index_.program.dynamic ? count() * static_cast<std::size_t>(steps_)
                                               : index_.program.queues.size();
    heads_.assign(actors, 0);
    reached_header.assign(count() * static_cast<std::size_t>(steps_), 0);
    reached_writes.assign(reached_header.size(), 0);
    for (std::size_t actor = actors; actor-- > 0;)
      ready_.push_back(static_cast<std::int32_t>(actor));
    while (!ready_.empty()) {
      const auto actor = ready_.back();
      ready_.pop_back();
      if (index_.program.dynamic)
        advance_node(actor);
      else
        advance_queue(actor);
    }
  }

  std::vector<Blocked> blocked() const {
    std::vector<Blocked> result;
    for (std::size_t queue = 0; queue < index_.program.queues.size(); ++queue) {
      const auto& entries = index_.program.queues[queue];
      if (static_cast<std::size_t>(heads_[queue]) < entries.size())
        result.push_back(describe(entries[static_cast<std::size_t>(heads_[queue])], 0));
    }
    return result;
  }

  // What keeps ``instruction`` from running.
  Blocked describe(std::int32_t instruction, std::int32_t step) const {
    const auto lacks = [&](const Instructions& candidates) {
      for (const auto candidate : candidates)
        if (!finished(candidate, step)) return candidate;
      return std::int32_t{-1};
    };
    for (const auto& wait : index_.program.instructions[instruction].waits)
      if (wait.barrier >= 0 && counters_[wait.barrier] < threshold(wait, step))
        return {instruction, wait.barrier, counters_[wait.barrier], wait.target,
                lacks(index_.signallers[wait.barrier])};
    for (const auto group : tags_.needs[instruction])
      if (!complete(group, step)) return {instruction, -1, 0, 0, lacks(tags_.members[group])};
    return {instruction, -1, 0, 0, -1};
  }

  // Whether the waits of a node's header are satisfied at the end, wherever its queue stands.
  bool waits_satisfied(Node node) const {
    const auto& waits = index_.program.instructions[node.instruction].waits;
    return std::all_of(std::begin(waits), std::end(waits), [&](const WaitFor& wait) {
      return wait.barrier < 0 || counters_[wait.barrier] >= threshold(wait, node.step);
    });
  }

  std::vector<char> reached_header, reached_writes;  // by step * instructions + instruction
  Instructions order;                                // in which instructions finished

 private:
  struct Waiter {
    std::int64_t threshold;
    std::int32_t actor;
  };

  std::size_t count() const { return index_.program.instructions.size(); }
  std::size_t number(std::int32_t instruction, std::int32_t step) const {
    return static_cast<std::size_t>(step) * count() + static_cast<std::size_t>(instruction);
  }
  std::int64_t threshold(const WaitFor& wait, std::int32_t step) const {
    return step * index_.signals(wait.barrier) + wait.target;
  }
  std::size_t group_number(std::int32_t group, std::int32_t step) const {
    return static_cast<std::size_t>(group) * static_cast<std::size_t>(steps_) +
           static_cast<std::size_t>(step);
  }
  bool complete(std::int32_t group, std::int32_t step) const {
    return static_cast<std::size_t>(group_counts_[group_number(group, step)]) ==
           tags_.members[group].size();
  }
  bool finished(std::int32_t instruction, std::int32_t step) const {
    const auto place = index_.places[instruction];
    const auto length = static_cast<std::int32_t>(index_.program.queues[place.queue].size());
    return heads_[place.queue] > step * length + place.position;
  }

  void advance_queue(std::int32_t queue) {
    const auto& entries = index_.program.queues[queue];
    const auto length = static_cast<std::int32_t>(entries.size());
    auto& head = heads_[queue];
    while (head < length * steps_) {
      if (!execute(entries[head % length], head / length, queue)) return;
      ++head;
    }
    if (withhold_ == Withhold::kNothing) return;
    for (const auto instruction : entries) signal_forever(instruction);
  }

  void advance_node(std::int32_t actor) {
    if (heads_[actor]) return;
    const auto instructions = static_cast<std::int32_t>(count());
    const auto step = actor / instructions;
    if (!execute(actor % instructions, step, actor)) return;
    heads_[actor] = 1;
    if (step == steps_ - 1) signal_forever(actor % instructions);
  }

  // Whether the instruction could run to its end; if not, ``actor`` is woken when that may have
  // changed.
  bool execute(std::int32_t instruction, std::int32_t step, std::int32_t actor) {
    const auto& synchronisation = index_.program.instructions[instruction];
    for (const auto& wait : synchronisation.waits) {
      if (wait.barrier < 0 || counters_[wait.barrier] >= threshold(wait, step)) continue;
      barrier_waiters_[wait.barrier].push_back({threshold(wait, step), actor});
      return false;
    }
    reached_header[number(instruction, step)] = 1;
    if (synchronisation.writes_early) reached_writes[number(instruction, step)] = 1;
    for (const auto group : tags_.needs[instruction]) {
      if (complete(group, step)) continue;
      group_waiters_[group_number(group, step)].push_back(actor);
      return false;
    }
    reached_writes[number(instruction, step)] = 1;
    const bool is_withheld =
        withhold_ != Withhold::kNothing && withheld_ == Node{instruction, step};
    if (is_withheld && withhold_ == Withhold::kReads && !synchronisation.reads_late) return false;
    for (const auto group : tags_.memberships[instruction]) {
      ++group_counts_[group_number(group, step)];
      if (complete(group, step)) {
        auto& waiters = group_waiters_[group_number(group, step)];
        ready_.insert(ready_.end(), waiters.begin(), waiters.end());
        waiters.clear();
      }
    }
    if (is_withheld) return false;
    if (synchronisation.signal >= 0) {
      if (counters_[synchronisation.signal] < kForever) ++counters_[synchronisation.signal];
      wake(synchronisation.signal);
    }
    order.push_back(instruction);
    return true;
  }

  void signal_forever(std::int32_t instruction) {
    const auto barrier = index_.program.instructions[instruction].signal;
    if (barrier < 0 || counters_[barrier] == kForever) return;
    counters_[barrier] = kForever;
    wake(barrier);
  }

  void wake(std::int32_t barrier) {
    auto& waiters = barrier_waiters_[barrier];
    const auto value = counters_[barrier];
    const auto stay = std::partition(waiters.begin(), waiters.end(),
                                     [value](const Waiter& w) { return w.threshold > value; });
    for (auto waiter = stay; waiter != waiters.end(); ++waiter) ready_.push_back(waiter->actor);
    waiters.erase(stay, waiters.end());
  }

  const Index& index_;
  const TagGroups& tags_;
  const int steps_;
  Node withheld_;
  Withhold withhold_ = Withhold::kNothing;
  std::vector<std::int64_t> counters_;
  std::vector<std::vector<Waiter>> barrier_waiters_;
  std::vector<std::int32_t> group_counts_;
  std::vector<Instructions> group_waiters_;
  std::vector<std::int32_t> heads_;  // by queue: entries finished; by node when dynamic
  Instructions ready_;
};

// ---- The fast rule. Nodes enter in an order of execution; questions are about the last one.

class Order {
 public:
  virtual ~Order() = default;
  virtual void enter(Node node) = 0;
  // Whether ``node`` was over before the current node's header waits were satisfied, by these waits
  // alone,
  virtual bool over_before_earlier_reads(Node node) = 0;
  // by them and the queue,
  virtual bool over_before_reads(Node node) const = 0;
  // before the current node may write,
  virtual bool over_before_writes(Node node) const = 0;
  // and whether at least its reads were.
  virtual bool read_before_writes(Node node) const = 0;
  // Whether all signals of the first step come before any of the second, as the fast rule assumed.
  virtual bool steps_are_apart(std::int32_t barrier) const = 0;
};

// Static queues. A clock holds, for every queue, how many of its entries (of all steps) are over.
class QueueOrder final : public Order {
 public:
  QueueOrder(const Index& index, const TagGroups& tags, const std::vector<char>& trusted)
      : index_(index),
        tags_(tags),
        trusted_(trusted),
        queues_(index.program.queues.size()),
        header_(queues_),
        header_read_(queues_) {
    const auto nodes = index.program.instructions.size() * kAnalysedSteps;
    over_.assign(nodes * queues_, 0);
    if (!tags.empty()) read_.assign(nodes * queues_, 0);
  }

  void enter(Node node) override {
    current_ = node;
    std::int32_t* const over = clock(over_, node);
    std::int32_t* const read = clock(read_, node);
    learn_from_header(node, over, read);
    if (!read) return;
    std::copy(over, over + queues_, header_.begin());
    std::copy(read, read + queues_, header_read_.begin());
    for (const auto group : tags_.needs[node.instruction])
      join(written(group, node.step), over, read);
  }

  bool over_before_earlier_reads(Node node) override {
    bool over = false;
    for_each_wait(current_, [&](const Joined& joined) { over |= has(joined.over.data(), node); });
    return over;
  }
  bool over_before_reads(Node node) const override {
    return has(tags_.empty() ? clock(over_, current_) : header_.data(), node);
  }
  bool over_before_writes(Node node) const override {
    return has(writes_early() ? header_.data() : clock(over_, current_), node);
  }
  bool read_before_writes(Node node) const override {
    if (writes_early()) return has(header_read_.data(), node);
    return has(clock(tags_.empty() ? over_ : read_, current_), node);
  }

  bool steps_are_apart(std::int32_t barrier) const override {
    const auto& signallers = index_.signallers[barrier];
    for (std::size_t i = 0; i < signallers.size(); ++i) {
      const auto queue = index_.places[signallers[i]].queue;
      if (i > 0 && index_.places[signallers[i - 1]].queue == queue) continue;
      const std::int32_t* const over = clock(over_, {signallers[i], 1});
      for (std::size_t j = 0; j < signallers.size(); ++j)
        if (index_.places[signallers[j]].queue != queue && !has(over, {signallers[j], 0}))
          return false;
    }
    return true;
  }

 private:
  struct Joined {
    std::vector<std::int32_t> over, read;
  };

  bool writes_early() const {
    return !tags_.empty() && index_.program.instructions[current_.instruction].writes_early;
  }

  void learn_from_header(Node node, std::int32_t* over, std::int32_t* read) {
    // What the entry before it in the queue knew, and that it is over.
    const auto queue = index_.places[node.instruction].queue;
    if (const Node before = previous(node)) {
      merge(over, clock(over_, before));
      if (read) merge(read, clock(read_, before));
    }
    over[queue] = position(node) - 1;
    if (read) read[queue] = position(node) - 1;
    // What the waits tell.
    for_each_wait(node, [&](const Joined& joined) { join(joined, over, read); });
  }

  // Calls visit(what is known when the wait is satisfied) for the waits of a node's header.
  template <typename Visit>
  void for_each_wait(Node node, Visit visit) {
    for (const auto& wait : index_.program.instructions[node.instruction].waits) {
      if (wait.barrier < 0 || !trusted_[wait.barrier]) continue;
      const auto all = index_.signals(wait.barrier);
      if (wait.target > 0) visit(signalled(wait.barrier, node.step, wait.target));
      if (wait.target < all && node.step > 0) visit(signalled(wait.barrier, node.step - 1, all));
    }
  }

  // Number of the node in its queue, counted from 1 over all steps.
  std::int32_t position(Node node) const {
    const auto place = index_.places[node.instruction];
    const auto length = static_cast<std::int32_t>(index_.program.queues[place.queue].size());
    return node.step * length + place.position + 1;
  }
  Node previous(Node node) const {
    const auto place = index_.places[node.instruction];
    const auto& entries = index_.program.queues[place.queue];
    if (place.position > 0) return {entries[place.position - 1], node.step};
    return node.step > 0 ? Node{entries.back(), node.step - 1} : Node{};
  }
  bool has(const std::int32_t* clock, Node node) const {
    return clock[index_.places[node.instruction].queue] >= position(node);
  }
  std::size_t offset(Node node) const {
    const auto count = index_.program.instructions.size();
    return (static_cast<std::size_t>(node.step) * count +
            static_cast<std::size_t>(node.instruction)) *
           queues_;
  }
  std::int32_t* clock(std::vector<std::int32_t>& clocks, Node node) const {
    return clocks.empty() ? nullptr : clocks.data() + offset(node);
  }
  const std::int32_t* clock(const std::vector<std::int32_t>& clocks, Node node) const {
    return clocks.data() + offset(node);
  }
  void merge(std::int32_t* into, const std::int32_t* from) const {
    for (std::size_t i = 0; i < queues_; ++i) into[i] = std::max(into[i], from[i]);
  }
  void join(const Joined& joined, std::int32_t* over, std::int32_t* read) const {
    merge(over, joined.over.data());
    if (read) merge(read, joined.read.data());
  }
  void raise(std::vector<std::int32_t>& clock, Node node) const {
    auto& entry = clock[static_cast<std::size_t>(index_.places[node.instruction].queue)];
    entry = std::max(entry, position(node));
  }
  Joined empty() const {
    Joined joined{std::vector<std::int32_t>(queues_), {}};
    if (!read_.empty()) joined.read.resize(queues_);
    return joined;
  }

  // What is known when ``barrier`` has been signalled ``target`` times in a step: with N signals, n
  // of them in one queue, at least the first target - (N - n) of that queue are over.
  const Joined& signalled(std::int32_t barrier, std::int32_t step, std::int64_t target) {
    const auto [entry, is_new] = by_wait_.try_emplace(
        (std::uint64_t(barrier) << 34) | (std::uint64_t(target) << 1) | std::uint64_t(step));
    if (!is_new) return entry->second;
    Joined joined = empty();
    const auto& signallers = index_.signallers[barrier];
    const auto spare = index_.signals(barrier) - target;
    for (std::size_t begin = 0, end; begin < signallers.size(); begin = end) {
      const auto queue = index_.places[signallers[begin]].queue;
      for (end = begin; end < signallers.size() && index_.places[signallers[end]].queue == queue;)
        ++end;
      const auto sure = static_cast<std::int64_t>(end - begin) - spare;
      if (sure <= 0) continue;
      const Node last{signallers[begin + static_cast<std::size_t>(sure) - 1], step};
      merge(joined.over.data(), clock(over_, last));
      raise(joined.over, last);
      if (read_.empty()) continue;
      merge(joined.read.data(), clock(read_, last));
      raise(joined.read, last);
    }
    return entry->second = std::move(joined);
  }

  const Joined& written(std::int32_t group, std::int32_t step) {
    const auto [entry, is_new] = by_group_.try_emplace(2 * group + step);
    if (!is_new) return entry->second;
    Joined joined = empty();
    for (const auto writer : tags_.members[group]) {
      const Node node{writer, step};
      merge(joined.over.data(), clock(over_, node));
      merge(joined.read.data(), clock(read_, node));
      if (!index_.program.instructions[writer].reads_late) raise(joined.read, node);
    }
    return entry->second = std::move(joined);
  }

  const Index& index_;
  const TagGroups& tags_;
  const std::vector<char>& trusted_;
  const std::size_t queues_;
  Node current_;
  // The current node's clocks without tagged words.
  std::vector<std::int32_t> header_, header_read_;
  std::vector<std::int32_t> over_, read_;  // by node and queue; read_ is empty without tags
  std::unordered_map<std::uint64_t, Joined> by_wait_;
  std::unordered_map<std::int32_t, Joined> by_group_;
};

// A dynamic queue. An *event* is that all signals of a barrier, or all words of a group of tagged
// writers, of one step are there; a node knows the set of events before it. Nodes that wait for the
// same know the same and share a set.
class EventOrder final : public Order {
 public:
  EventOrder(const Index& index, const TagGroups& tags, const std::vector<char>& trusted)
      : index_(index),
        tags_(tags),
        trusted_(trusted),
        events_((index.signallers.size() + tags.members.size()) * kAnalysedSteps),
        words_((events_ + 63) / 64),
        knowledge_of_(index.program.instructions.size() * kAnalysedSteps, 0) {}

  void enter(Node node) override {
    current_ = node;
    std::vector<std::uint32_t> before;
    for (const auto& wait : index_.program.instructions[node.instruction].waits) {
      if (wait.barrier < 0 || !trusted_[wait.barrier]) continue;
      const bool all = wait.target == index_.signals(wait.barrier);
      if (all && wait.target > 0) before.push_back(barrier_event(wait.barrier, node.step));
      if (!all && node.step > 0) before.push_back(barrier_event(wait.barrier, node.step - 1));
    }
    std::sort(before.begin(), before.end());
    const auto of_header = before.size();
    for (const auto group : tags_.needs[node.instruction])
      before.push_back(group_event(group, node.step));
    std::sort(before.begin() + static_cast<std::ptrdiff_t>(of_header), before.end());
    const auto [entry, is_new] =
        by_events_.try_emplace(before, static_cast<std::uint32_t>(knowledge_.size()));
    knowledge_of_[number(node)] = entry->second;
    if (!is_new) return;
    Knowledge knowledge{Set(words_), Set(words_), Set(words_), Set(words_)};
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (i == of_header) {
        knowledge.header = knowledge.over;
        knowledge.header_read = knowledge.read;
      }
      const auto& joined = join(before[i]);
      unite(knowledge.over, joined.over);
      unite(knowledge.read, joined.read);
    }
    if (of_header == before.size()) {
      knowledge.header = knowledge.over;
      knowledge.header_read = knowledge.read;
    }
    knowledge_.push_back(std::move(knowledge));
  }

  bool over_before_earlier_reads(Node node) override { return over_before_reads(node); }
  bool over_before_reads(Node node) const override {
    return has_signal(knowledge_[knowledge_of_[number(current_)]].header, node);
  }
  bool over_before_writes(Node node) const override {
    const auto& knowledge = knowledge_[knowledge_of_[number(current_)]];
    return has_signal(writes_early() ? knowledge.header : knowledge.over, node);
  }
  bool read_before_writes(Node node) const override {
    const auto& knowledge = knowledge_[knowledge_of_[number(current_)]];
    const auto& known = writes_early() ? knowledge.header_read : knowledge.read;
    if (has_signal(known, node)) return true;
    if (index_.program.instructions[node.instruction].reads_late) return false;
    const auto& groups = tags_.memberships[node.instruction];
    return std::any_of(groups.begin(), groups.end(), [&](std::int32_t group) {
      return has(known, group_event(group, node.step));
    });
  }

  bool steps_are_apart(std::int32_t barrier) const override {
    const auto& signallers = index_.signallers[barrier];
    return std::all_of(signallers.begin(), signallers.end(), [&](std::int32_t instruction) {
      return has(knowledge_[knowledge_of_[number({instruction, 1})]].over,
                 barrier_event(barrier, 0));
    });
  }

 private:
  using Set = std::vector<std::uint64_t>;
  struct Knowledge {
    // Before the reads; before the writes; of which at least the reads are over, then and before.
    Set header, over, read, header_read;
  };
  struct Joined {
    Set over, read;
  };

  bool writes_early() const {
    return index_.program.instructions[current_.instruction].writes_early;
  }
  std::size_t number(Node node) const {
    return static_cast<std::size_t>(node.step) * index_.program.instructions.size() +
           static_cast<std::size_t>(node.instruction);
  }
  std::uint32_t barrier_event(std::int32_t barrier, std::int32_t step) const {
    return static_cast<std::uint32_t>(kAnalysedSteps * barrier + step);
  }
  std::uint32_t group_event(std::int32_t group, std::int32_t step) const {
    return barrier_event(static_cast<std::int32_t>(index_.signallers.size()) + group, step);
  }
  static bool has(const Set& set, std::uint32_t event) {
    return set[event / 64] >> (event % 64) & 1;
  }
  static void unite(Set& into, const Set& from) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] |= from[i];
  }
  bool has_signal(const Set& set, Node node) const {
    const auto barrier = index_.program.instructions[node.instruction].signal;
    return barrier >= 0 && has(set, barrier_event(barrier, node.step));
  }

  const Joined& join(std::uint32_t event) {
    const auto [entry, is_new] = joined_.try_emplace(event);
    if (!is_new) return entry->second;
    Joined& joined = entry->second;
    joined = {Set(words_), Set(words_)};
    const auto step = static_cast<std::int32_t>(event % kAnalysedSteps);
    const auto source = event / kAnalysedSteps;
    const bool is_barrier = source < index_.signallers.size();
    const auto& sources =
        is_barrier ? index_.signallers[source] : tags_.members[source - index_.signallers.size()];
    std::uint32_t last = std::numeric_limits<std::uint32_t>::max();
    for (const auto instruction : sources) {
      const auto known = knowledge_of_[number({instruction, step})];
      if (known == last) continue;
      last = known;
      unite(joined.over, knowledge_[known].over);
      unite(joined.read, knowledge_[known].read);
    }
    const auto bit = std::uint64_t{1} << (event % 64);
    if (is_barrier) joined.over[event / 64] |= bit;
    joined.read[event / 64] |= bit;
    return joined;
  }

  const Index& index_;
  const TagGroups& tags_;
  const std::vector<char>& trusted_;
  const std::size_t events_, words_;
  Node current_;
  std::vector<std::uint32_t> knowledge_of_;  // by node
  std::vector<Knowledge> knowledge_;
  std::map<std::vector<std::uint32_t>, std::uint32_t> by_events_;
  std::unordered_map<std::uint32_t, Joined> joined_;
};

// ---- Races: last writer of each cell and its readers since, over two steps.

// The exact rule, one execution per withheld access, remembered.
class ExactOrder {
 public:
  ExactOrder(const Index& index, const TagGroups& tags) : index_(index), tags_(tags) {}

  // When an access is made: at the waits of the header, as an entry of the queue, or with the
  // tagged words that it reads there.
  enum Point { kEarlierRead, kRead, kWrite };

  static Point point(const Access& access) {
    return access.write ? kWrite : access.earlier ? kEarlierRead : kRead;
  }

  // Whether an access of ``first`` is over before one of ``second`` in every execution.
  bool ordered(Node first, bool first_writes, Node second, Point point) {
    const auto count = index_.program.instructions.size();
    const auto key = 2 * static_cast<std::size_t>(first.instruction) + (first_writes ? 1 : 0);
    const auto [entry, is_new] = reached_.try_emplace(key);
    if (is_new) {
      const auto steps = std::clamp<std::size_t>(kNodes / (count + 1), 4, 64);
      executed_ += static_cast<double>(steps) * static_cast<double>(count);
      if (executed_ > kMaxExecuted) throw_unbounded(first, second);
      if (reached_.size() * 3 * kAnalysedSteps * count > kMaxKept) {
        reached_.clear();
        return ordered(first, first_writes, second, point);
      }
      Execution execution(index_, tags_, static_cast<int>(steps));
      execution.run({first.instruction, 0},
                    first_writes ? Execution::Withhold::kWrites : Execution::Withhold::kReads);
      execution.reached_header.resize(kAnalysedSteps * count);
      execution.reached_writes.resize(kAnalysedSteps * count);
      std::vector<char> satisfied(kAnalysedSteps * count);
      for (std::size_t number = 0; number < satisfied.size(); ++number)
        satisfied[number] = execution.waits_satisfied(
            {static_cast<std::int32_t>(number % count), static_cast<std::int32_t>(number / count)});
      entry->second = {std::move(satisfied), std::move(execution.reached_header),
                       std::move(execution.reached_writes)};
    }
    // After any number of whole steps all is as in the beginning: only the distance of steps
    // counts.
    const auto& reached = entry->second[point];
    const auto distance = static_cast<std::size_t>(second.step - first.step);
    return !reached[distance * count + static_cast<std::size_t>(second.instruction)];
  }

 private:
  static constexpr std::size_t kNodes = 400'000;

  [[noreturn]] void throw_unbounded(Node first, Node second) const {
    char text[256];
    std::snprintf(text, sizeof(text),
                  "the order of instructions %d and %d, and of others before them, follows from no "
                  "barrier or tagged word directly: to decide it takes the execution of more than "
                  "%.0f instructions; let readers wait for what they read",
                  first.instruction, second.instruction, kMaxExecuted);
    throw std::length_error(text);
  }

  const Index& index_;
  const TagGroups& tags_;
  double executed_ = 0;                                                        // instructions
  std::unordered_map<std::size_t, std::array<std::vector<char>, 3>> reached_;  // by point
};

struct Visit {
  Node node;
  std::int64_t access = -1;
};

// Reads of the same region between the same writes: what holds for one of them holds for all.
struct Reading {
  std::vector<Visit> writers;  // whose results they read
  std::vector<Visit> readers;
  bool current = true;        // nothing of the region has been written since
  std::uint64_t checked = 0;  // number of the last write that was compared with the readers
};

struct Cell {
  Visit writer;
  Visit earlier_writer;                 // of the first step, once the second has written
  std::vector<std::uint32_t> readings;  // since the writer
  bool settled = false;  // written in the second step: what follows is as in the first
};

class RaceSearch {
 public:
  RaceSearch(const Index& index, ExactOrder& exact) : index_(index), exact_(exact) {
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

  // Visits the accesses of ``node``, which has entered ``order``. Returns a race, if there is one.
  std::optional<Finding> visit(Node node, Order& order) {
    const auto begin = index_.first_access[node.instruction];
    const auto end = index_.first_access[node.instruction + 1];
    for (const bool writes : {false, true})
      for (auto number = begin; number < end; ++number)
        if (index_.program.accesses[number].write == writes)
          if (auto race = visit_access({node, static_cast<std::int64_t>(number)}, order))
            return race;
    return std::nullopt;
  }

  const std::optional<Finding>& unwritten() const { return unwritten_; }

 private:
  // The plain or the indexed accesses of a tensor.
  struct Surface {
    Grid grid;
    std::vector<Cell> cells;
    std::vector<Reading> readings;
    std::map<std::array<std::int32_t, 4>, std::uint32_t> latest;  // reading of each region
    bool mixed = false;  // the tensor is accessed both ways
    std::vector<Visit> visits;
  };

  const Access& access(const Visit& visit) const { return index_.program.accesses[visit.access]; }
  static std::size_t surface_of(const Access& access) {
    return 2 * static_cast<std::size_t>(access.tensor) + (access.indexed ? 1 : 0);
  }
  Surface& surface(const Access& access) { return surfaces_[surface_of(access)]; }

  std::optional<Finding> visit_access(const Visit& now, Order& order) {
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
                              Order& order, const TensorTraits& traits) {
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

  // What the step before wrote must be over. No other write conflicts: see the header.
  std::optional<Finding> read_earlier(Surface& surface, const CellRange& range, const Visit& now,
                                      Order& order) {
    std::optional<Finding> race;
    if (now.node.step == 0) return race;
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

  // The first write of a cell, wherever it stands in the step; -1 if there is none. `like`: an
  // access of the same surface.
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
                               Order& order, const TensorTraits& traits) {
    std::optional<Finding> race;
    Node before;
    ++writes_;
    surface.grid.for_each(range, [&](std::size_t place) {
      auto& cell = surface.cells[place];
      if (cell.settled) return true;
      // Who has read a tagged word has waited for its writer.
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

  // Plain against indexed accesses of one tensor: their rows cannot be compared.
  std::optional<Finding> compare(const Visit& now, Order& order) {
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

  std::optional<Finding> check(const Visit& before, const Visit& now, Order& order) {
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
  std::vector<Surface> surfaces_;  // by tensor: plain, indexed
  std::uint64_t writes_ = 0;
  std::optional<Finding> unwritten_;
};

// ---- The whole.

// An order in which one step runs, or the deadlock. A dynamic queue is run by one worker that takes
// the entries in order: if that one never waits in vain, no number of workers does.
std::optional<Finding> run_one_step(const Index& index, const TagGroups& tags,
                                    Instructions& order) {
  ProgramView serial;
  if (index.program.dynamic) {
    serial = index.program;
    serial.dynamic = false;
  }
  const Index serial_index(index.program.dynamic ? serial : index.program);
  Execution execution(serial_index, tags, 1);
  execution.run({}, Execution::Withhold::kNothing);
  order = std::move(execution.order);
  Finding finding{FindingKind::kDeadlock, execution.blocked()};
  if (finding.blocked.empty()) return std::nullopt;
  return finding;
}

std::unique_ptr<Order> make_order(const Index& index, const TagGroups& tags,
                                  const std::vector<char>& trusted) {
  if (index.program.dynamic) return std::make_unique<EventOrder>(index, tags, trusted);
  return std::make_unique<QueueOrder>(index, tags, trusted);
}

// A race, or what is read before it is written. `sequence` is an order in which a step runs.
std::optional<Finding> find_race(const Index& index, const TagGroups& tags,
                                 const Instructions& sequence) {
  const auto& program = index.program;
  std::vector<char> trusted(index.signallers.size(), 0);  // barriers that are waited for
  for (const auto& instruction : program.instructions)
    for (const auto& wait : instruction.waits)
      if (wait.barrier >= 0) trusted[wait.barrier] = 1;

  // A race found while trust is too large is one nevertheless, and the most direct: the exact rule
  // has confirmed it. No race found means no more until trust has been taken from barriers whose
  // steps overlap, and none is left of those.
  ExactOrder exact(index, tags);
  for (;;) {
    const auto order = make_order(index, tags, trusted);
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

}  // namespace

Analysis analyse(const ProgramView& program) {
  Analysis result;
  const Index index(program);
  const TagGroups tags(program, result.fault);
  if (result.fault) return result;
  Instructions sequence;
  if ((result.fault = run_one_step(index, tags, sequence))) return result;
  if (!program.dynamic) {
    // First without the order of the queues: programs of the compiler need none.
    ProgramView unordered = program;
    unordered.dynamic = true;
    unordered.queues = {sequence};
    result.fault = find_race(Index(unordered), tags, sequence);
    if (!result.fault || result.fault->kind == FindingKind::kUnwritten) return result;
    result.needs_queue_order = true;
  }
  result.fault = find_race(index, tags, sequence);
  return result;
}

}  // namespace megavm

// ---- Python.

namespace py = pybind11;

namespace {

using namespace megavm;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Throws where a number names nothing: everything that the analysis takes for granted.
void check_numbers(std::int32_t barriers, const Array<std::int32_t>& queues,
                   const Array<std::int64_t>& lengths, const Array<std::int64_t>& waits,
                   const Array<std::int64_t>& signals, const Array<std::int64_t>& accesses,
                   const Array<bool>& traits) {
  const auto count = static_cast<std::int64_t>(signals.size());
  const auto require = [](bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
  };
  require(barriers >= 0, "a negative number of barriers");
  std::int64_t entries = 0;
  for (py::ssize_t i = 0; i < lengths.size(); ++i) {
    require(lengths.data()[i] >= 0, "a queue of negative length");
    entries += lengths.data()[i];
  }
  require(entries == queues.size() && entries == count, "queues hold each instruction once");
  std::vector<char> seen(static_cast<std::size_t>(count), 0);
  for (py::ssize_t i = 0; i < queues.size(); ++i) {
    const std::int64_t entry = queues.data()[i];
    require(entry >= 0 && entry < count && !seen[static_cast<std::size_t>(entry)],
            "queues hold each instruction once");
    seen[static_cast<std::size_t>(entry)] = 1;
  }
  std::vector<std::int64_t> signalled(static_cast<std::size_t>(barriers), 0);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto barrier = signals.data()[i];
    require(barrier >= -1 && barrier < barriers, "a signal names no barrier");
    if (barrier >= 0) ++signalled[static_cast<std::size_t>(barrier)];
  }
  for (std::int64_t i = 0; i < count * kMaxWaits; ++i) {
    const auto barrier = waits.data()[2 * i], target = waits.data()[2 * i + 1];
    require(barrier >= -1 && barrier < barriers, "a wait names no barrier");
    require(barrier < 0 || (target >= 0 && target <= signalled[static_cast<std::size_t>(barrier)]),
            "a wait for more than a step signals");
  }
  std::int64_t before = 0;
  for (py::ssize_t i = 0; i < accesses.shape(0); ++i) {
    const std::int64_t* a = accesses.data() + 9 * i;
    require(a[0] >= before && a[0] < count, "accesses are sorted by instruction");
    before = a[0];
    require(a[1] >= 0 && a[1] < traits.shape(0), "an access names no tensor");
    require(a[2] >= 0 && a[2] < a[3] && a[4] >= 0 && a[4] < a[5], "an access of nothing");
  }
}

// ``queues`` holds instruction numbers one queue after the other, ``lengths`` how many belong to
// each.
// ``waits`` is [n, 3, 2], ``accesses`` [m, 9]: the members of Access in order; ``traits`` [t, 3].
py::tuple analyse_arrays(std::int32_t barriers, bool dynamic, const Array<std::int32_t>& queues,
                         const Array<std::int64_t>& lengths, const Array<std::int64_t>& waits,
                         const Array<std::int64_t>& signals, const Array<bool>& orders,
                         const Array<std::int64_t>& accesses, const Array<bool>& traits) {
  if (waits.ndim() != 3 || waits.shape(1) != kMaxWaits || waits.shape(2) != 2 ||
      waits.shape(0) != signals.size() || orders.ndim() != 2 || orders.shape(0) != signals.size() ||
      orders.shape(1) != 2 || accesses.ndim() != 2 || accesses.shape(1) != 9 ||
      traits.ndim() != 2 || traits.shape(1) != 3)
    throw std::invalid_argument("arrays of the wrong shape");
  check_numbers(barriers, queues, lengths, waits, signals, accesses, traits);
  ProgramView program;
  program.barriers = barriers;
  program.dynamic = dynamic;
  const std::int32_t* entry = queues.data();
  for (py::ssize_t queue = 0; queue < lengths.size(); ++queue) {
    program.queues.emplace_back(entry, entry + lengths.at(queue));
    entry += lengths.at(queue);
  }
  program.instructions.resize(static_cast<std::size_t>(signals.size()));
  for (std::size_t i = 0; i < program.instructions.size(); ++i) {
    const std::int64_t* wait = waits.data() + i * 2 * kMaxWaits;
    for (auto& target : program.instructions[i].waits) {
      target = {static_cast<std::int32_t>(wait[0]), wait[1]};
      wait += 2;
    }
    program.instructions[i].signal = static_cast<std::int32_t>(signals.data()[i]);
    program.instructions[i].reads_late = orders.data()[2 * i];
    program.instructions[i].writes_early = orders.data()[2 * i + 1];
  }
  program.accesses.resize(static_cast<std::size_t>(accesses.shape(0)));
  for (std::size_t i = 0; i < program.accesses.size(); ++i) {
    const std::int64_t* a = accesses.data() + 9 * i;
    program.accesses[i] = {static_cast<std::int32_t>(a[0]),
                           static_cast<std::int32_t>(a[1]),
                           a[2],
                           a[3],
                           a[4],
                           a[5],
                           a[6] != 0,
                           a[7] != 0,
                           a[8] != 0};
  }
  program.tensors.resize(static_cast<std::size_t>(traits.shape(0)));
  for (std::size_t i = 0; i < program.tensors.size(); ++i) {
    const bool* t = traits.data() + 3 * i;
    program.tensors[i] = {t[0], t[1], t[2]};
  }
  Analysis analysis;
  {
    py::gil_scoped_release released;
    analysis = analyse(program);
  }
  const auto& finding = analysis.fault;
  if (!finding) return py::make_tuple(py::none(), analysis.needs_queue_order);
  constexpr const char* kNames[] = {"deadlock", "unordered", "unwritten", "tag_unreachable",
                                    "tag_ambiguous"};
  py::list blocked;
  for (const auto& b : finding->blocked)
    blocked.append(py::make_tuple(b.instruction, b.barrier, b.value, b.target, b.missing));
  return py::make_tuple(
      py::make_tuple(kNames[static_cast<int>(finding->kind)], finding->first_access,
                     finding->first_step, finding->second_access, finding->second_step, blocked),
      analysis.needs_queue_order);
}

}  // namespace

void bind_happens_before(py::module_& module) {
  module.def("analyse", &analyse_arrays, py::arg("barriers"), py::arg("dynamic"), py::arg("queues"),
             py::arg("lengths"), py::arg("waits"), py::arg("signals"), py::arg("orders"),
             py::arg("accesses"), py::arg("traits"));
}
