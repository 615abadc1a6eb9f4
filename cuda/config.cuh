// Sizes of the machine on the device. Memory sizes are declared in vm/config.py and
// vm/cuda/memory.py, and reach this file through isa.hpp and program.hpp. launch.hpp has the
// structs that the host passes to a launch.
#pragma once

#include "cuda/integers.cuh"
#include "isa.hpp"
#include "launch.hpp"

namespace megavm {

// Defaults of the constants in program.hpp. A constant that program.hpp declares in `program` hides
// the default.
namespace program_defaults {
constexpr uint32_t kAnyPartOfK = 0;       // whether some products multiply a part of K (split-K)
constexpr uint32_t kMaxAddends = 0;       // most other parts that a product adds to its own
constexpr uint32_t kAnyPartialPages = 0;  // whether rows of some weights do not fill whole pages
constexpr uint32_t kAnyRaggedK = 0;       // whether rows of some weights do not fill whole tiles
// Numbers of pages of units: bit i for i pages, the last bit for as many or more.
constexpr uint32_t kUnitPageCounts = 0;
constexpr uint32_t kSpanUnits = kBlockUnits;  // units that are multiplied chunk by chunk
constexpr uint32_t kAnyF32Weights = 0;
constexpr uint32_t kAnyProduct = 0;
constexpr uint32_t kAnyBias = 0;
// Rows that matrix products take at a time: 32, 64 or 128; 0: there are none.
constexpr uint32_t kMatrixRows = 0;
// Kinds of product inputs that occur: bit 2 * (is float32) + (is tagged).
constexpr uint32_t kAnyInputs = 0;
// Kinds of squares of product inputs that occur: bit (is tagged); bit 2: the number of squares of
// some rows is not a multiple of four.
constexpr uint32_t kAnySquares = 0;
// Whether the storer handles tagged words of some instructions: of dead rows, or all of them; and
// whether some begin only when it has found words that they read (tagged_rows.cuh).
constexpr uint32_t kAnyTaggedRows = 0;
constexpr uint32_t kAnyByMachine = 0;
// Several: the program runs on that many GPUs.
constexpr uint32_t kRanks = 1;
// Whether the order of additions must not depend on the number of workers or ranks.
constexpr uint32_t kFixedOrder = 0;
// Whether some instructions also store results scaled by a gain, for readers that normalise them.
constexpr uint32_t kAnyOutScaled = 0;
// The columns in each sum of squares that is stored: bits kUnitRows and kWideSquares.
constexpr uint32_t kSquaresUnits = 0;
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
constexpr bool kSingleRow = program::kGroupRows == 1;
// Registers per thread. Roles need more where the storer finishes products (one row).
constexpr uint32_t kRoleRegisters = kSingleRow ? 88 : 72;
constexpr uint32_t kConsumerRegisters = kSingleRow ? 200 : 216;
static_assert(4 * kLanes * kRoleRegisters + kNumConsumerThreads * kConsumerRegisters <=
                  65536 / kNumThreads / 8 * 8 * kNumThreads,
              "what a launch gives");

constexpr uint32_t kStages = kNumStages;  // instructions in flight in a worker
constexpr uint32_t kHintSlack = 2;  // a hint does not wait for the last 1 / kHintSlack writers
// Arrivals of a warp at a semaphore. One lane arrives, and polls, for the whole warp; __syncwarp
// orders the other lanes. racecheck would attribute the arrival to that lane alone, so
// scripts/sanitize sets kLanes here: every lane arrives and polls.
constexpr uint32_t kWarpArrivals = 1;
// Nanoseconds by which warps delay the stores of product results, multiplied by a number that
// differs between warps. Tests set it to expose readers that do not wait.
constexpr uint32_t kHoldStores = 0;
constexpr uint32_t kTileBytes = kUnitRows * kTileRowBytes;  // one fragment: 16 bytes per lane
static_assert(kTileBytes == 16 * kLanes && kTilesPerPage * kTileBytes == kPageBytes);
constexpr uint32_t kTilesPerWarp = kTilesPerPage / kNumConsumers;  // a warp's tiles of a page

// ---- Products. Rows are multiplied one *group* at a time. A *chunk* is the columns of the input
// that are held at a time; a *block* is the units whose sums are finished together. An input of
// several chunks is read once for a *span* of units, of one or several blocks.
constexpr bool kF32Weights = program::kAnyF32Weights != 0;
// Whether the storer finishes products while the consumers begin the next instruction.
constexpr bool kStorerFinishes = kSingleRow && program::kAnyProduct != 0;
constexpr uint32_t kElementBytes = kF32Weights ? 4 : 2;
constexpr uint32_t kTileColumns = kTileRowBytes / kElementBytes;
constexpr uint32_t kPageColumns = kTilesPerPage * kTileColumns;
constexpr uint32_t kGroupRows = program::kGroupRows;
constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
constexpr uint32_t round_up(uint32_t a, uint32_t b) { return ceil_div(a, b) * b; }
constexpr uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }
constexpr uint32_t max_of(uint32_t a, uint32_t b) { return a < b ? b : a; }
template <class... Sizes>
constexpr uint32_t largest_of(Sizes... sizes) {
  uint32_t largest = 0;
  ((largest = max_of(largest, sizes)), ...);
  return largest;
}
constexpr uint32_t kChunkPages = program::kChunkPages;  // a unit's pages in a chunk
// How many units a worker has decides how a span adds up its chunks, so it is a block where the
// order is fixed.
constexpr uint32_t kSpanUnits =
    kSingleRow || program::kFixedOrder ? kBlockUnits : program::kSpanUnits;
static_assert(kSpanUnits % kBlockUnits == 0 && kSpanUnits <= kMaxSpanUnits);
// Whether the pages of some unit leave this remainder if they are divided by `count`, or any.
constexpr bool any_pages_left(uint32_t count, uint32_t remainder) {
  for (uint32_t i = 1; i < kMostCountedPages; ++i)
    if (program::kUnitPageCounts >> i & 1 && i % count == remainder) return true;
  return program::kUnitPageCounts >> kMostCountedPages & 1;
}
constexpr bool any_pages_left(uint32_t count) {
  for (uint32_t i = 1; i < count; ++i)
    if (any_pages_left(count, i)) return true;
  return false;
}
constexpr bool kOneChunk = kChunkPages == program::kUnitPages;  // a chunk holds any whole input
// The input of one row lies in shared memory (the panel), that of several rows in registers.
constexpr uint32_t kPanelBytes = program::kPanelBytes;
static_assert(kPanelBytes >= (kSingleRow ? kChunkPages * kPageColumns * kElementBytes : 0));
constexpr uint32_t kPartialFloats = program::kPartialFloats;
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

// Most page copies in flight, and most while the consumers wait for results of other workers. A
// window larger than the ring would let the loader wait for a page whose slot is already reused.
// With matrix products, which poll less, the ring is the only limit.
constexpr uint32_t kWindow = min_of(kPages, kSingleRow ? 5 : 3);
constexpr uint32_t kWaitWindow = 2;
static_assert(kWindow <= kPages && kWaitWindow <= kPages);

// Whether rows that earlier steps wrote are copied before the waits of their reader are over.
// Without matrix products most of these readers wait for earlier steps only.
constexpr bool kCopiesAhead = program::kMatrixRows > 0;

// Weight pages that consumers take into registers while their input is in flight.
constexpr uint32_t kPreload = 4;
static_assert(kPreload <= kPages);

}  // namespace megavm
