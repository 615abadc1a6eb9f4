// The functions of cuda/ptx/wgmma.cuh, emulated.
#pragma once

#include <source_location>

#include "cuda/ptx/mma.cuh"

namespace megavm::ptx {

enum class OperandSwizzle : uint32_t { k128Bytes = 1, k64Bytes = 2 };
constexpr uint32_t kOperandUnit = 16;  // descriptors count so many bytes

inline uint32_t operand_start(uint32_t address, uint32_t leading = kOperandUnit) {
  return leading / kOperandUnit << 16 | (address & 0x3ffff) / kOperandUnit;
}
template <OperandSwizzle kSwizzle>
uint64_t operand_descriptor(uint32_t start, uint32_t offset, uint32_t stride) {
  return uint64_t{static_cast<uint32_t>(kSwizzle)} << 62 | uint64_t{stride >> 4} << 32 |
         (start + offset / kOperandUnit);
}

// Element `k` of a row of an operand. PTX ISA, "Matrix descriptor", "Strides" and "Swizzling
// modes": the swizzle is one of the bits of the address. If K is contiguous, groups of 8 rows are
// the stride offset apart; otherwise groups of 8 columns k are, and groups of 64 rows the leading
// offset.
inline float operand(uint64_t descriptor, uint32_t row, uint32_t k, bool transposed = false) {
  const uint32_t address = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const bool wide = descriptor >> 62 == 1;
  uint32_t at = address;
  if (transposed) {
    if (!wide) emulated::fail("transposed operands are emulated with the 128-byte swizzle only");
    at += row / 64 * leading + k / 8 * stride + k % 8 * 128 + 2 * (row % 64);
  } else {
    at += row / 8 * stride + row % 8 * (wide ? 128 : 64) + 2 * k;
  }
  unsigned short bits;
  std::memcpy(&bits, emulated::shared_bytes(swizzled(at, wide ? 3 : 2), 2, 2), 2);
  return from_bf16(bits);
}

// Wait for the other warps of this one's warpgroup. `what` is illegal if one of them has ended.
inline void meet_warpgroup(uint32_t emulated::Warp::* times, const std::string& what) {
  __syncwarp();
  auto& warps = emulated::worker->warps;
  const uint32_t mine = thread_index() / 32, first = mine / 4 * 4;
  if (lane_index() == 0) {
    ++(warps[mine].*times);
    emulated::worker->progress = true;
  }
  __syncwarp();
  for (uint32_t i = first; i < first + 4; ++i)
    while (warps[i].*times < warps[mine].*times && !emulated::failure().failed) {
      if (warps[i].alive == 0)
        emulated::fail("warp " + std::to_string(i) + " has ended before " + what + " of warp " +
                       std::to_string(mine));
      emulated::give_way();
    }
  __syncwarp();
}

// What the warps of a warpgroup execute as one instruction: `what` is the same for all of them, or
// `problem` is what they do.
inline void step_of_warpgroup(uint64_t what, const char* problem) {
  __syncwarp();
  if (lane_index() != 0) return;
  const uint32_t first = thread_index() / 32 / 4 * 4;
  auto& warps = emulated::worker->warps;
  emulated::Warp& mine = warps[thread_index() / 32];
  const uint32_t kept = std::size(mine.step);
  const uint32_t number = mine.steps++;
  mine.step[number % kept] = what;
  for (uint32_t i = first; i < first + 4; ++i)
    if (warps[i].steps > number && warps[i].steps - number <= kept &&
        warps[i].step[number % kept] != what)
      emulated::fail(std::string("the warps of a warpgroup ") + problem);
}
using Place = std::source_location;

// A wgmma is one instruction of four warps, which begin it together with this fence.
inline void wgmma_fence() { meet_warpgroup(&emulated::Warp::fences, "a wgmma"); }
inline void sync_warpgroup(uint32_t) { meet_warpgroup(&emulated::Warp::meets, "a barrier"); }
inline bool any_of_warpgroup(uint32_t, bool says) {
  auto& warps = emulated::worker->warps;
  const uint32_t mine = thread_index() / 32, first = mine / 4 * 4;
  const uint32_t turn = warps[mine].meets % 2;
  const bool any = __any_sync(~0u, says);
  if (lane_index() == 0) warps[mine].said[turn] = any;
  meet_warpgroup(&emulated::Warp::meets, "a barrier");
  return std::any_of(&warps[first], &warps[first] + 4,
                     [&](const emulated::Warp& warp) { return warp.said[turn]; });
}
inline void wgmma_commit() {
  // PTX ISA, "Matrix descriptor": the same in all warps of the warpgroup.
  __syncwarp();
  auto& operands = emulated::worker->warps[thread_index() / 32].operands;
  step_of_warpgroup(operands, "multiply different operands");
  __syncwarp();
  if (lane_index() == 0) operands = 0;
  emulated::lane->committed.push_back(std::exchange(emulated::lane->products, {}));
}

// Products are computed when they are waited for: until then their operands must stay, and their
// sums must not be used. PTX ISA, "wgmma.wait_group": all threads of the warpgroup must execute the
// same instruction.
template <uint32_t kPending>
void wgmma_wait(const Place& place = Place::current()) {
  step_of_warpgroup(uint64_t{place.line()} << 32 | place.column(), "wait at different places");
  auto& groups = emulated::lane->committed;
  while (groups.size() > kPending) {
    for (auto& product : groups.front()) product();
    groups.pop_front();
  }
  __syncwarp();
}
template <uint32_t kPending>
void wgmma_wait_too(const Place& place = Place::current()) {
  wgmma_wait<kPending>(place);
}

inline void note_operands(uint64_t a, uint64_t b) {
  auto& all = emulated::worker->warps[thread_index() / 32].operands;
  if (lane_index() == 0) all = (all * 31 + a) * 31 + b;
}

// PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16": lane l of warp w has in sums
// 4 j + 2 h + i row 16 w + l / 4 + 8 h, column 8 j + 2 (l % 4) + i. `of_a(h, k)`: element k of the
// row of A with that h, when the product is computed.
template <uint32_t kColumns, class OfA>
void begin_product(float (&sums)[kColumns / 2], OfA of_a, uint64_t b, bool transposed) {
  float* const to = sums;
  emulated::lane->products.push_back([=] {
    const uint32_t lane = lane_index();
    float row[2][16];
    for (uint32_t h = 0; h < 2; ++h)
      for (uint32_t k = 0; k < 16; ++k) row[h][k] = of_a(h, k);
    for (uint32_t j = 0; j < kColumns / 8; ++j)
      for (uint32_t i = 0; i < 2; ++i)
        for (uint32_t k = 0; k < 16; ++k) {
          const float other = operand(b, 8 * j + lane % 4 * 2 + i, k, transposed);
          for (uint32_t h = 0; h < 2; ++h) to[4 * j + 2 * h + i] += row[h][k] * other;
        }
  });
}

template <uint32_t kColumns>
void wgmma(float (&sums)[kColumns / 2], uint64_t a, uint64_t b) {
  __syncwarp();
  note_operands(a, b);
  const uint32_t row = thread_index() / 32 % 4 * 16 + lane_index() / 4;
  begin_product<kColumns>(
      sums, [=](uint32_t h, uint32_t k) { return operand(a, row + 8 * h, k); }, b, false);
}

// The four lanes of a row hold its elements as in mma.
template <uint32_t kColumns, bool kTransposed>
void wgmma(float (&sums)[kColumns / 2], const Words4& a, uint64_t b) {
  const emulated::Meeting& all = emulated::meet("wgmma", a);
  note_operands(0, b);
  std::array<Words4, 4> of_row;
  for (uint32_t i = 0; i < 4; ++i)
    of_row[i] = emulated::brought<Words4>(all, lane_index() / 4 * 4 + i);
  const auto of_a = [=](uint32_t h, uint32_t k) {
    const Words4& words = of_row[k % 8 / 2];
    const uint32_t word = k < 8 ? (h ? words.y : words.x) : (h ? words.w : words.z);
    return k % 2 ? high_bf16(word) : low_bf16(word);
  };
  begin_product<kColumns>(sums, of_a, b, kTransposed);
}

}  // namespace megavm::ptx
