// The functions of cuda/ptx/memory.cuh, emulated.
#pragma once

#include "cuda/integers.cuh"

namespace megavm::ptx {

struct Words2 {
  uint32_t x, y;
};

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};

inline Words4 zero4() { return {}; }
inline void settle(Words4&) {}
inline void settle(float&) {}
template <uint32_t kCount>
void settle(float (&)[kCount]) {}
inline uint32_t lane_index() { return emulated::lane_number(); }
inline uint32_t thread_index() { return emulated::lane->thread; }
inline uint32_t block_index() { return emulated::worker->block; }
inline uint32_t zero() { return 0; }
[[noreturn]] inline void exit() { emulated::end_lane(); }

// ---- Global memory.

inline uint32_t load_relaxed1(uint64_t address) {
  emulated::poll();
  return emulated::load_global<uint32_t>(address);
}
inline uint32_t load_relaxed(const uint32_t* address) {
  return load_relaxed1(reinterpret_cast<uint64_t>(address));
}
inline uint32_t load_acquire(const uint32_t* address) { return load_relaxed(address); }
inline uint32_t load_acquire_system(const uint32_t* address) { return load_relaxed(address); }
inline uint32_t load_rewritten(uint64_t address) {
  emulated::rewrite(address);
  return load_relaxed1(address);
}
inline Words2 load_relaxed2(uint64_t address) {
  emulated::global<uint64_t>(address);
  return {load_relaxed1(address), load_relaxed1(address + 4)};
}
inline Words4 load_relaxed4(uint64_t address) {
  emulated::global<Words4>(address);
  const Words2 low = load_relaxed2(address), high = load_relaxed2(address + 8);
  return {low.x, low.y, high.x, high.y};
}
inline void load_relaxed4(uint64_t address, Words4& to, bool active) {
  if (active) to = load_relaxed4(address);
}
inline unsigned short load_relaxed_half(uint64_t address) {
  return emulated::load_global<unsigned short>(address);
}

inline uint32_t load_constant(uint64_t address) { return *emulated::global<uint32_t>(address); }
inline Words2 load_constant2(uint64_t address) { return *emulated::global<Words2>(address); }
inline void load_constant2(uint64_t address, Words2& to, bool active) {
  if (active) to = load_constant2(address);
}
inline Words4 load_constant4(uint64_t address) { return *emulated::global<Words4>(address); }
inline unsigned short load_constant_half(uint64_t address) {
  return *emulated::global<unsigned short>(address);
}

inline void store_word(uint64_t address, uint32_t word, bool active = true) {
  if (active) emulated::store_global(address, word);
}
inline void store_word2(uint64_t address, uint32_t first, uint32_t second, bool active = true) {
  if (!active) return;
  emulated::global<Words2>(address, 8);
  store_word(address, first);
  store_word(address + 4, second);
}
inline void store(uint64_t address, uint32_t value, bool active = true) {
  if (active) emulated::store_global(address, value);
}
inline void store2(uint64_t address, uint32_t x, uint32_t y, bool active = true) {
  if (!active) return;
  emulated::global<Words2>(address, 8);
  store(address, x);
  store(address + 4, y);
}
inline void store4(uint64_t address, const Words4& v, bool active = true) {
  if (!active) return;
  emulated::global<Words4>(address);
  store2(address, v.x, v.y);
  store2(address + 8, v.z, v.w);
}
inline void store_half(uint64_t address, unsigned short value) {
  emulated::store_global(address, value);
}
inline void store_relaxed(uint32_t* address, uint32_t value) {
  emulated::store_global(reinterpret_cast<uint64_t>(address), value);
}
inline uint32_t fetch_add_relaxed(uint32_t* address, uint32_t value) {
  emulated::worker->progress = true;
  return __atomic_fetch_add(emulated::global<uint32_t>(reinterpret_cast<uint64_t>(address)), value,
                            __ATOMIC_ACQ_REL);
}
inline void add_release(uint32_t* address, uint32_t value) { fetch_add_relaxed(address, value); }
inline void add_relaxed(uint32_t* address, uint32_t value) { fetch_add_relaxed(address, value); }
inline void add_relaxed_system(uint64_t address, uint32_t value) {
  fetch_add_relaxed(emulated::global<uint32_t>(address), value);
}

// ---- Shared memory.

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) -
                               emulated::worker->shared) +
         emulated::kSharedBase;
}
inline Words4 load_shared4(uint32_t address) { return emulated::load_shared<Words4>(address); }
inline Words2 load_shared2(uint32_t address) { return emulated::load_shared<Words2>(address); }
inline uint32_t load_shared(uint32_t address) { return emulated::load_shared<uint32_t>(address); }
inline uint32_t load_shared_volatile(uint32_t address) { return load_shared(address); }
inline void store_shared(uint32_t address, uint32_t x) { emulated::store_shared(address, x); }
inline void store_shared2(uint32_t address, uint32_t x, uint32_t y) {
  emulated::store_shared(address, Words2{x, y});
}
inline void store_shared4(uint32_t address, const Words4& v) { emulated::store_shared(address, v); }

