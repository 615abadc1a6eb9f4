#include "vm/verify/happens_before.hpp"

#include <utility>

#include "vm/verify/execution.hpp"
#include "vm/verify/index.hpp"
#include "vm/verify/races.hpp"
#include "vm/verify/tag_groups.hpp"

namespace megavm::verify {
namespace {

// Sets `order` to an order in which one step runs, or returns the deadlock. A dynamic queue is run
// by one worker that takes its entries in order: if it ends, any number of workers does.
std::optional<Finding> run_one_step(const Index& index, const TagGroups& tags,
                                    Instructions& order) {
  ProgramView serial;
  if (index.program.dynamic) {
    serial = index.program;
    serial.dynamic = false;
  }
  const Index serial_index(index.program.dynamic ? serial : index.program);
  Execution execution(serial_index, tags, 1);
  execution.run({}, Execution::Withhold::kNothing);
  order = std::move(execution.order);
  Finding finding{FindingKind::kDeadlock, execution.blocked()};
  if (finding.blocked.empty()) return std::nullopt;
  return finding;
}

}  // namespace

Analysis analyse(const ProgramView& program) {
  Analysis result;
  const Index index(program);
  const TagGroups tags(program, result.fault);
  if (result.fault) return result;
  Instructions sequence;
  if ((result.fault = run_one_step(index, tags, sequence))) return result;
  if (!program.dynamic) {
    // Try a proof without the order of the queues first: compiled programs do not need it.
    ProgramView unordered = program;
    unordered.dynamic = true;
    unordered.queues = {sequence};
    result.fault = find_fault(Index(unordered), tags, sequence);
    if (!result.fault || result.fault->kind == FindingKind::kUnwritten) return result;
    result.needs_queue_order = true;
  }
  result.fault = find_fault(index, tags, sequence);
  return result;
}

}  // namespace megavm::verify
