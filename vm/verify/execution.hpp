// Greedy execution: run every instruction that can run, for a number of steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "vm/verify/happens_before.hpp"
#include "vm/verify/index.hpp"
#include "vm/verify/tag_groups.hpp"

namespace megavm::verify {

class Execution {
 public:
  // The accesses that the withheld instruction does not finish. It never signals. Its words are
  // tagged nevertheless if its writes are withheld, or if it reads late.
  enum class Withhold { kNothing, kWrites, kReads };

  Execution(const Index& index, const TagGroups& tags, int steps);

  // Runs to the end. If an access is withheld, an instruction that reaches the last step is taken
  // to signal forever. That is sound: it only lets more instructions run, and instructions that
  // the withheld one blocks stop long before the last step.
  void run(Node withheld, Withhold withhold);

  // The heads of static queues that have not finished the first step.
  std::vector<Blocked> blocked() const;

  // Whether all signals of earlier steps to the barriers of the node's header have come at the end,
  // even if its queue did not reach the node.
  bool earlier_steps_signalled(Node node) const;

  // By step * instructions + instruction: whether the node's queue reached it and the waits of its
  // header were satisfied; whether it could write, too.
  std::vector<char> reached_header, reached_writes;
  Instructions order;  // the instructions, in the order in which they finished

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
  bool finished(std::int32_t instruction, std::int32_t step) const;
  // The condition that keeps the instruction from running.
  Blocked describe(std::int32_t instruction, std::int32_t step) const;

  void advance_queue(std::int32_t queue);
  void advance_node(std::int32_t actor);
  // Returns whether the instruction could run to its end; if not, wakes the actor once that may
  // have changed.
  bool execute(std::int32_t instruction, std::int32_t step, std::int32_t actor);
  void signal_forever(std::int32_t instruction);
  void wake(std::int32_t barrier);

  const Index& index_;
  const TagGroups& tags_;
  const int steps_;
  Node withheld_;
  Withhold withhold_ = Withhold::kNothing;
  std::vector<std::int64_t> counters_;  // by barrier
  std::vector<std::vector<Waiter>> barrier_waiters_;
  std::vector<std::int32_t> group_counts_;   // by group and step: writers that have written
  std::vector<Instructions> group_waiters_;  // likewise: actors
  // An actor is a static queue, or a node of a dynamic queue (numbered as in reached_header).
  std::vector<std::int32_t> heads_;  // by actor: entries of the queue finished, node finished
  std::vector<std::int32_t> ready_;  // actors
};

}  // namespace megavm::verify
