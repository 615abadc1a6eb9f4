// A GPU on the CPU: runs the kernel that megakernel.cu makes, as C++ that the host's compiler
// translates, for tests and for authors of instructions who have no GPU at hand.
//
// A worker (an SM) is an OS thread. Each lane of its warps is a fiber: lanes take turns, and one
// gives way when it waits or polls. What a warp does together (shuffles, votes, matrix
// instructions) is a meeting of its lanes. The copy engine delivers late, and in any order: until
// then the destination holds garbage. Products of wgmma are computed when they are waited for.
//
// The emulation checks what a GPU would not say: that all lanes come to the same meeting, that
// addresses are aligned and inside shared memory, or a tensor or table of a program, that
// semaphores get no more arrivals than they count, that the warps of a warpgroup multiply the same
// operands and wait for them at the same place, that no two lanes of a warp rewrite a tagged word
// at a time. It knows nothing of caches and of the order of memory between workers beyond that of
// the host, and nothing of time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emulated {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kStackBytes = 96 * 1024;
constexpr uint32_t kSharedBase = 1024;  // the shared-memory address of its first byte

// ---- Errors. The first one ends the launch.

struct Failure {
  std::mutex mutex;
  std::string text;
  std::atomic<bool> failed{false};
};
inline Failure& failure() {
  static Failure shared;
  return shared;
}
// Held while a launch runs. Kernels, which are libraries, share it and all that is inline and
// static.
inline std::mutex& launching() {
  static std::mutex shared;
  return shared;
}

// ---- Lanes.

struct Worker;

struct Lane {
  ucontext_t first;  // how it begins
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  uint32_t thread = 0;
  uint32_t meeting = 0;  // meetings of the warp so far
  uint32_t polls = 0;
  uint32_t mbarrier = 0;  // if not 0: it waits for a phase of this mbarrier
  bool parity = false;
  bool meets = false;  // it waits for the other lanes of its warp
  bool begun = false;
  bool ended = false;
  using Products = std::vector<std::function<void()>>;  // each computes one wgmma
  Products products;                                    // not committed yet
  std::deque<Products> committed;                       // groups that nobody has waited for
};

// The contributions of lanes to a meeting. Lanes that have left a meeting may already come to the
// next one, but not to the one after, so there is room for two.
struct Meeting {
  uint32_t number = 0;
  uint32_t arrived = 0;
  const char* kind = nullptr;
  alignas(16) unsigned char brought[kLanes][32];
  uint32_t present = 0;  // bit i: lane i
};

struct Warp {
  Meeting meetings[2];
  uint32_t alive = 0;     // bit i: lane i has not ended
  uint32_t fences = 0;    // that its lanes have come to, of wgmma
  uint32_t meets = 0;     // the same of barriers of its warpgroup
  bool said[2] = {};      // its votes at the last two of these barriers
  uint64_t operands = 0;  // descriptors of the products since the last commit
  uint32_t steps = 0;     // instructions that it executed as a part of its warpgroup
  uint64_t step[8] = {};  // the last eight of these: a warp that did another one is refused
};

// A copy that the copy engine has not delivered.
struct Copy {
  uint32_t turns;  // until then
  uint32_t mbarrier;
  uint32_t bytes;
  std::function<void()> deliver;
};

// Who was the last to load a tagged word in order to store it with one element changed.
struct Rewrite {
  uint32_t thread;
  uint32_t meeting;  // the last one before
};

struct Worker {
  uint32_t block = 0, blocks = 0;
  unsigned char* shared = nullptr;
  uint32_t shared_bytes = 0;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::vector<Copy> copies;
  std::unordered_map<uint64_t, Rewrite> rewrites;  // by address
  uint32_t at_barrier = 0, barrier_round = 0;      // of __syncthreads
  std::mt19937 random;
  jmp_buf scheduler;
  bool progress = false;  // whether a lane has done more than poll
};

inline thread_local Worker* worker = nullptr;
inline thread_local Lane* lane = nullptr;

