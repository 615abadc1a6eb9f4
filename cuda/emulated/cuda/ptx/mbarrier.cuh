// The functions of cuda/ptx/mbarrier.cuh, emulated.
#pragma once

#include "cuda/integers.cuh"

namespace megavm::ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  emulated::mbarrier(barrier) = {0, static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) { emulated::arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulated::arrive(barrier, bytes);
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  return emulated::is_phase_over(barrier, parity);
}
inline bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  return emulated::is_phase_over(barrier, parity);
}

}  // namespace megavm::ptx
