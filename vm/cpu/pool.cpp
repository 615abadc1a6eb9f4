#include "vm/cpu/pool.hpp"

#include <unistd.h>

#include <chrono>

namespace megavm {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins for the next run: longer than the host needs between two decode steps.
constexpr std::chrono::microseconds kAwake{80};
constexpr int kCountBits = 16;
constexpr uint64_t kCountMask = (1u << kCountBits) - 1;

}  // namespace

uint32_t num_processors() {
  const uint32_t found = std::thread::hardware_concurrency();
  return found == 0 ? 1 : found;
}

Pool::~Pool() {
  forget_threads_of_parent();
  {
    const std::lock_guard lock(own_->mutex);
    quit_ = true;
  }
  own_->wake.notify_all();
  for (std::thread& thread : own_->threads) thread.join();
}

void Pool::forget_threads_of_parent() {
  const uint64_t process = static_cast<uint64_t>(getpid());
  if (process == process_) return;
  process_ = process;
  static_cast<void>(own_.release());
  own_ = std::make_unique<Threads>();
}

void Pool::start(const std::function<void(uint32_t)>& job, uint32_t workers) {
  forget_threads_of_parent();
  std::vector<std::thread>& threads = own_->threads;
  const uint64_t seen = ticket_.load();
  while (threads.size() + 1 < workers) {
    const uint32_t number = static_cast<uint32_t>(threads.size()) + 1;
    threads.emplace_back([this, &own = *own_, number, seen] { serve(own, number, seen); });
  }
  job_ = &job;
  pending_.store(workers - 1);
  ticket_.store(((seen >> kCountBits) + 1) << kCountBits | workers);
  if (own_->sleepers.load() > 0) {
    // With the lock, a thread that has just decided to sleep is waiting by now, and is woken.
    const std::lock_guard lock(own_->mutex);
    own_->wake.notify_all();
  }
}

// Spin until the ticket changes; false when the thread should sleep.
bool Pool::stays_awake(uint32_t number, uint64_t seen) const {
  const uint32_t workers = seen & kCountMask;
  if (number >= workers || workers > num_processors()) return false;
  const Clock::time_point end = Clock::now() + kAwake;
  while (Clock::now() < end) {
    for (int i = 0; i < 32; ++i) {
      if (ticket_.load(std::memory_order_relaxed) != seen) return true;
      pause();
    }
  }
  return false;
}

void Pool::serve(Threads& own, uint32_t number, uint64_t seen) {
  while (true) {
    if (ticket_.load() == seen && !stays_awake(number, seen)) {
      std::unique_lock lock(own.mutex);
      ++own.sleepers;
      own.wake.wait(lock, [&] { return quit_ || ticket_.load() != seen; });
      --own.sleepers;
      if (quit_) return;
    }
    if (quit_) return;
    seen = ticket_.load();
    const uint32_t workers = seen & kCountMask;
    if (number >= workers) continue;
    (*job_)(number);
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace megavm
