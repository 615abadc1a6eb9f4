// Loads, stores and copies with the caching and memory order that the machine needs.
#pragma once

#include "cuda/integers.cuh"

// The scope of words and counters that workers exchange: the GPU, or all GPUs of a program of
// several ranks. program.hpp defines it.
#ifndef MEGAVM_SCOPE
#define MEGAVM_SCOPE "gpu"
#endif

namespace megavm::ptx {

struct Words2 {
  uint32_t x, y;
};

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};

// Zeros that the compiler cannot see through. It must treat them as a write, so a register that is
// cleared this way on every path is not live before that point.
__device__ __forceinline__ Words4 zero4() {
  Words4 v;
  asm volatile("mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w));
  return v;
}

// Force these words into four adjacent registers, as operands of a matrix instruction must be.
// Otherwise words that were loaded in another order are moved again before every use.
__device__ __forceinline__ void settle(Words4& words) {
  // NOTE: ctaid.y is always 0, as the grid has one dimension, but ptxas does not know that. It
  // keeps these xors, where it would drop plain moves.
  asm volatile(
      "{\n\t.reg .u32 zero;\n\tmov.u32 zero, %%ctaid.y;\n\t"
      "xor.b32 %0, %0, zero;\n\txor.b32 %1, %1, zero;\n\t"
      "xor.b32 %2, %2, zero;\n\txor.b32 %3, %3, zero;\n\t}"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

__device__ __forceinline__ uint32_t lane_index() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ uint32_t block_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ uint32_t zero() {
  uint32_t v;
  asm volatile("mov.u32 %0, 0;" : "=r"(v));
  return v;
}

// Keep the compiler from moving accesses to a value across this point.
__device__ __forceinline__ void settle(float& value) { asm volatile("" : "+f"(value)::"memory"); }
template <uint32_t kCount>
__device__ __forceinline__ void settle(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) settle(value);
}

// End this thread.
[[noreturn]] __device__ __forceinline__ void exit() {
  asm volatile("exit;");
  __builtin_unreachable();
}

// ---- Global memory, bypassing the first-level cache, which is not coherent between SMs.

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed." MEGAVM_SCOPE ".global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// The same for a counter to which threads of other GPUs add.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ Words4 load_relaxed4(uint64_t address) {
  Words4 v;
  asm volatile("ld.relaxed." MEGAVM_SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// The same into `to`, which keeps its value unless the lane is `active`. No branch, as for stores.
__device__ __forceinline__ void load_relaxed4(uint64_t address, Words4& to, bool active) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0;"
      " @p ld.relaxed." MEGAVM_SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(address), "r"(uint32_t{active})
      : "memory");
}

__device__ __forceinline__ Words2 load_relaxed2(uint64_t address) {
  Words2 v;
  asm volatile("ld.relaxed." MEGAVM_SCOPE ".global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_relaxed1(uint64_t address) {
  return load_relaxed(reinterpret_cast<const uint32_t*>(address));
}

// The same, of a word that this lane stores anew. Not two lanes at a time: the emulation finds
// those.
__device__ __forceinline__ uint32_t load_rewritten(uint64_t address) {
  return load_relaxed1(address);
}

__device__ __forceinline__ unsigned short load_relaxed_half(uint64_t address) {
  unsigned short value;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
  return value;
}

// For data that no worker writes while the kernel runs: it may stay in the first-level cache.
__device__ __forceinline__ uint32_t load_constant(uint64_t address) {
  uint32_t value;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

__device__ __forceinline__ Words2 load_constant2(uint64_t address) {
  Words2 v;
  asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

// The same into `to`, which keeps its value unless the lane is `active`.
__device__ __forceinline__ void load_constant2(uint64_t address, Words2& to, bool active) {
  asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.u32 {%0, %1}, [%2]; }"
      : "+r"(to.x), "+r"(to.y)
      : "l"(address), "r"(uint32_t{active}));
}

__device__ __forceinline__ Words4 load_constant4(uint64_t address) {
  Words4 v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
}

__device__ __forceinline__ unsigned short load_constant_half(uint64_t address) {
  unsigned short value;
  asm("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
}

// Stores that a lane leaves out unless it is `active`.
// NOTE: by a predicate, because compilers branch round a volatile store, and where there are many
// branches they save and restore what makes the warp converge again, which takes longer than the
// store.

// A word that other workers poll (cuda/words.cuh).
__device__ __forceinline__ void store_word(uint64_t address, uint32_t word, bool active = true) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.relaxed." MEGAVM_SCOPE
               ".global.b32 [%0], %1; }" ::"l"(address),
               "r"(word), "r"(uint32_t{active})
               : "memory");
}

// Two neighbours. Each is atomic, the two together are not.
__device__ __forceinline__ void store_word2(uint64_t address, uint32_t first, uint32_t second,
                                            bool active = true) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.relaxed." MEGAVM_SCOPE
               ".global.v2.b32 [%0], {%1, %2}; }" ::"l"(address),
               "r"(first), "r"(second), "r"(uint32_t{active})
               : "memory");
}