// PTX ISA, "ldmatrix": lane 8 m + r has the address of row r of matrix m. Lane i gets elements
// 2 (i % 4) and the next of row i / 4 of each matrix; transposed, of column i / 4.
inline Words4 load_matrices(uint32_t address, bool transposed = false) {
  const emulated::Meeting& all = emulated::meet("ldmatrix", address);
  const uint32_t lane = lane_index(), major = lane / 4, minor = lane % 4 * 2;
  uint32_t words[4];
  for (uint32_t m = 0; m < 4; ++m) {
    unsigned short pair[2];
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = transposed ? minor + i : major, column = transposed ? major : minor + i;
      const uint32_t from = emulated::brought<uint32_t>(all, 8 * m + row);
      std::memcpy(&pair[i], emulated::shared_bytes(from, 16, 16) + 2 * column, 2);
    }
    words[m] = uint32_t{pair[1]} << 16 | pair[0];
  }
  return {words[0], words[1], words[2], words[3]};
}
inline Words4 load_matrices_transposed(uint32_t address) { return load_matrices(address, true); }

// ---- The copy engine.

inline uint64_t evict_first_policy() { return 0; }
inline uint64_t evict_normal_policy() { return 0; }

inline uint32_t uniform(uint32_t value) { return __shfl_sync(~0u, value, 0); }

inline void bulk_load(uint32_t to, uint64_t from, uint32_t bytes, uint32_t mbarrier, uint64_t) {
  if (bytes == 0 || bytes % 16 != 0)
    emulated::fail("a copy of " + std::to_string(bytes) + " bytes: not a multiple of 16");
  const void* source = emulated::global<Words4>(from, sizeof(Words4), bytes);
  unsigned char* target = emulated::shared_bytes(to, bytes, 16);
  emulated::copy_later(to, bytes, mbarrier, [=] { std::memcpy(target, source, bytes); });
}

// A matrix and its boxes, as vm/cuda/emulated.py describes them.
struct BoxMap {
  uint64_t address, columns, rows, row_bytes, box_columns, box_rows, element_bytes, swizzle_bits;
};

// PTX ISA, "Swizzling modes": 128 bytes. The number of a 16-byte chunk in its 128 bytes is
// exclusive- ored with that of its row in 1024 bytes.
inline uint32_t swizzled(uint32_t address, uint64_t bits) {
  return address ^ (address >> 7 & ((1u << bits) - 1)) << 4;
}

inline void box_load(uint32_t to, uint64_t map_address, uint32_t column, uint32_t row,
                     uint32_t mbarrier) {
  const BoxMap map = *emulated::global<BoxMap>(map_address, 8);
  const uint32_t size = static_cast<uint32_t>(map.element_bytes);
  const uint32_t row_bytes = static_cast<uint32_t>(map.box_columns) * size;
  const uint32_t bytes = row_bytes * static_cast<uint32_t>(map.box_rows);
  if (row_bytes == 0) emulated::fail("there is no such map of boxes");
  if (map.swizzle_bits != 0 && row_bytes != 16u << map.swizzle_bits)
    emulated::fail("the rows of a box have " + std::to_string(row_bytes) + " bytes, the swizzle " +
                   std::to_string(16u << map.swizzle_bits));
  emulated::shared_bytes(to, bytes, 128);
  if (column < map.columns)
    for (uint64_t r = row; r < std::min<uint64_t>(uint64_t{row} + map.box_rows, map.rows); ++r)
      emulated::check_global(map.address + r * map.row_bytes + uint64_t{size} * column,
                             size * std::min<uint64_t>(map.box_columns, map.columns - column));
  emulated::copy_later(to, bytes, mbarrier, [=] {
    for (uint32_t r = 0; r < map.box_rows; ++r)
      for (uint32_t c = 0; c < map.box_columns; ++c) {
        uint64_t value = 0;
        const uint64_t from_row = uint64_t{row} + r, from_column = uint64_t{column} + c;
        if (from_row < map.rows && from_column < map.columns)
          std::memcpy(&value,
                      reinterpret_cast<const char*>(map.address) + from_row * map.row_bytes +
                          size * from_column,
                      size);
        const uint32_t at = swizzled(to + r * row_bytes + size * c, map.swizzle_bits);
        std::memcpy(emulated::shared_bytes(at, size, size), &value, size);
      }
  });
}
inline void box_load(uint32_t to, uint64_t map, uint32_t column, uint32_t row, uint32_t mbarrier,
                     uint64_t) {
  box_load(to, map, column, row, mbarrier);
}

inline void fence_gpu() { __threadfence(); }
inline void fence_system() { __threadfence(); }
inline void fence_proxy_async() {}
inline void fence_proxy_async_shared() {}

}  // namespace megavm::ptx
