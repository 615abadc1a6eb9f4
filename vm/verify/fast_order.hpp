// The fast rule: which nodes are over before which, by what their waits imply. Nodes enter in an
// order of execution; a question is about the node that entered last.
#pragma once

#include <cstddef>
#include <cstdint>
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
  virtual bool over_before_earlier_reads(Node node) = 0;
  // The same, by these waits and the queue.
  virtual bool over_before_reads(Node node) const = 0;
  // Whether `node` is over before the current node may write.
  virtual bool over_before_writes(Node node) const = 0;
  // Whether at least the reads of `node` are over before the current node may write.
  virtual bool read_before_writes(Node node) const = 0;
  // Whether all signals of the first step come before any of the second, as the fast rule assumed.
  virtual bool steps_are_apart(std::int32_t barrier) const = 0;
};

// `trusted`, by barrier: whether waits for it order its signallers. The order keeps references to
// all three.
std::unique_ptr<FastOrder> make_queue_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted);  // static queues
std::unique_ptr<FastOrder> make_event_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted);  // a dynamic queue

}  // namespace megavm::verify
