// Matrix instructions of a warpgroup (wgmma): operands in shared memory, sums in registers.
#pragma once

#include "cuda/ptx/memory.cuh"

namespace megavm::ptx {

// How the rows of an operand lie in shared memory: the hardware's swizzles of 16-byte chunks.
enum class OperandSwizzle : uint32_t { k128Bytes = 1, k64Bytes = 2 };
constexpr uint32_t kOperandUnit = 16;  // descriptors count so many bytes

// Descriptor of an operand, `offset` bytes after `start`, which operand_start gives.
// If the rows of the operand are contiguous along K, groups of 8 rows are `stride` bytes apart, and
// the descriptor may point to any 32 bytes of the first swizzled row. If the operand is transposed,
// rows along K have 64 contiguous elements each; groups of 8 such rows are `stride` bytes apart,
// and the next 64 elements of all rows `leading` bytes.
__device__ __forceinline__ uint32_t operand_start(uint32_t address,
                                                  uint32_t leading = kOperandUnit) {
  return leading / kOperandUnit << 16 | address / kOperandUnit;
}
template <OperandSwizzle kSwizzle>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t start, uint32_t offset,
                                                       uint32_t stride) {
  return uint64_t{static_cast<uint32_t>(kSwizzle) << 30 | stride >> 4} << 32 |
         (start + offset / kOperandUnit);
}

// Wait for all four warps of warpgroup `number`, and see what they stored in shared memory. None of
// them may have ended: nothing ends this wait then.
__device__ __forceinline__ void sync_warpgroup(uint32_t number) {
  asm volatile("barrier.sync.aligned %0, 128;" ::"r"(1 + number) : "memory");
}

// Whether one of the threads of warpgroup `number` says so. Waits for all of them, as
// sync_warpgroup does.
__device__ __forceinline__ bool any_of_warpgroup(uint32_t number, bool says) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %2, 0;\n"
      "barrier.red.or.pred.aligned q, %1, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(1 + number), "r"(uint32_t{says})
      : "memory");
  return any != 0;
}

// Before the first wgmma, and between other accesses to the sums and a wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Wait until at most kPending of the committed groups are in progress.
template <uint32_t kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same, which compilers do not unite with it in front of a branch.
template <uint32_t kPending>
__device__ __forceinline__ void wgmma_wait_too() {
  asm volatile("wgmma.wait_group.sync.aligned %0; // too" ::"n"(kPending) : "memory");
}

// D += A . B^T (m64nNk16, bf16): A [64][16] and B [N][16] by descriptor. Lane l of warp w has, in
// sums[4 j + 2 h + i], row 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + i.
template <uint32_t kColumns>
__device__ __forceinline__ void wgmma(float (&sums)[kColumns / 2], uint64_t a, uint64_t b);

// clang-format off
#define MEGAVM_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MEGAVM_SUMS_8(i) MEGAVM_SUMS_4(i), MEGAVM_SUMS_4(i + 4)
#define MEGAVM_SUMS_16(i) MEGAVM_SUMS_8(i), MEGAVM_SUMS_8(i + 8)
#define MEGAVM_SUMS_32(i) MEGAVM_SUMS_16(i), MEGAVM_SUMS_16(i + 16)
#define MEGAVM_SUMS_64(i) MEGAVM_SUMS_32(i), MEGAVM_SUMS_32(i + 32)

// The registers of the sums in the text of an instruction.
#define MEGAVM_LIST_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define MEGAVM_LIST_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

template <>
__device__ __forceinline__ void wgmma<32>(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, 1, 1, 1, 0, 0;"
      : MEGAVM_SUMS_16(0)
      : "l"(a), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma<64>(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      MEGAVM_LIST_32
      "%32, %33, 1, 1, 1, 0, 0;"
      : MEGAVM_SUMS_32(0)
      : "l"(a), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma<128>(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      MEGAVM_LIST_64
      "%64, %65, 1, 1, 1, 0, 0;"
      : MEGAVM_SUMS_64(0)
      : "l"(a), "l"(b));
}

// The same with A in registers, as mma has it: each warp has 16 rows. B is transposed or not.
template <uint32_t kColumns, bool kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], const Words4& a, uint64_t b) {
  static_assert(kColumns == 64 || kColumns == 128);
  if constexpr (kColumns == 64)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        MEGAVM_LIST_32
        "{%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
        : MEGAVM_SUMS_32(0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "n"(kTransposed));
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        MEGAVM_LIST_64
        "{%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
        : MEGAVM_SUMS_64(0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "n"(kTransposed));
}

#undef MEGAVM_SUMS_4
#undef MEGAVM_SUMS_8
#undef MEGAVM_SUMS_16
#undef MEGAVM_SUMS_32
#undef MEGAVM_SUMS_64
#undef MEGAVM_LIST_32
#undef MEGAVM_LIST_64
// clang-format on

}  // namespace megavm::ptx
