// What the loader's copies cost on a Hopper GPU: cycles of a step of a matrix product with nothing
// but the copies (instructions/product/matrix_pages.cuh). $CU is this file:
//
//   nvcc -O3 -std=c++20 -I. -gencode=arch=compute_90a,code=sm_90a $CU -o copy_costs && ./copy_costs
//
// A warp fills a ring of steps: a box of x (128 rows of 64 columns, 128-byte swizzle) and 256 rows
// of weights as they are stored (units of 8 rows), 48 KiB together. Another warp frees each step as
// soon as it has arrived. The numbers in brackets are the loader's cycles for a step: looking at a
// semaphore until the step is free, announcing the bytes, starting the copies.
//
// The second table has 8 tiles of rows on all SMs. Who multiplies the same weights or rows begins
// with the same step, or with any other one: do SMs share what comes from the second-level cache?
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace ptx = megavm::ptx;

constexpr uint32_t kSteps = 4;           // the ring has room for so many
constexpr uint32_t kXBytes = 16 * 1024;  // a box of x
constexpr uint32_t kStepBytes = 48 * 1024;
constexpr uint32_t kColumns = 4096, kXRows = 4096, kUnits = 3600;
constexpr uint32_t kUnitBytes = 8 * kColumns * 2;
constexpr uint32_t kGroups = 4;  // of 256 rows of weights, for each worker
constexpr uint32_t kMostSms = 256;

constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

struct Maps {
  CUtensorMap x, block, blocks;  // boxes of weights have 8 units, or 16
};

// How a step is copied: by a lane for each box, all by one lane, or with 16 units in a box.
enum class How : int { kLanes, kOneLane, kLargeBoxes };

struct Cycles {
  unsigned long long all, looking, announcing, starting;
};

// What the worker on an SM multiplies: a tile of the rows with one of `tiles` of each group of
// weights, from step `first` of every group on, `delay` cycles after the others.
struct Work {
  uint32_t row_tile, tile, tiles, first, delay;
};

__global__ void __launch_bounds__(64, 1)
    copies(const __grid_constant__ Maps maps, const Work* of_sm, uint32_t slots, How how,
           Cycles* cycles) {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  const Work work = of_sm[sm];
  extern __shared__ __align__(1024) char pages[];
  __shared__ uint64_t arrived[kSteps], finished[kSteps];
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x < kSteps) {
    ptx::mbarrier_init(ptx::shared_address(&arrived[threadIdx.x]), 1);
    ptx::mbarrier_init(ptx::shared_address(&finished[threadIdx.x]), 1);
  }
  ptx::fence_mbarrier_init();
  __syncthreads();
  const uint32_t steps = kGroups * kColumns / 64;
  const long long begin = clock64();
  while (clock64() - begin < work.delay) continue;
  uint32_t slot = 0, round = 0;
  const auto advance = [&] {
    if (++slot == slots) slot = 0, round ^= 1;
  };
  if (threadIdx.x >= 32) {
    for (uint32_t step = 0; step < steps; ++step, advance()) {
      while (!__all_sync(~0u, ptx::mbarrier_try_wait(ptx::shared_address(&arrived[slot]), round)))
        continue;
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&finished[slot]));
      __syncwarp();
    }
    if (lane == 0) cycles[blockIdx.x].all = clock64() - begin;
    return;
  }
  unsigned long long looking = 0, announcing = 0, starting = 0;
  const uint32_t x_row = work.row_tile * 128;
  for (uint32_t step = 0; step < steps; ++step, advance()) {
    const uint32_t group = step / (kColumns / 64), box = (step + work.first) % (kColumns / 64);
    const uint32_t unit = (group * work.tiles + work.tile) * 32 % (kUnits - 32);
    long long from = clock64();
    while (!__all_sync(
        ~0u, lane != 0 || ptx::mbarrier_try_wait(ptx::shared_address(&finished[slot]), round ^ 1)))
      continue;
    long long to = clock64();
    looking += to - from;
    const uint32_t semaphore = ptx::shared_address(&arrived[slot]),
                   page = ptx::shared_address(pages) + slot * kStepBytes;
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(semaphore, kStepBytes);
    __syncwarp();
    from = clock64();
    announcing += from - to;
    if (how == How::kLanes) {
      if (lane < 4)
        ptx::box_load(page + kXBytes + lane * 8192, reinterpret_cast<uint64_t>(&maps.block),
                      box * 128, unit + lane * 8, semaphore);
      if (lane == 4)
        ptx::box_load(page, reinterpret_cast<uint64_t>(&maps.x), box * 64, x_row, semaphore);
    } else if (lane == 0) {
      ptx::box_load(page, reinterpret_cast<uint64_t>(&maps.x), box * 64, x_row, semaphore);
      const uint32_t units = how == How::kOneLane ? 8 : 16;
      for (uint32_t i = 0; i < 32; i += units)
        ptx::box_load(page + kXBytes + i * 1024,
                      how == How::kOneLane ? reinterpret_cast<uint64_t>(&maps.block)
                                           : reinterpret_cast<uint64_t>(&maps.blocks),
                      box * 128, unit + i, semaphore);
    }
    __syncwarp();
    to = clock64();
    starting += to - from;
  }
  if (lane == 0) {
    cycles[blockIdx.x].looking = looking;
    cycles[blockIdx.x].announcing = announcing;
    cycles[blockIdx.x].starting = starting;
  }
}

