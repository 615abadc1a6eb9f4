// The loader warp streams weights and KV rows through the ring of pages. It runs ahead of the
// consumers, across instructions, layers and tokens. Weights wait for nothing; data that other
// instructions produce waits for `ready`.
//
// Pages are taken in the order in which the consumers read them. If a matrix product (matrix.cuh)
// needs a page of its input before that is there, the page is taken all the same and its copy is
// *deferred*, so that the weights behind it are not held up. Whenever the loader waits for
// anything, it also looks for deferred copies that can begin.
#pragma once

#include "cuda/trace.cuh"

namespace megavm {

// A page of boxes of a matrix. A box is kBoxBytes bytes of some rows, row by row, with the 128-byte
// swizzle; the boxes of a page are neighbours in the matrix.
constexpr uint32_t kBoxRows = max_of(1, min_of(program::kMatrixRows, kPageBytes / kBoxRowBytes));
struct Boxes {
  uint64_t map;         // address of the matrix's map for boxes of kBoxRows rows
  uint32_t column;      // the first
  uint32_t end_column;  // boxes that begin there or later are zeros
  uint32_t row;         // the first
};

class Loader {
 public:
  static constexpr uint32_t kBeyond = 1u << 30;  // a column beyond any matrix

  __device__ __forceinline__ explicit Loader(const Launch& launch)
      : maps_(launch.maps),
        policy_(kKeepsWeights ? ptx::evict_normal_policy() : ptx::evict_first_policy()) {}

  // Wait for the next instruction to be resolved.
  __device__ __forceinline__ void wait_resolved() {
    is_ahead_ = false;
    wait(stage.resolved(), stage.phase);
  }

  // Take the next page of the ring; the following `copy` calls fill `bytes` of it.
  __device__ __forceinline__ void begin_page(uint32_t bytes) {
    if constexpr (kDefers) {
      if (is_ahead_) wait_ahead();
      page_ = begin_pages(1, bytes);
      return;
    }
    page_finished(next_.slot).wait(next_.phase ^ 1);
    // Keep few copies in flight: every other memory access of the SM queues behind them.
    while (in_flight_ >= window()) {
      page_arrived(landing_.slot).wait(landing_.phase);
      landing_.advance();
      --in_flight_;
    }
    ++in_flight_;
    if (lane_index() == 0)
      ptx::mbarrier_arrive_expect_tx(page_arrived(next_.slot).address(), bytes);
    page_ = next_;
    next_.advance();
  }

  // Start a copy into the page that was begun last.
  __device__ __forceinline__ void copy(uint32_t offset, uint64_t from, uint32_t bytes) {
    if (lane_index() == 0)
      ptx::bulk_load(page_.address() + offset, from, bytes, page_arrived(page_.slot).address(),
                     policy_);
  }

  // Take as many of the next pages as are free, at least one and at most `most`; one if pages are
  // copied ahead, or there are no matrix products. Lanes ascend by `mine`, the number of the page
  // among these that a lane fills, if that is below `most`. Every such page has lanes, of which one
  // says the `bytes` of all copies into it, and the others 0. Returns how many were taken.
  __device__ __forceinline__ uint32_t begin_free_pages(uint32_t most, uint32_t mine, uint32_t bytes,
                                                       PageCursor& page) {
    if constexpr (!kDefers) {
      begin_page(__reduce_max_sync(~0u, mine == 0 ? bytes : 0));
      page = page_;
      return 1;
    }
    if (is_ahead_) wait_ahead();
    most = is_ahead_ ? 1 : min_of(most, kPages);
    page = next_;
    if (mine < most) page.advance(mine);
    bool waits = false;
    wait_for(
        [&] {
          waits = mine < most && !page_finished(page.slot).is_over(page.phase ^ 1);
          return !waits || mine > 0;
        },
        [&] { page_finished(next_.slot).give_up(next_.phase ^ 1); });
    const uint32_t waiting = __ballot_sync(~0u, waits);
    const uint32_t count =
        waiting == 0 ? most : __shfl_sync(~0u, mine, __ffs(static_cast<int>(waiting)) - 1);
    if (mine < count && bytes > 0)
      ptx::mbarrier_arrive_expect_tx(page_arrived(page.slot).address(), bytes);
    __syncwarp();
    page_ = next_;
    page_.advance(count - 1);
    next_.advance(count);
    return count;
  }

  // Start this lane's copy into its page of those begun last.
  __device__ __forceinline__ void copy_own(const PageCursor& page, uint32_t offset, uint64_t from,
                                           uint32_t bytes) {
    ptx::bulk_load(page.address() + offset, from, bytes, page_arrived(page.slot).address(),
                   policy_);
  }