__device__ __forceinline__ void store(uint64_t address, uint32_t value, bool active = true) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1; }" ::"l"(address),
               "r"(value), "r"(uint32_t{active})
               : "memory");
}

__device__ __forceinline__ void store2(uint64_t address, uint32_t x, uint32_t y,
                                       bool active = true) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2}; }" ::"l"(address),
      "r"(x), "r"(y), "r"(uint32_t{active})
      : "memory");
}

__device__ __forceinline__ void store4(uint64_t address, const Words4& v, bool active = true) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(
          address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(uint32_t{active})
      : "memory");
}

__device__ __forceinline__ void store_half(uint64_t address, unsigned short value) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed." MEGAVM_SCOPE ".global.u32 [%0], %1;" ::"l"(address), "r"(value)
               : "memory");
}

// Adds with release order: a thread of the GPU that acquires the counter also sees every store that
// this thread made or observed before.
__device__ __forceinline__ void add_release(uint32_t* address, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed(uint32_t* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// For a counter in the memory of any GPU.
__device__ __forceinline__ void add_relaxed_system(uint64_t address, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t fetch_add_relaxed(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// ---- Shared memory, by 32-bit address.

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ Words4 load_shared4(uint32_t address) {
  Words4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ Words2 load_shared2(uint32_t address) {
  Words2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Reads a word that another warp may change at any time.
__device__ __forceinline__ uint32_t load_shared_volatile(uint32_t address) {
  uint32_t v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared2(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t address, const Words4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane i passes an address: row i % 8 of matrix i
// / 8. Of each matrix it gets row i / 4, columns 2 (i % 4) and the next.
__device__ __forceinline__ Words4 load_matrices(uint32_t address) {
  Words4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The same, each matrix transposed.
__device__ __forceinline__ Words4 load_matrices_transposed(uint32_t address) {
  Words4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The value of lane 0. The compiler keeps it in a uniform register.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __shfl_sync(~0u, value, 0); }

// ---- The copy engine.

// Cache policy for data that is read once.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Cache policy for data that several workers read.
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Starts a copy of a multiple of 16 bytes from global to shared memory; `mbarrier` counts the bytes
// as they land.
__device__ __forceinline__ void bulk_load(uint32_t to, uint64_t from, uint32_t bytes,
                                          uint32_t mbarrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(mbarrier), "l"(policy)
      : "memory");
}

// Starts the copy of a box of a matrix, whose first element has this column and row. `map` is the
// address of its CUtensorMap, which has the size of the box and its order in shared memory.
// Elements outside of the matrix are zeros, and count as bytes too.
__device__ __forceinline__ void box_load(uint32_t to, uint64_t map, uint32_t column, uint32_t row,
                                         uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(mbarrier)
      : "memory");
}

// The same with a cache policy.
__device__ __forceinline__ void box_load(uint32_t to, uint64_t map, uint32_t column, uint32_t row,
                                         uint32_t mbarrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(mbarrier), "l"(policy)
      : "memory");
}

// Orders every access that this thread made or observed before all its later accesses, as any
// thread of the GPU sees them.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The same, as any thread of any GPU sees them.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Orders ordinary accesses before later copies of the copy engine, which uses the async proxy.
// NOTE: it waits for all stores of the thread, those to global memory too.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// The same for accesses to shared memory alone, which takes next to no time.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace megavm::ptx
