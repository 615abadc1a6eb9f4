// The loader warp streams weights and KV rows through the ring of pages. It runs ahead of the
// consumers, across instructions, layers and tokens. Weights wait for nothing; data that other
// instructions produce waits for `ready`.
#pragma once

#include "cuda/trace.cuh"

namespace megavm {

class Loader {
 public:
  __device__ __forceinline__ Loader() : policy_(ptx::evict_first_policy()) {}

  // Take the next page of the ring; the following `copy` calls fill `bytes` of it.
  __device__ __forceinline__ void begin_page(uint32_t bytes) {
    page_finished(next_.slot).wait(next_.phase ^ 1);
    // Keep few copies in flight: every other memory access of the SM queues behind them.
    while (in_flight_ >= (are_consumers_waiting() ? kWaitWindow : kWindow)) {
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

  // Wait until data that other instructions produced may be copied. They wrote it with ordinary
  // stores and the copy engine reads it through the async proxy, so a proxy fence is needed.
  __device__ __forceinline__ void wait_ready() {
    stage.ready().wait(stage.phase);
    ptx::fence_proxy_async();
  }

  StageCursor stage;

 private:
  PageCursor next_;         // the page to fill next
  PageCursor page_;         // the page begun last
  PageCursor landing_;      // the oldest page that may be in flight
  uint32_t in_flight_ = 0;  // pages issued whose arrival the loader has not observed
  uint64_t policy_;
};

}  // namespace megavm
