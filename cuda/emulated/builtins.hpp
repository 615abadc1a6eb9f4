// What CUDA C++ has without an include, for code that the host's compiler translates.
#pragma once

#include "cuda/emulated/gpu.hpp"

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ thread_local
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900

struct EmulatedIndex {
  uint32_t x;
};
#define threadIdx (EmulatedIndex{emulated::lane->thread})
#define blockIdx (EmulatedIndex{emulated::worker->block})
#define gridDim (EmulatedIndex{emulated::worker->blocks})

inline void __syncwarp(uint32_t = ~0u) { emulated::meet("__syncwarp", 0); }
inline void __syncthreads() {
  using namespace emulated;
  const uint32_t round = worker->barrier_round;
  // The kernel calls it once, before its warps part.
  if (round > 0)
    fail(
        "__syncthreads waits for all warps of a worker, which do different things: use "
        "consumer.sync()");
  if (++worker->at_barrier == worker->lanes.size()) {
    worker->at_barrier = 0;
    ++worker->barrier_round;
  }
  worker->progress = true;
  while (worker->barrier_round == round) give_way();
}
inline void __nanosleep(uint32_t nanoseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  do {
    emulated::give_way();
  } while (nanoseconds >= 1000 && std::chrono::steady_clock::now() < end);
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <class Value>
Value __shfl_sync(uint32_t, Value value, uint32_t from) {
  const auto& all = emulated::meet("__shfl_sync", value);
  return emulated::brought<Value>(all, from % emulated::kLanes);
}
template <class Value>
Value __shfl_xor_sync(uint32_t, Value value, uint32_t mask) {
  const auto& all = emulated::meet("__shfl_xor_sync", value);
  return emulated::brought<Value>(all, emulated::lane_number() ^ mask);
}
template <class Value>
Value __shfl_down_sync(uint32_t, Value value, uint32_t by) {
  const auto& all = emulated::meet("__shfl_down_sync", value);
  const uint32_t from = emulated::lane_number() + by;
  return from < emulated::kLanes ? emulated::brought<Value>(all, from) : value;
}
template <class Value>
Value __shfl_up_sync(uint32_t, Value value, uint32_t by) {
  const auto& all = emulated::meet("__shfl_up_sync", value);
  const uint32_t mine = emulated::lane_number();
  return mine >= by ? emulated::brought<Value>(all, mine - by) : value;
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const auto& all = emulated::meet("__ballot_sync", vote);
  uint32_t votes = 0;
  for (uint32_t i = 0; i < emulated::kLanes; ++i)
    if (all.present >> i & 1 && emulated::brought<bool>(all, i)) votes |= 1u << i;
  return votes;
}
inline bool __any_sync(uint32_t, bool vote) { return __ballot_sync(~0u, vote) != 0; }
inline bool __all_sync(uint32_t, bool vote) { return __ballot_sync(~0u, !vote) == 0; }
template <class Value>
Value __reduce_max_sync(uint32_t, Value value) {
  const auto& all = emulated::meet("__reduce_max_sync", value);
  for (uint32_t i = 0; i < emulated::kLanes; ++i)
    if (all.present >> i & 1) value = std::max(value, emulated::brought<Value>(all, i));
  return value;
}

inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline int32_t __float_as_int(float value) { return std::bit_cast<int32_t>(value); }
inline float __uint_as_float(uint32_t value) { return std::bit_cast<float>(value); }
inline float __int_as_float(int32_t value) { return std::bit_cast<float>(value); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned long long __float2ull_rn(float x) {
  return static_cast<unsigned long long>(std::nearbyint(x));
}
template <class Value>
Value atomicAdd(Value* address, Value value) {
  const auto* byte = reinterpret_cast<const unsigned char*>(address);
  if (byte < emulated::worker->shared ||
      byte >= emulated::worker->shared + emulated::worker->shared_bytes)
    emulated::check_global(reinterpret_cast<uint64_t>(address), sizeof(Value));
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __popc(uint32_t word) { return __builtin_popcount(word); }
inline int __clz(int word) { return word == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(word)); }
template <class Value>
Value __ldg(const Value* address) {
  return *emulated::global<Value>(reinterpret_cast<uint64_t>(address), alignof(Value));
}
