#include "vm/verify/index.hpp"

namespace megavm::verify {

Index::Index(const ProgramView& view) : program(view) {
  const auto count = view.instructions.size();
  signallers.resize(static_cast<std::size_t>(view.barriers));
  places.resize(count);
  for (std::size_t queue = 0; queue < view.queues.size(); ++queue) {
    const auto& entries = view.queues[queue];
    for (std::size_t position = 0; position < entries.size(); ++position) {
      const auto instruction = entries[position];
      places[instruction] = {static_cast<std::int32_t>(queue), static_cast<std::int32_t>(position)};
      const auto signal = view.instructions[instruction].signal;
      if (signal >= 0) signallers[signal].push_back(instruction);
    }
  }
  first_access.assign(count + 1, 0);
  for (const auto& access : view.accesses) ++first_access[access.instruction + 1];
  for (std::size_t i = 0; i < count; ++i) first_access[i + 1] += first_access[i];
}

}  // namespace megavm::verify
