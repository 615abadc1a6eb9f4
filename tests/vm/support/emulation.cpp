// Small kernels for tests/vm/test_emulated_gpu.py: what the emulation refuses, and its matrix
// instructions with operands and results as plain matrices.
#include "cuda/emulated/builtins.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace {

namespace ptx = megavm::ptx;

constexpr uint32_t kShared = 64 * 1024;
thread_local unsigned char shared_memory[kShared] __attribute__((aligned(1024)));

const char* run(uint32_t threads, emulated::Body body, const void* arguments) {
  emulated::failure().failed = false;
  std::thread([=] {
    emulated::run_worker(
        0, 1, threads, shared_memory, kShared, 1, body, arguments, [](uint32_t) {},
        [] { return std::string(); });
  }).join();
  return emulated::failure().failed ? emulated::failure().text.c_str() : "";
}

constexpr uint32_t kBase = emulated::kSharedBase;

struct Matrices {
  const float *a, *b;  // [64][16] (mma: [16][16]) and [N][16]
  float* d;
};

float of_bf16(const float* matrix, uint32_t row, uint32_t column) {
  return matrix[16 * row + column];
}

}  // namespace

extern "C" {

const char* diverging_lanes() {
  return run(
      32,
      [](const void*) {
        if (emulated::lane_number() < 5)
          __ballot_sync(~0u, true);
        else
          __syncwarp();
      },
      nullptr);
}

const char* different_waits() {
  return run(
      128,
      [](const void*) {
        ptx::wgmma_fence();
        ptx::wgmma_commit();
        if (ptx::thread_index() / 32 == 2)
          ptx::wgmma_wait<0>();
        else
          ptx::wgmma_wait<0>();
      },
      nullptr);
}

const char* second_barrier() {
  return run(
      64,
      [](const void*) {
        __syncthreads();
        if (emulated::lane_number() < 32) __syncthreads();
      },
      nullptr);
}

const char* different_operands() {
  return run(
      128,
      [](const void*) {
        float sums[8] = {};
        ptx::wgmma_fence();
        ptx::wgmma<16>(sums, ptx::thread_index() / 32, 0);
        ptx::wgmma_commit();
      },
      nullptr);
}

const char* misaligned_load() {
  return run(32, [](const void*) { ptx::load_shared4(kBase + 8); }, nullptr);
}

const char* load_beyond_shared_memory() {
  return run(32, [](const void*) { ptx::load_shared(kBase + kShared); }, nullptr);
}

const char* one_arrival_too_many() {
  return run(
      32,
      [](const void*) {
        if (emulated::lane_number() == 0) ptx::mbarrier_init(kBase, 8);
        __syncwarp();
        // The phase is over with the eighth arrival. No warp waits for it, but the next phase takes
        // eight more.
        if (emulated::lane_number() == 0) emulated::mbarrier(kBase).missing = 0;
        __syncwarp();
        ptx::mbarrier_arrive(kBase);
      },
      nullptr);
}

// Lanes 8 and 9 store an element each of the same tagged word, in one step or one after the other.
const char* elements_of_one_word(uint64_t* word, bool in_turn) {
  struct Arguments {
    uint64_t address;
    bool in_turn;
  };
  const Arguments arguments = {reinterpret_cast<uint64_t>(word), in_turn};
  return run(
      32,
      [](const void* given) {
        const Arguments& all = *static_cast<const Arguments*>(given);
        for (uint32_t turn = 8; turn < 10; ++turn) {
          if (emulated::lane_number() == turn) {
            const uint32_t old = ptx::load_rewritten(all.address);
            ptx::store_word(all.address, old | 1u << turn);
          }
          if (all.in_turn) __syncwarp();
        }
      },
      &arguments);
}

// Whether a copy is garbage until its semaphore says that it has arrived, and right then.
const char* early_read(const uint32_t* words, uint32_t* early, uint32_t* late) {
  struct Arguments {
    const uint32_t* words;
    uint32_t *early, *late;
  };
  const Arguments arguments = {words, early, late};
  return run(
      32,
      [](const void* given) {
        const Arguments& all = *static_cast<const Arguments*>(given);
        if (emulated::lane_number() != 0) return;
        ptx::mbarrier_init(kBase, 1);
        ptx::mbarrier_arrive_expect_tx(kBase, 16);
        ptx::bulk_load(kBase + 1024, reinterpret_cast<unsigned long long>(all.words), 16, kBase, 0);
        *all.early = ptx::load_shared(kBase + 1024);
        while (!ptx::mbarrier_try_wait(kBase, 0)) continue;
        *all.late = ptx::load_shared(kBase + 1024);
      },
      &arguments);
}

// d [16][8] = a [16][16] . b [8][16]^T, the operands by ldmatrix from rows of 32 bytes.
const char* multiply_fragments(const Matrices* matrices) {
  return run(
      32,
      [](const void* given) {
        const auto& [a, b, d] = *static_cast<const Matrices*>(given);
        const uint32_t lane = emulated::lane_number();
        for (uint32_t i = lane; i < 16 * 16; i += 32) {
          const auto put = [&](uint32_t at, float value) {
            const auto bits = static_cast<unsigned short>(ptx::bits_of_bf16(value));
            std::memcpy(emulated::shared_bytes(kBase + at + 2 * i, 2, 2), &bits, 2);
          };
          put(0, of_bf16(a, i / 16, i % 16));
          if (i < 8 * 16) put(1024, of_bf16(b, i / 16, i % 16));
        }
        __syncwarp();
        const uint32_t matrix = lane / 8, row = lane % 8;
        const ptx::Words4 of_a =
            ptx::load_matrices(kBase + (row + matrix % 2 * 8) * 32 + matrix / 2 * 16);
        const ptx::Words4 of_b = ptx::load_matrices(kBase + 1024 + row * 32 + matrix % 2 * 16);
        float sums[4] = {};
        ptx::mma(sums, of_a, of_b.x, of_b.y);
        for (uint32_t i = 0; i < 4; ++i)
          d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
      },
      matrices);
}

// d [64][16] = a [64][16] . b [16][16]^T by wgmma: a in the 64-byte swizzle, b in that of 128
// bytes.
const char* multiply_warpgroup(const Matrices* matrices) {
  return run(
      128,
      [](const void* given) {
        const auto& [a, b, d] = *static_cast<const Matrices*>(given);
        const uint32_t thread = ptx::thread_index();
        for (uint32_t i = thread; i < 64 * 16; i += 128) {
          const uint32_t row = i / 16, column = i % 16;
          const auto put = [&](uint32_t at, float value) {
            const auto bits = static_cast<unsigned short>(ptx::bits_of_bf16(value));
            std::memcpy(emulated::shared_bytes(at, 2, 2), &bits, 2);
          };
          // A row of 64 bytes has four chunks of 16; row r has chunk c where chunk c ^ (r / 2 % 4)
          // was.
          put(kBase + row * 64 + (column / 8 ^ row / 2 % 4) * 16 + column % 8 * 2,
              of_bf16(a, row, column));
          if (row < 16)
            put(kBase + 8192 + row * 128 + (column / 8 ^ row % 8) * 16 + column % 8 * 2,
                of_bf16(b, row, column));
        }
        __syncthreads();
        float sums[8] = {};
        using enum ptx::OperandSwizzle;
        ptx::wgmma_fence();
        ptx::wgmma<16>(sums, ptx::operand_descriptor<k64Bytes>(ptx::operand_start(kBase), 0, 512),
                       ptx::operand_descriptor<k128Bytes>(ptx::operand_start(kBase), 8192, 1024));
        ptx::wgmma_commit();
        const bool early = sums[0] != 0.0f;  // the emulation computes late
        ptx::wgmma_wait<0>();
        const uint32_t lane = thread % 32, warp = thread / 32;
        for (uint32_t i = 0; i < 8; ++i)
          d[(16 * warp + lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] =
              early ? NAN : sums[i];
      },
      matrices);
}
}
