// The program, indexed by instruction and by barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "vm/verify/happens_before.hpp"

namespace megavm::verify {

inline constexpr int kAnalysedSteps = 2;

using Instructions = std::vector<std::int32_t>;

// An instruction in one step.
struct Node {
  std::int32_t instruction = -1;
  std::int32_t step = 0;

  bool operator==(const Node& other) const {
    return instruction == other.instruction && step == other.step;
  }
  explicit operator bool() const { return instruction >= 0; }
};

struct Place {
  std::int32_t queue, position;
};

struct Index {
  explicit Index(const ProgramView& view);  // keeps a reference to the view

  // Number of signals of the barrier in one step.
  std::int64_t signals(std::int32_t barrier) const {
    return static_cast<std::int64_t>(signallers[barrier].size());
  }

  const ProgramView& program;
  std::vector<Place> places;  // by instruction
  // By barrier. The signallers of one queue are adjacent, in the order of the queue.
  std::vector<Instructions> signallers;
  std::vector<std::size_t> first_access;  // by instruction, and the number of accesses at the end
};

}  // namespace megavm::verify
