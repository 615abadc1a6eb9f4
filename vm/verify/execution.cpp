#include "vm/verify/execution.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

namespace megavm::verify {
namespace {

constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max() / 2;

}  // namespace

Execution::Execution(const Index& index, const TagGroups& tags, int steps)
    : index_(index),
      tags_(tags),
      steps_(steps),
      counters_(index.signallers.size(), 0),
      barrier_waiters_(index.signallers.size()),
      group_counts_(tags.members.size() * static_cast<std::size_t>(steps), 0),
      group_waiters_(group_counts_.size()) {}

void Execution::run(Node withheld, Withhold withhold) {
  withheld_ = withheld;
  withhold_ = withhold;
  const auto actors = index_.program.dynamic ? count() * static_cast<std::size_t>(steps_)
                                             : index_.program.queues.size();
  heads_.assign(actors, 0);
  reached_header.assign(count() * static_cast<std::size_t>(steps_), 0);
  reached_writes.assign(reached_header.size(), 0);
  for (std::size_t actor = actors; actor-- > 0;) ready_.push_back(static_cast<std::int32_t>(actor));
  while (!ready_.empty()) {
    const auto actor = ready_.back();
    ready_.pop_back();
    if (index_.program.dynamic)
      advance_node(actor);
    else
      advance_queue(actor);
  }
}

std::vector<Blocked> Execution::blocked() const {
  std::vector<Blocked> result;
  for (std::size_t queue = 0; queue < index_.program.queues.size(); ++queue) {
    const auto& entries = index_.program.queues[queue];
    if (static_cast<std::size_t>(heads_[queue]) < entries.size())
      result.push_back(describe(entries[static_cast<std::size_t>(heads_[queue])], 0));
  }
  return result;
}

Blocked Execution::describe(std::int32_t instruction, std::int32_t step) const {
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

bool Execution::earlier_steps_signalled(Node node) const {
  const auto& waits = index_.program.instructions[node.instruction].waits;
  return std::all_of(std::begin(waits), std::end(waits), [&](const WaitFor& wait) {
    return wait.barrier < 0 || counters_[wait.barrier] >= threshold({wait.barrier, 0}, node.step);
  });
}

bool Execution::finished(std::int32_t instruction, std::int32_t step) const {
  const auto place = index_.places[instruction];
  const auto length = static_cast<std::int32_t>(index_.program.queues[place.queue].size());
  return heads_[place.queue] > step * length + place.position;
}

void Execution::advance_queue(std::int32_t queue) {
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

void Execution::advance_node(std::int32_t actor) {
  if (heads_[actor]) return;
  const auto instructions = static_cast<std::int32_t>(count());
  const auto step = actor / instructions;
  if (!execute(actor % instructions, step, actor)) return;
  heads_[actor] = 1;
  if (step == steps_ - 1) signal_forever(actor % instructions);
}

bool Execution::execute(std::int32_t instruction, std::int32_t step, std::int32_t actor) {
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
  const bool is_withheld = withhold_ != Withhold::kNothing && withheld_ == Node{instruction, step};
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

void Execution::signal_forever(std::int32_t instruction) {
  const auto barrier = index_.program.instructions[instruction].signal;
  if (barrier < 0 || counters_[barrier] == kForever) return;
  counters_[barrier] = kForever;
  wake(barrier);
}

void Execution::wake(std::int32_t barrier) {
  auto& waiters = barrier_waiters_[barrier];
  const auto value = counters_[barrier];
  const auto stay = std::partition(waiters.begin(), waiters.end(),
                                   [value](const Waiter& w) { return w.threshold > value; });
  for (auto waiter = stay; waiter != waiters.end(); ++waiter) ready_.push_back(waiter->actor);
  waiters.erase(stay, waiters.end());
}

}  // namespace megavm::verify
