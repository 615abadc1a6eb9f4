// The fast rule: which nodes are over before which, by what their waits imply. Nodes enter in an
// order of execution; a question is about the node that entered last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "vm/verify/index.hpp"
#include "vm/verify/tag_groups.hpp"

namespace megavm::verify {

class FastOrder {
 public:
  virtual ~FastOrder() = default;
  virtual void enter(Node node) = 0;
  // Nodes of the same kind are of the same step, and all questions below have the same answer for
  // them.
  virtual std::size_t kind(Node node) const = 0;
  // Whether `node` is over when all signals of earlier steps to the barriers in the header of the
  // current node have come.
  bool over_before_earlier_reads(Node node) {
    if (current_.step == 0) return false;
    const auto& waits = index_.program.instructions[current_.instruction].waits;
    return std::any_of(std::begin(waits), std::end(waits), [&](const WaitFor& wait) {
      return wait.barrier >= 0 && trusted_[wait.barrier] &&
             over_with_signals(wait.barrier, current_.step - 1, node);
    });
  }
  // The same, by the waits of the header and the queue.
  virtual bool over_before_reads(Node node) const = 0;
  // Whether `node` is over before the current node may write.
  virtual bool over_before_writes(Node node) const = 0;
  // Whether at least the reads of `node` are over before the current node may write.
  virtual bool read_before_writes(Node node) const = 0;
  // Whether all signals of the first step come before any of the second, as the fast rule assumed.
  virtual bool steps_are_apart(std::int32_t barrier) const = 0;

 protected:
  FastOrder(const Index& index, const TagGroups& tags, const std::vector<char>& trusted)
      : index_(index), tags_(tags), trusted_(trusted) {}

  // Whether `node` is over when all signals of a step to a barrier have come.
  virtual bool over_with_signals(std::int32_t barrier, std::int32_t step, Node node) = 0;

  std::size_t number(Node node) const {
    return static_cast<std::size_t>(node.step) * index_.program.instructions.size() +
           static_cast<std::size_t>(node.instruction);
  }

  const Index& index_;
  const TagGroups& tags_;
  const std::vector<char>& trusted_;
  Node current_;  // that entered last
};

// `trusted`, by barrier: whether waits for it order its signallers. The order keeps references to
// all three.
std::unique_ptr<FastOrder> make_queue_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted);  // static queues
std::unique_ptr<FastOrder> make_event_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted);  // a dynamic queue

}  // namespace megavm::verify
