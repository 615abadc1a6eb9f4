// A launch of an emulated kernel. The entry point is that of the GPU.
#include "cuda/emulated/builtins.hpp"

#include <latch>

#include "cuda/megakernel.cu"

namespace megavm {
thread_local __align__(1024) unsigned char shared_memory[kSharedBytes];
}

namespace {

// What is wrong with the pages of a worker at the end of its queue, or "". With another instruction
// behind it, a worker would wait for ever, or take these pages for those of that instruction.
std::string pages_left() {
  using namespace megavm;
  if (control().stopping) return "";
  for (uint32_t page = 0; page < kPages; ++page) {
    const emulated::Mbarrier arrived = emulated::mbarrier(page_arrived(page).address());
    const emulated::Mbarrier finished = emulated::mbarrier(page_finished(page).address());
    if (arrived.missing_bytes > 0)
      return "the loader has announced " + std::to_string(arrived.missing_bytes) +
             " bytes more of page " + std::to_string(page) + " than it has copied";
    if (finished.missing < finished.count)
      return "page " + std::to_string(page) + " is finished by some of the consumers' warps only";
    if (arrived.phase != finished.phase)
      return "the loader has filled page " + std::to_string(page) +
             " and the consumers have not finished it, or the other way round";
  }
  return "";
}

}  // namespace

// Run the kernel of each of `ranks` ranks on `workers` workers of its own; in turn `stop_turn` of
// its lanes, each is told to stop. `regions` of memory are all that it may access. Launches of
// other threads come after it. Returns nothing, or what went wrong; the text is valid until the
// next launch.
extern "C" const char* emulated_launch(const megavm::Launch* const* launches, uint32_t ranks,
                                       uint32_t workers, uint32_t seed, uint32_t stop_turn,
                                       const emulated::Region* regions, uint32_t num_regions) {
  const std::lock_guard one_at_a_time(emulated::launching());
  emulated::set_regions(regions, num_regions);
  emulated::failure().failed = false;
  emulated::failure().text.clear();
  const auto body = [](const void* each) {
    megavm_kernel(*static_cast<const megavm::Launch*>(each));
  };
  const auto at_turn = [stop_turn](uint32_t turn) {
    if (turn == stop_turn) megavm::control().stopping = 1;
  };
  std::latch begun(ranks * workers);  // as on a GPU, all of them run before one has ended
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    for (uint32_t i = 0; i < workers; ++i)
      threads.emplace_back([=, &begun, launch = launches[rank]] {
        begun.arrive_and_wait();
        emulated::run_worker(i, workers, megavm::kNumThreads, megavm::shared_memory,
                             megavm::kSharedBytes, seed, body, launch, at_turn, pages_left);
      });
  for (std::thread& thread : threads) thread.join();
  emulated::set_regions(nullptr, 0);
  return emulated::failure().failed ? emulated::failure().text.c_str() : nullptr;
}
