// Threads that persist between runs. They spin for a moment after a run, so that the next run finds
// them awake if it follows closely.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace megavm {

class Pool {
 public:
  Pool() = default;
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Start `job(1)` .. `job(workers - 1)` on threads of the pool; the caller does the work of
  // number 0. `job` must live until `finished`.
  void start(const std::function<void(uint32_t)>& job, uint32_t workers);

  // Whether all jobs of the last start have returned.
  bool finished() const { return pending_.load(std::memory_order_acquire) == 0; }

 private:
  // What threads sleep on. A forked child has none of them, and what they slept on still counts
  // them there: it must leave all of this alone.
  struct Threads {
    std::vector<std::thread> threads;
    std::atomic<uint32_t> sleepers{0};
    std::mutex mutex;
    std::condition_variable wake;
  };

  void serve(Threads& own, uint32_t number, uint64_t seen);
  bool stays_awake(uint32_t number, uint64_t seen) const;
  void forget_threads_of_parent();

  std::unique_ptr<Threads> own_ = std::make_unique<Threads>();
  // Run number and worker count in one word, so that a thread that wakes late never mixes two runs.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> pending_{0};
  std::atomic<bool> quit_{false};
  const std::function<void(uint32_t)>* job_ = nullptr;
  uint64_t process_ = 0;  // that has the threads
};

// The number of processors, as the system reports it; at least 1.
uint32_t num_processors();

// Tell the processor that this is a spin loop.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace megavm
