#include "vm/verify/exact_order.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "vm/verify/execution.hpp"

namespace megavm::verify {
namespace {

// Compiled programs stay below a hundredth of each limit.
constexpr double kMaxExecuted = 4e9;        // instructions
constexpr std::size_t kMaxKept = 1u << 29;  // bytes of results

constexpr std::size_t kNodes = 400'000;  // of one execution; bounds its steps

}  // namespace

bool ExactOrder::ordered(Node first, bool first_writes, Node second, Point point) {
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
    entry->second = execute_without(first, first_writes, steps);
  }
  // Every whole step restores the state of the beginning, so only the distance in steps counts.
  const auto& reached = entry->second[point];
  const auto distance = static_cast<std::size_t>(second.step - first.step);
  return !reached[distance * count + static_cast<std::size_t>(second.instruction)];
}

// The nodes that the analysed steps reach if an access of `first`, in the first step, is withheld.
ExactOrder::Reached ExactOrder::execute_without(Node first, bool first_writes,
                                                std::size_t steps) const {
  const auto count = index_.program.instructions.size();
  Execution execution(index_, tags_, static_cast<int>(steps));
  execution.run({first.instruction, 0},
                first_writes ? Execution::Withhold::kWrites : Execution::Withhold::kReads);
  execution.reached_header.resize(kAnalysedSteps * count);
  execution.reached_writes.resize(kAnalysedSteps * count);
  std::vector<char> earlier(kAnalysedSteps * count);
  for (std::size_t number = 0; number < earlier.size(); ++number)
    earlier[number] = execution.earlier_steps_signalled(
        {static_cast<std::int32_t>(number % count), static_cast<std::int32_t>(number / count)});
  return {std::move(earlier), std::move(execution.reached_header),
          std::move(execution.reached_writes)};
}

void ExactOrder::throw_unbounded(Node first, Node second) const {
  char text[256];
  std::snprintf(text, sizeof(text),
                "the order of instructions %d and %d, and of others before them, follows from no "
                "barrier or tagged word directly: to decide it takes the execution of more than "
                "%.0f instructions; let readers wait for what they read",
                first.instruction, second.instruction, kMaxExecuted);
  throw std::length_error(text);
}

}  // namespace megavm::verify