// NOTE: not inlined, so that no compiler keeps what belongs to one lane across a change of lanes.
__attribute__((noinline)) inline void give_way() {
  if (_setjmp(lane->place) == 0) _longjmp(worker->scheduler, 1);
}

[[noreturn]] __attribute__((noinline)) inline void end_lane() {
  Lane& mine = *lane;
  mine.ended = true;
  worker->warps[mine.thread / kLanes].alive &= ~(1u << mine.thread % kLanes);
  worker->progress = true;
  _longjmp(worker->scheduler, 1);
}

// Note what went wrong on this worker, unless something has before.
inline void note_failure(const std::string& text) {
  Failure& shared = failure();
  const std::lock_guard lock(shared.mutex);
  if (!shared.failed) shared.text = "worker " + std::to_string(worker->block) + text;
  shared.failed = true;
}

[[noreturn]] inline void fail(const std::string& text) {
  note_failure(", warp " + std::to_string(lane->thread / kLanes) + ", lane " +
               std::to_string(lane->thread % kLanes) + ": " + text);
  end_lane();
}

inline uint32_t lane_number() { return lane->thread % kLanes; }

// Give way after some polls: what a loop waits for is made by another lane.
inline void poll() {
  if (++lane->polls % 8 == 0) give_way();
}

// ---- Meetings of a warp.

// Bring a value, wait for all lanes, and return what they brought. It stays until this lane comes
// to the meeting after the next.
template <class Value>
const Meeting& meet(const char* kind, const Value& value) {
  static_assert(sizeof(Value) <= sizeof(Meeting::brought[0]));
  Warp& warp = worker->warps[lane->thread / kLanes];
  const uint32_t number = ++lane->meeting;
  Meeting& meeting = warp.meetings[number % 2];
  if (meeting.number != number) meeting = {.number = number, .kind = kind};
  if (meeting.kind != kind && std::strcmp(meeting.kind, kind) != 0)
    fail(std::string("this lane is at ") + kind + ", another one of its warp at " + meeting.kind);
  std::memcpy(meeting.brought[lane_number()], &value, sizeof(Value));
  meeting.present |= 1u << lane_number();
  worker->progress = true;
  while ((warp.alive & ~meeting.present) != 0) {
    lane->meets = true;
    give_way();
  }
  return meeting;
}

template <class Value>
Value brought(const Meeting& meeting, uint32_t by) {
  // Of a lane that has ended, after a fault, a GPU gives anything too.
  Value value = {};
  if (meeting.present >> by & 1) std::memcpy(&value, meeting.brought[by], sizeof(Value));
  return value;
}

// ---- Shared memory.

inline unsigned char* shared_bytes(uint32_t address, uint32_t bytes, uint32_t alignment) {
  const uint32_t offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > worker->shared_bytes)
    fail("shared memory has no " + std::to_string(bytes) + " bytes at " + std::to_string(offset));
  if (address % alignment != 0)
    fail("address " + std::to_string(offset) + " of shared memory is no multiple of " +
         std::to_string(alignment));
  return worker->shared + offset;
}

template <class Value>
Value load_shared(uint32_t address) {
  Value value;
  std::memcpy(&value, shared_bytes(address, sizeof(Value), sizeof(Value)), sizeof(Value));
  return value;
}
template <class Value>
void store_shared(uint32_t address, const Value& value) {
  std::memcpy(shared_bytes(address, sizeof(Value), sizeof(Value)), &value, sizeof(Value));
  worker->progress = true;
}

// ---- Global memory. Words of up to 8 bytes are atomic.

// A tensor or a table that a launch may access. vm/cuda/emulated.py has the same struct.
struct Region {
  uint64_t begin, end;
  const char* name;
};
// In ascending order; regions that overlap are one. Empty: nothing is known.
inline std::vector<Region>& regions() {
  static std::vector<Region> all;
  return all;
}
inline void set_regions(const Region* first, uint32_t count) {
  std::vector<Region> given(first, first + count);
  std::stable_sort(given.begin(), given.end(),
                   [](const Region& a, const Region& b) { return a.begin < b.begin; });
  regions().clear();
  for (const Region& each : given)
    if (!regions().empty() && each.begin < regions().back().end)
      regions().back().end = std::max(regions().back().end, each.end);
    else
      regions().push_back(each);
}

