#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

#include "vm/verify/fast_order.hpp"

namespace megavm::verify {
namespace {

// A *clock* of a node holds, for every queue, how many of its entries (over all steps) are known to
// be over.
class QueueOrder final : public FastOrder {
 public:
  QueueOrder(const Index& index, const TagGroups& tags, const std::vector<char>& trusted)
      : FastOrder(index, tags, trusted),
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

  std::size_t kind(Node node) const override { return number(node); }
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
  bool over_with_signals(std::int32_t barrier, std::int32_t step, Node node) override {
    return has(signalled(barrier, step, index_.signals(barrier)).over.data(), node);
  }

  // Two clocks: entries that are over, and entries whose reads at least are over.
  struct Joined {
    std::vector<std::int32_t> over, read;
  };

  bool writes_early() const {
    return !tags_.empty() && index_.program.instructions[current_.instruction].writes_early;
  }

  void learn_from_header(Node node, std::int32_t* over, std::int32_t* read) {
    // The entry before it in the queue is over, and so is all that this entry knew of.
    const auto queue = index_.places[node.instruction].queue;
    if (const Node before = previous(node)) {
      merge(over, clock(over_, before));
      if (read) merge(read, clock(read_, before));
    }
    over[queue] = position(node) - 1;
    if (read) read[queue] = position(node) - 1;
    // The waits add what their signallers knew.
    for_each_wait(node, [&](const Joined& joined) { join(joined, over, read); });
  }

  // Calls visit(what a satisfied wait implies) for the waits of a node's header.
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
  std::int32_t* clock(std::vector<std::int32_t>& clocks, Node node) const {
    return clocks.empty() ? nullptr : clocks.data() + number(node) * queues_;
  }
  const std::int32_t* clock(const std::vector<std::int32_t>& clocks, Node node) const {
    return clocks.data() + number(node) * queues_;
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

  // The accesses that are over after `target` signals of `barrier` in a step: of its N signallers,
  // n stand in one queue, and at least the first target - (N - n) of those are over.
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

  // The accesses that are over after all words of `group` in a step.
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

  const std::size_t queues_;
  // The clocks of the current node before its tagged words have arrived.
  std::vector<std::int32_t> header_, header_read_;
  // By node and queue: entries that are over; entries whose reads are over (empty without tags).
  std::vector<std::int32_t> over_, read_;
  std::unordered_map<std::uint64_t, Joined> by_wait_;
  std::unordered_map<std::int32_t, Joined> by_group_;
};

}  // namespace

std::unique_ptr<FastOrder> make_queue_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted) {
  return std::make_unique<QueueOrder>(index, tags, trusted);
}

}  // namespace megavm::verify
