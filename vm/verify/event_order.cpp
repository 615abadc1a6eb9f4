#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <map>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "vm/verify/fast_order.hpp"

namespace megavm::verify {
namespace {

constexpr std::size_t kMaxSetBytes = std::size_t{4} << 30;  // of all sets of events

// An *event* of a step: all signals of a barrier have been given, or all words of a group of tagged
// writers have been written. A node knows the set of events that come before it. Nodes that wait
// for the same events know the same and share a set.
class EventOrder final : public FastOrder {
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
    check_size();
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
  // Sets of events. After an event of header or over, its signallers are over; after one of
  // header_read or read, at least the reads of its signallers or writers are.
  struct Knowledge {
    Set header, header_read;  // before the reads of the node
    Set over, read;           // before its writes
  };
  struct Joined {
    Set over, read;
  };

  void check_size() const {
    const auto sets = 4 * knowledge_.size() + 2 * joined_.size();
    if (sets * words_ * sizeof(std::uint64_t) <= kMaxSetBytes) return;
    char text[256];
    std::snprintf(
        text, sizeof(text),
        "the program's %zu instructions wait for %zu different sets of its %zu events in "
        "two steps, and the analysis may keep %zu GiB of such sets: let more instructions "
        "wait for the same",
        index_.program.instructions.size(), knowledge_.size(), events_, kMaxSetBytes >> 30);
    throw std::length_error(text);
  }

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

  // What follows from an event.
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

}  // namespace

std::unique_ptr<FastOrder> make_event_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted) {
  return std::make_unique<EventOrder>(index, tags, trusted);
}

}  // namespace megavm::verify