  // ---- Matrix products, and attention of runs, take pages together; lanes copy side by side.

  // Take the next `count` pages, a *step*. The semaphore of the first page counts the bytes of all.
  // Returns the first page.
  __device__ __forceinline__ PageCursor begin_pages(uint32_t count, uint32_t bytes) {
    if constexpr (!kDefers) {
      // Steps are not counted as copies in flight: wait for those that are.
      for (; in_flight_ > 0; --in_flight_, landing_.advance())
        page_arrived(landing_.slot).wait(landing_.phase);
      landing_.advance(count);
    }
    const uint32_t lane = lane_index();
    const PageCursor first = next_;
    PageCursor mine = first;
    mine.advance(lane);
    const Semaphore finished = page_finished(mine.slot);
    wait_for([&] { return lane >= count || finished.is_step_over(mine.phase ^ 1); },
             [&] { page_finished(first.slot).give_up(first.phase ^ 1); });
    if (lane < count)
      ptx::mbarrier_arrive_expect_tx(page_arrived(mine.slot).address(), lane == 0 ? bytes : 0);
    __syncwarp();
    next_.advance(count);
    return first;
  }

  // Copy `count` boxes into a page of the step that begins with `first`, as soon as the waits of
  // the instruction are over.
  __device__ __forceinline__ void copy_boxes(const PageCursor& first, const PageCursor& page,
                                             const Boxes& boxes, uint32_t count) {
    if (is_ready_) return issue(first.slot, page.slot, boxes, count);
    if (lane_index() == page.slot) {
      first_slot_ = first.slot;
      boxes_ = boxes;
      boxes_count_ = count;
      ready_slot_ = stage.slot;
      ready_phase_ = stage.phase;
      is_deferred_ = true;
    }
    __syncwarp();
  }

  // Start the copy of this lane's own box of weights into a page of the step that begins with
  // `first`, or of an input that is ready or a KV cache.
  // NOTE: the copies of a warp are started one after the other, each in about 50 cycles.
  __device__ __forceinline__ void copy_box(const PageCursor& first, const PageCursor& page,
                                           uint32_t offset, uint64_t map, uint32_t column,
                                           uint32_t row, bool is_input = false) const {
    const uint32_t to = page.address() + offset, arrived = page_arrived(first.slot).address();
    // NOTE: one policy for all lanes of an instruction.
    if (kKeepsWeights || is_input)
      ptx::box_load(to, map, column, row, arrived);
    else
      ptx::box_load(to, map, column, row, arrived, policy_);
  }

  // Whether the waits of the instruction are over, and all copies before it have been started.
  // Called when the pages of a step have been taken.
  __device__ __forceinline__ bool look_ready() {
    if (is_ready_) return true;
    is_ready_ = __all_sync(~0u, stage.ready().is_over(stage.phase) && !is_deferred_);
    if (is_ready_) {
      ptx::fence_proxy_async();
      // Occupies no registers while copies of ready inputs are started.
      is_deferred_ = false;
      boxes_ = {};
      first_slot_ = ready_slot_ = ready_phase_ = boxes_count_ = 0;
    }
    return is_ready_;
  }
  __device__ __forceinline__ void begin_instruction() { is_ready_ = false; }

  // Start all copies that are deferred. Called at the end of the queue.
  __device__ __forceinline__ void finish_deferred() {
    if constexpr (kDefers)
      while (__any_sync(~0u, is_deferred_)) {
        issue_deferred();
        if (__builtin_expect(is_stopping(), 0)) return;
      }
  }

  // Address of a map of a tensor: of an input for boxes of kBoxRows rows; of a weight, i for boxes
  // of i + 1 units; of a KV cache for boxes of tokens of a block.
  __device__ __forceinline__ uint64_t map_of(uint32_t handle, uint32_t map = 0) const {
    return maps_ + kMapBytes * (kMapsOfTensor * handle + map);
  }

  // Wait until data that other instructions produced may be copied. They wrote it with ordinary
  // stores and the copy engine reads it through the async proxy, so a proxy fence is needed.
  __device__ __forceinline__ void wait_ready() {
    wait(stage.ready(), stage.phase);
    ptx::fence_proxy_async();
  }

  // The same for rows that earlier steps wrote, which may be copied sooner. Until the waits of the
  // instruction are over, and while the consumers wait, only one page at a time is then begun.
  __device__ __forceinline__ void wait_earlier() {
    wait(stage.earlier(), stage.phase);
    ptx::fence_proxy_async();
    is_ahead_ = true;
    page_ = next_;  // which held another page a round before
    page_.phase ^= 1;
  }

