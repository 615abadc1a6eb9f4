// Sizes of the machine on the device. Those of memory come from vm/config.py and vm/cuda/memory.py,
// by way of isa.hpp and of the program's header; what the host hands over is in launch.hpp.
#pragma once

#include "cuda/integers.cuh"
#include "isa.hpp"
#include "launch.hpp"

namespace megavm {

// What a program does not say. A name in `program` itself hides the one from here.
namespace program_defaults {
constexpr uint32_t kAnyPartOfK = 0;       // whether some products are of parts
constexpr uint32_t kMaxAddends = 0;       // other parts that a product adds to its own
constexpr uint32_t kAnyPartialPages = 0;  // whether some do not fill pages
constexpr uint32_t kAnyRaggedK = 0;       // whether some do not fill tiles
constexpr uint32_t kAnyOddPages = 0;      // whether some have an odd number of pages
constexpr uint32_t kAnyF32Weights = 0;
constexpr uint32_t kAnyProduct = 0;
constexpr uint32_t kAnyBias = 0;
constexpr uint32_t kAnyInputs = 0;  // bit 2 * (float32) + (tagged) for the inputs of products
constexpr uint32_t kAnySquares =
    0;  // bit (tagged) for squares of inputs; bit 2: some are not fours
constexpr uint32_t kAnyByMachine = 0;  // whether the storer sees to all words of some instructions
constexpr uint32_t kAnyOutScaled = 0;  // whether some results are normalised by those who read them
}  // namespace program_defaults
namespace program {
using namespace program_defaults;
}

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

constexpr uint32_t kLanes = 32;
constexpr uint32_t kNumConsumers = kNumConsumerWarps;
static_assert(kNumWarps == kNumConsumers + 4, "a warpgroup of roles beside the consumers");
static_assert(kNumThreads == kNumWarps * kLanes);
constexpr uint32_t kNumConsumerThreads = kNumConsumers * kLanes;
constexpr bool kSingleRow = program::kMaxRows <= 1;
constexpr uint32_t kRoleRegisters = kSingleRow ? 88 : 72;  // one row: the storer finishes products
constexpr uint32_t kConsumerRegisters = kSingleRow ? 200 : 216;
static_assert(4 * kLanes * kRoleRegisters + kNumConsumerThreads * kConsumerRegisters <=
                  65536 / kNumThreads / 8 * 8 * kNumThreads,
              "what a launch gives");

constexpr uint32_t kStages = kNumStages;  // instructions in flight in a worker
constexpr uint32_t kHintSlack = 2;  // of the writers of a tensor, one in so many need not be done
// How often a warp arrives at a semaphore when its lanes are done with something: one lane arrives,
// and looks, for all, with __syncwarp between. racecheck takes that for its own alone; for it
// (scripts/sanitize) all lanes do.
constexpr uint32_t kWarpArrivals = 1;
// Nanoseconds by which warps hold results of products back, each warp others, before they store
// them: for tests of what must not come too early.
constexpr uint32_t kHoldStores = 0;
constexpr uint32_t kTileBytes = kUnitRows * kTileRowBytes;  // one fragment of 16 bytes a lane
static_assert(kTileBytes == 16 * kLanes && kTilesPerPage * kTileBytes == kPageBytes);
constexpr uint32_t kTilesPerWarp = kTilesPerPage / kNumConsumers;  // of a page

// ---- Products. A *group* of rows is multiplied at a time, with all of its columns or a *chunk* of
// them; the sums of a *block* of units are finished together.
constexpr bool kF32Weights = program::kAnyF32Weights != 0;
// Whether the storer finishes products, while the consumers turn to the next instruction.
constexpr bool kStorerFinishes = kSingleRow && program::kAnyProduct != 0;
constexpr uint32_t kElementBytes = kF32Weights ? 4 : 2;
constexpr uint32_t kTileColumns = kTileRowBytes / kElementBytes;
constexpr uint32_t kPageColumns = kTilesPerPage * kTileColumns;
constexpr uint32_t kGroupRows = program::kGroupRows;
static_assert(kGroupRows == (kSingleRow ? 1 : kMaxGroupRows));
constexpr uint32_t kMaxChunkPages = kSingleRow ? kRowChunkPages : kRowsChunkPages;
constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
constexpr uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }
constexpr uint32_t max_of(uint32_t a, uint32_t b) { return a < b ? b : a; }
constexpr uint32_t kChunkPages = program::kChunkPages;          // of a unit in a chunk
constexpr bool kOneChunk = kChunkPages == program::kUnitPages;  // holds all of any input
// One row lies in shared memory, several in registers.
constexpr uint32_t kPanelBytes = program::kPanelBytes;
static_assert(kPanelBytes >= (kSingleRow ? kChunkPages * kPageColumns * kElementBytes : 0));
constexpr uint32_t kPartialFloats = program::kPartialFloats;
static_assert(kPartialFloats >= kBlockUnits * kNumConsumers * kGroupRows * kUnitRows);
constexpr uint32_t kScales = program::kScales;
static_assert(kSingleRow || kScales >= kGroupRows);

// ---- Shared memory, in bytes from its start.
constexpr uint32_t kScratch = program::kScratchBytes;
constexpr uint32_t kPages = program::kPages;
static_assert(kPages >= kMinPages && kPages <= kNumPages, "no room for pages beside scratch");
constexpr uint32_t kScratchAt = kPages * kPageBytes;
constexpr uint32_t kStagesAt = kScratchAt + kScratch;
static_assert(kStagesAt % kInstructionBytes == 0, "instructions are aligned to their size");
constexpr uint32_t kSemaphoresAt = kStagesAt + kStages * kStageBytes;
constexpr uint32_t kCurrentAt = kSemaphoresAt + kSemaphoreBytes;
constexpr uint32_t kControlAt = kCurrentAt + kNumWarps * kCurrentBytes;
static_assert(kControlAt % 16 == 0 && kControlAt + kControlBytes <= kSharedBytes);
static_assert(kControlAt + kControlBytes == kStagesAt + kFixedBytes, "as the host counts");

// Pages issued, not yet landed; and while consumers wait for what other workers produce. In a ring
// of fewer, the loader would look for a page in the phase of a later one.
constexpr uint32_t kWindow = min_of(kPages, kSingleRow ? 5 : 3);
constexpr uint32_t kWaitWindow = 2;
static_assert(kWindow <= kPages && kWaitWindow <= kPages);

// Pages that consumers hold in registers while their input is on its way.
constexpr uint32_t kPreload = 4;
static_assert(kPreload <= kPages);

}  // namespace megavm
