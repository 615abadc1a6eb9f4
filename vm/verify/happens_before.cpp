#include "vm/verify/happens_before.hpp"

#include <utility>

#include "vm/verify/execution.hpp"
#include "vm/verify/index.hpp"
#include "vm/verify/races.hpp"
#include "vm/verify/tag_groups.hpp"

namespace megavm::verify {
namespace {

// Sets `order` to an order in which one step runs, or returns the deadlock.
std::optional<Finding> run_one_step(const Index& index, const TagGroups& tags,
                                    Instructions& order) {
  Execution execution(index, tags, 1);
  execution.run({}, Execution::Withhold::kNothing);
  order = std::move(execution.order);
  Finding finding{FindingKind::kDeadlock, execution.blocked()};
  if (finding.blocked.empty()) return std::nullopt;
  return finding;
}

}  // namespace

Analysis analyse(ProgramView program) {
  Analysis result;
  const TagGroups tags(program, result.fault);
  if (result.fault) return result;
  Instructions sequence;
  // A dynamic queue is run by one worker that takes its entries in order: if it ends, any number of
  // workers does.
  const bool dynamic = std::exchange(program.dynamic, false);
  if ((result.fault = run_one_step(Index(program), tags, sequence))) return result;
  // Try a proof without the order of the queues first: compiled programs do not need it.
  program.dynamic = true;
  std::vector<Instructions> queues{sequence};
  if (!dynamic) program.queues.swap(queues);
  result.fault = find_fault(Index(program), tags, sequence);
  if (dynamic || !result.fault || result.fault->kind == FindingKind::kUnwritten) return result;
  result.needs_queue_order = true;
  program.dynamic = false;
  program.queues.swap(queues);
  result.fault = find_fault(Index(program), tags, sequence);
  return result;
}

}  // namespace megavm::verify
