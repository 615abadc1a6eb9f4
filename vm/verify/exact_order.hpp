// The exact rule: one execution per withheld access.
#pragma once

#include <array>
#include <cstddef>
#include <unordered_map>
#include <vector>

#include "vm/verify/happens_before.hpp"
#include "vm/verify/index.hpp"
#include "vm/verify/tag_groups.hpp"

namespace megavm::verify {

class ExactOrder {
 public:
  ExactOrder(const Index& index, const TagGroups& tags) : index_(index), tags_(tags) {}

  // When an access happens: once the signals of earlier steps have come that the waits of the
  // header count; once these waits are satisfied, in the instruction's turn of the queue; once the
  // tagged words that the instruction reads have arrived too.
  enum Point { kEarlierRead, kRead, kWrite };

  static Point point(const Access& access) {
    return access.write ? kWrite : access.earlier ? kEarlierRead : kRead;
  }

  // Whether an access of `first` is over before one of `second` in every execution. Throws
  // std::length_error if too many instructions would have to be executed to decide it.
  bool ordered(Node first, bool first_writes, Node second, Point point);

 private:
  using Reached = std::array<std::vector<char>, 3>;  // by point, then by step and instruction

  Reached execute_without(Node first, bool first_writes, std::size_t steps) const;
  [[noreturn]] void throw_unbounded(Node first, Node second) const;

  const Index& index_;
  const TagGroups& tags_;
  double executed_ = 0;                               // instructions
  std::unordered_map<std::size_t, Reached> reached_;  // by withheld access
};

}  // namespace megavm::verify