[[noreturn]] inline void fail_outside(uint64_t address, uint64_t bytes, const Region* before) {
  const std::string access = "an access of " + std::to_string(bytes) + " bytes";
  if (before == nullptr)
    fail(access + " at " + std::to_string(address) + " is outside of all tensors");
  fail(access + " ends " + std::to_string(address + bytes - before->end) + " bytes beyond " +
       before->name + " of " + std::to_string(before->end - before->begin) +
       " bytes, the nearest before it");
}

inline void check_global(uint64_t address, uint64_t bytes) {
  static thread_local Region last = {};
  const auto has = [&](const Region& region) {
    return region.begin <= address && address + bytes <= region.end;
  };
  if (regions().empty() || has(last)) return;
  auto next =
      std::upper_bound(regions().begin(), regions().end(), address,
                       [](uint64_t value, const Region& region) { return value < region.begin; });
  if (next == regions().begin()) fail_outside(address, bytes, nullptr);
  if (!has(*--next)) fail_outside(address, bytes, &*next);
  last = *next;
}

// The address, once it is checked that `bytes` bytes may be accessed there.
template <class Value>
Value* global(uint64_t address, uint32_t alignment = sizeof(Value),
              uint64_t bytes = sizeof(Value)) {
  if (address % alignment != 0)
    fail("address " + std::to_string(address) + " is no multiple of " + std::to_string(alignment));
  if (address >> 48 != 0 || address < 4096)
    fail("there is no memory at " + std::to_string(address));
  check_global(address, bytes);
  return reinterpret_cast<Value*>(address);
}
template <class Value>
Value load_global(uint64_t address, uint32_t alignment = sizeof(Value)) {
  return __atomic_load_n(global<Value>(address, alignment), __ATOMIC_ACQUIRE);
}
template <class Value>
void store_global(uint64_t address, Value value, uint32_t alignment = sizeof(Value)) {
  __atomic_store_n(global<Value>(address, alignment), value, __ATOMIC_RELEASE);
  worker->progress = true;
}

// Lanes of a warp take turns here, but a GPU loads for all of them before it stores.
inline void rewrite(uint64_t address) {
  const Rewrite mine = {lane->thread, lane->meeting};
  const auto [place, is_first] = worker->rewrites.try_emplace(address, mine);
  Rewrite& last = place->second;
  if (!is_first && last.thread != mine.thread && last.thread / kLanes == mine.thread / kLanes &&
      last.meeting == mine.meeting)
    fail("lane " + std::to_string(last.thread % kLanes) +
         " stores the other element of a tagged word at the same time: one of them is lost");
  last = mine;
}

// ---- mbarriers: [phase : 1][arrivals that are missing : 15][count : 16][bytes that are missing :
// 32].