template <class Result>
void check(Result result, const char* what) {
  if (static_cast<int>(result) == 0) return;
  std::fprintf(stderr, "%s: error %d\n", what, static_cast<int>(result));
  std::exit(1);
}

int main() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &query),
        "the driver has no tensor maps");
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  const auto map = [&](CUtensorMapDataType type, void* memory, uint64_t columns, uint64_t rows,
                       uint64_t row_bytes, uint32_t box_columns, uint32_t box_rows,
                       CUtensorMapSwizzle swizzle) {
    CUtensorMap made;
    const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {row_bytes};
    const cuuint32_t box[2] = {box_columns, box_rows}, ones[2] = {1, 1};
    check(encode(&made, type, 2, memory, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
          "a tensor map");
    return made;
  };
  char *x, *weights;
  check(cudaMalloc(&x, uint64_t{kXRows} * kColumns * 2), "memory for x");
  check(cudaMalloc(&weights, uint64_t{kUnits} * kUnitBytes), "memory for weights");
  check(cudaMemset(x, 1, uint64_t{kXRows} * kColumns * 2), "x");
  check(cudaMemset(weights, 1, uint64_t{kUnits} * kUnitBytes), "weights");
  const auto weight_map = [&](uint32_t units) {
    return map(CU_TENSOR_MAP_DATA_TYPE_UINT64, weights, kUnitBytes / 8, kUnits, kUnitBytes, 128,
               units, CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  const Maps maps = {map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x, kColumns, kXRows, kColumns * 2, 64,
                         128, CU_TENSOR_MAP_SWIZZLE_128B),
                     weight_map(8), weight_map(16)};
  check(cudaFuncSetAttribute(copies, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSteps * kStepBytes + 1024),
        "shared memory");
  int workers = 0;
  check(cudaDeviceGetAttribute(&workers, cudaDevAttrMultiProcessorCount, 0), "SMs");
  Cycles* cycles;
  check(cudaMalloc(&cycles, sizeof(Cycles) * workers), "memory for cycles");

  Work* of_sm;
  check(cudaMalloc(&of_sm, sizeof(Work) * kMostSms), "memory for the work");
  // Measure a scene in which work(sm) is the work of an SM: a line of the table.
  const auto measure = [&](const char* scene, const char* name, int count, How how,
                           uint32_t least_slots, auto&& work) {
    std::vector<Work> all;
    for (uint32_t sm = 0; sm < kMostSms; ++sm) all.push_back(work(sm));
    check(cudaMemcpy(of_sm, all.data(), sizeof(Work) * kMostSms, cudaMemcpyHostToDevice), "work");
    std::printf("%-21s %-20s", scene, name);
    for (uint32_t slots = least_slots; slots <= kSteps; ++slots) {
      std::vector<double> times;
      std::vector<Cycles> found(count);
      for (int i = 0; i < 5; ++i) {
        copies<<<count, 64, kSteps * kStepBytes + 1024>>>(maps, of_sm, slots, how, cycles);
        check(cudaDeviceSynchronize(), "the kernel");
        check(cudaMemcpy(found.data(), cycles, sizeof(Cycles) * count, cudaMemcpyDeviceToHost),
              "cycles");
        unsigned long long longest = 0;
        for (const Cycles& each : found) longest = std::max(longest, each.all);
        times.push_back(static_cast<double>(longest));
      }
      std::sort(times.begin(), times.end());
      const double steps = kGroups * kColumns / 64;
      std::printf(" | %u: %5.0f (%3.0f, %3.0f, %3.0f)", slots, times[2] / steps,
                  found[0].looking / steps, found[0].announcing / steps, found[0].starting / steps);
    }
    std::printf("\n");
  };

  struct Scene {
    const char* name;
    int workers;
    uint32_t row_tiles;
  };
  const Scene scenes[] = {{"one worker", 1, 1},
                          {"all, 1 tile of rows", workers, 1},
                          {"all, 2 tiles of rows", workers, 2},
                          {"all, 8 tiles of rows", workers / 8 * 8, 8}};
  const char* const names[] = {"a lane for each box", "one lane", "16 units in a box"};
  for (const Scene& scene : scenes)
    for (int how = 0; how < 3; ++how)
      measure(scene.name, names[how], scene.workers, static_cast<How>(how), 1, [&](uint32_t sm) {
        const uint32_t tiles = ceil_div(scene.workers, scene.row_tiles);
        return Work{sm % scene.row_tiles, sm / scene.row_tiles, tiles, 0, 0};
      });

  // SMs 2 i and 2 i + 1 are a TPC.
  const auto any_step = [](uint32_t number) {
    number *= 2654435761u;
    number ^= number >> 15;
    return number * 2246822519u >> 20;
  };
  const uint32_t tiles = ceil_div(workers, 8);
  const auto line = [&](const char* scene, const char* name, auto&& work) {
    measure(scene, name, workers, How::kLargeBoxes, kSteps, work);
  };
  std::printf("\n");
  line("all", "in the same step", [&](uint32_t sm) { return Work{sm % 8, sm / 8, tiles, 0, 0}; });
  line("each", "in any step",
       [&](uint32_t sm) { return Work{sm % 8, sm / 8, tiles, any_step(sm), 0}; });
  line("of the same weights", "in the same step",
       [&](uint32_t sm) { return Work{sm % 8, sm / 8, tiles, any_step(sm / 8), 0}; });
  line("of the same rows", "in the same step",
       [&](uint32_t sm) { return Work{sm % 8, sm / 8, tiles, any_step(sm % 8), 0}; });
  line("TPCs of the same rows", "in the same step", [&](uint32_t sm) {
    const uint32_t tpc = sm / 2;
    return Work{tpc % 8, tpc / 8 * 2 + sm % 2, tiles, any_step(tpc), 0};
  });
  for (const uint32_t delay : {0u, 100u, 300u, 600u, 1000u, 2000u}) {
    const std::string name = "one " + std::to_string(delay) + " cycles late";
    line("TPCs of one weight", name.c_str(), [&](uint32_t sm) {
      const uint32_t tpc = sm / 2;
      return Work{sm % 2 + tpc % 4 * 2, tpc / 4, tiles, any_step(tpc), sm % 2 * delay};
    });
  }
}