  StageCursor stage;

 private:
  static constexpr bool kDefers = program::kMatrixRows > 0;
  // Whether several workers read the same weights, for different rows.
  static constexpr bool kKeepsWeights = kDefers && kBoxRows == kPageBytes / kBoxRowBytes;

  // Most copies of weights and KV rows in flight.
  static __device__ __forceinline__ uint32_t window() {
    return are_consumers_waiting() ? kWaitWindow : kWindow;
  }

  __device__ __forceinline__ void wait(const Semaphore& semaphore, uint32_t phase) {
    if constexpr (!kDefers) return semaphore.wait(phase);
    wait_for([&] { return semaphore.is_over(phase); }, [&] { semaphore.give_up(phase); });
  }

  // Wait until the page that was begun last has arrived, or the waits of the instruction are over
  // and the consumers do not wait.
  // NOTE: the worker may still be storing the results of the instruction before, and everything
  // that it reads and writes queues behind copies: with all pages in flight that takes longer by as
  // much as copying ahead brings.
  __device__ __forceinline__ void wait_ahead() {
    const auto is_ready = [&] {
      return stage.ready().is_over(stage.phase) && !are_consumers_waiting();
    };
    wait_for([&] { return page_arrived(page_.slot).is_over(page_.phase) || is_ready(); },
             [&] { page_arrived(page_.slot).give_up(page_.phase); });
    is_ahead_ = !__any_sync(~0u, is_ready());
  }

  // Wait until `is_over` holds for all lanes. Before that, and meanwhile, start deferred copies. If
  // the worker is stopping, `give_up` ends the warp.
  template <class IsOver, class GiveUp>
  __device__ __forceinline__ void wait_for(IsOver&& is_over, GiveUp&& give_up) {
    while (true) {
      issue_deferred();
      if (__all_sync(~0u, is_over())) return;
      if (__builtin_expect(is_stopping(), 0)) give_up();
    }
  }

  // Start the deferred copies of instructions whose waits are over. Lane i knows that of page i.
  __device__ __forceinline__ void issue_deferred() {
    if (!__any_sync(~0u, is_deferred_)) return;
    const Semaphore ready{SemaphoreKind::kStageReady, ready_slot_};
    const bool begins = is_deferred_ && ready.is_over(ready_phase_);
    uint32_t left = __ballot_sync(~0u, begins);
    if (left == 0) return;
    ptx::fence_proxy_async();
    if (begins) is_deferred_ = false;
    for (; left != 0; left &= left - 1) {
      const uint32_t slot = __ffs(left) - 1;
      const auto of_slot = [&](auto value) { return __shfl_sync(~0u, value, slot); };
      issue(of_slot(first_slot_), slot,
            {of_slot(boxes_.map), of_slot(boxes_.column), of_slot(boxes_.end_column),
             of_slot(boxes_.row)},
            of_slot(boxes_count_));
    }
    __syncwarp();
  }

  // Start the copies of boxes into a page of the step that begins with the page in `first_slot`.
  __device__ __forceinline__ void issue(uint32_t first_slot, uint32_t slot, const Boxes& boxes,
                                        uint32_t count) const {
    constexpr uint32_t kBoxBytes = kBoxRows * kBoxRowBytes;
    const uint32_t to = PageCursor{{slot, 0}}.address();
    const uint32_t arrived = page_arrived(first_slot).address();
    const auto column_of = [&](uint32_t box) {
      const uint32_t column = boxes.column + box * kBoxColumns;
      return column < boxes.end_column ? column : kBeyond;
    };
    const uint32_t box = lane_index();
    if (box < count)
      ptx::box_load(to + box * kBoxBytes, boxes.map, column_of(box), boxes.row, arrived);
  }

  PageCursor next_;         // the page to fill next
  PageCursor page_;         // the page begun last
  PageCursor landing_;      // the oldest page that may be in flight
  uint32_t in_flight_ = 0;  // pages issued whose arrival was not observed
  bool is_ahead_ = false;   // whether pages are copied before the waits of the instruction are over
  bool is_ready_ = false;   // whether the waits of the matrix product in progress are over
  bool is_deferred_ = false;
  uint32_t first_slot_ = 0;  // the step of the deferred copy begins there
  uint32_t ready_slot_ = 0;  // stage of the instruction that the deferred copy belongs to
  uint32_t ready_phase_ = 0;
  Boxes boxes_ = {};
  uint32_t boxes_count_ = 0;
  uint64_t maps_;
  uint64_t policy_;
};

}  // namespace megavm