struct Mbarrier {
  uint32_t missing_bytes;
  uint16_t count;
  uint16_t missing : 15;
  uint16_t phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier& mbarrier(uint32_t address) {
  return *reinterpret_cast<Mbarrier*>(shared_bytes(address, 8, 8));
}
inline void complete_if_done(Mbarrier& barrier) {
  worker->progress = true;
  if (barrier.missing != 0 || barrier.missing_bytes != 0) return;
  barrier.missing = barrier.count;
  barrier.phase ^= 1;
}
inline void arrive(uint32_t address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier(address);
  barrier.missing_bytes += bytes;
  if (barrier.missing == 0)
    fail("the semaphore at " + std::to_string(address - kSharedBase) + " counts " +
         std::to_string(barrier.count) + " arrivals, this is one more");
  barrier.missing = barrier.missing - 1;
  complete_if_done(barrier);
}
inline bool is_phase_over(uint32_t address, uint32_t parity) {
  const bool over = mbarrier(address).phase != parity;
  if (!over) {
    lane->mbarrier = address;
    lane->parity = parity;
    give_way();
  }
  return over;
}

// Whether it is of use to let a lane run on. A lane that waits for a semaphore looks now and then
// whether its worker stops.
inline bool can_run(Lane& each, uint32_t turn) {
  if (each.meets) {
    const Warp& warp = worker->warps[each.thread / kLanes];
    if ((warp.alive & ~warp.meetings[each.meeting % 2].present) != 0) return false;
    each.meets = false;
  }
  if (each.mbarrier != 0) {
    if (mbarrier(each.mbarrier).phase == each.parity && turn % 64 != 0) return false;
    each.mbarrier = 0;
  }
  return true;
}

// ---- The copy engine.

// Deliver `bytes` bytes at `to` by `deliver`, later. Until then they are garbage.
template <class Deliver>
void copy_later(uint32_t to, uint32_t bytes, uint32_t mbarrier, Deliver&& deliver) {
  std::memset(shared_bytes(to, bytes, 16), 0xff, bytes);  // NaN
  worker->copies.push_back({static_cast<uint32_t>(worker->random() % 6), mbarrier, bytes,
                            std::forward<Deliver>(deliver)});
}

inline void deliver_copies() {
  std::vector<Copy> left;
  std::vector<Copy> due;
  for (Copy& copy : worker->copies) (copy.turns-- == 0 ? due : left).push_back(std::move(copy));
  worker->copies = std::move(left);
  for (Copy& copy : due) {
    copy.deliver();
    Mbarrier& barrier = mbarrier(copy.mbarrier);
    barrier.missing_bytes -= copy.bytes;
    complete_if_done(barrier);
  }
}

// ---- Workers.

using Body = void (*)(const void* launch);

inline thread_local Body lane_body;
inline thread_local const void* lane_launch;

inline void begin_lane() {
  lane_body(lane_launch);
  end_lane();
}

// Run all lanes of a worker to their end. `at_turn` is called with the number of each turn,
// `at_end` at the end: it says what is wrong then, or "".
template <class AtTurn, class AtEnd>
void run_worker(uint32_t block, uint32_t blocks, uint32_t threads, unsigned char* shared,
                uint32_t shared_bytes, uint32_t seed, Body body, const void* launch, AtTurn at_turn,
                AtEnd at_end) {
  Worker own;
  own.block = block;
  own.blocks = blocks;
  own.shared = shared;
  own.shared_bytes = shared_bytes;
  own.random.seed(seed * 7919 + block);
  own.lanes.resize(threads);
  own.warps.resize(threads / kLanes);
  std::memset(shared, 0xff, shared_bytes);
  worker = &own;
  lane_body = body;
  lane_launch = launch;
  for (uint32_t i = 0; i < threads; ++i) {
    Lane& each = own.lanes[i];
    each.thread = i;
    each.stack.reset(new char[kStackBytes]);
    getcontext(&each.first);
    each.first.uc_stack.ss_sp = each.stack.get();
    each.first.uc_stack.ss_size = kStackBytes;
    each.first.uc_link = nullptr;
    makecontext(&each.first, begin_lane, 0);
    own.warps[i / kLanes].alive |= 1u << i % kLanes;
  }
  std::vector<uint32_t> order(own.warps.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  static thread_local volatile bool alive;
  static thread_local uint32_t turn;
  turn = 0;
  for (alive = true; alive;) {
    alive = false;
    own.progress = false;
    at_turn(++turn);
    if (failure().failed) break;
    std::swap(order[own.random() % order.size()], order[own.random() % order.size()]);
    for (const uint32_t warp : order) {
      for (uint32_t i = warp * kLanes; i < (warp + 1) * kLanes; ++i) {
        if (own.lanes[i].ended) continue;
        alive = true;
        if (!can_run(own.lanes[i], turn)) continue;
        lane = &own.lanes[i];
        if (_setjmp(own.scheduler) == 0) {
          if (lane->begun) _longjmp(lane->place, 1);
          lane->begun = true;
          setcontext(&lane->first);
        }
      }
    }
    deliver_copies();
    if (!own.progress) std::this_thread::yield();
  }
  if (!failure().failed)
    if (const std::string problem = at_end(); !problem.empty()) note_failure(": " + problem);
  worker = nullptr;
}

}  // namespace emulated
