// How far the clocks of two GPUs are apart: a thread on each, which exchange words.
// vm/cuda/clocks.py launches it on both.
#include "launch.hpp"

#include "cuda/integers.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/ptx/mma.cuh"

namespace megavm {

// Poll a word until its low byte is `number`; false when that takes longer than `timeout` ns.
__device__ __forceinline__ bool await_number(uint64_t address, uint32_t number, uint64_t timeout,
                                             uint64_t& word) {
  const uint64_t since = ptx::global_timer();
  do {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    if ((word & 0xff) == number) return true;
  } while (ptx::global_timer() - since < timeout);
  return false;
}

__device__ __forceinline__ void send(uint64_t address, uint64_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

}  // namespace megavm

// The leader sends a number; the follower answers with the number and its time. The answer of the
// shortest trip bounds the offset: the follower read its clock somewhere between the two times of
// the leader. own, peer: addresses of this thread's word and the other's. found, of the leader:
// {follower's clock less the leader's, ns; nanoseconds of the trip, 0 if there was no answer}.
extern "C" __global__ void megavm_clocks(unsigned long long own, unsigned long long peer,
                                         unsigned int leads, unsigned int rounds,
                                         unsigned int first, unsigned long long timeout,
                                         long long* found) {
  using namespace megavm;
  uint64_t shortest = ~0ull;
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t number = (first + round) & 0xff;
    uint64_t word;
    if (!leads) {
      if (!await_number(own, number, timeout, word)) return;
      send(peer, ptx::global_timer() << 8 | number);
      continue;
    }
    const uint64_t begin = ptx::global_timer();
    send(peer, number);
    if (!await_number(own, number, timeout, word)) return;
    const uint64_t trip = ptx::global_timer() - begin;
    if (trip >= shortest) continue;
    shortest = trip;
    // Times are counted modulo 2^56 here; their difference is not.
    const uint64_t apart = ((word >> 8) - (begin + trip / 2)) << 8;
    found[0] = static_cast<int64_t>(apart) >> 8;
    found[1] = static_cast<int64_t>(trip > 0 ? trip : 1);
  }
}
