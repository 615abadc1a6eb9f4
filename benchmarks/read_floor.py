"""The floor of decoding: the time that the GPU takes to read a number of bytes.

All SMs stream a buffer in two ways: with 16-byte loads, several in flight per thread, and with bulk
copies into shared memory. The floor is the faster of the two.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

# Rounds of a ceiling: as many as half a second has, of so many passes over the buffer.
PASSES, ROUNDS, SECONDS = 8, 8, 0.5

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512, 2)
    load_all(const uint4* data, unsigned long long count, unsigned int* sink) {
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned int seen = 0;
  unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(data + i + j * stride));
#pragma unroll
    for (int j = 0; j < 8; ++j) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += stride) seen ^= data[i].x;
  if (seen == 0x12345678u) *sink = seen;
}

// One thread of a block keeps five copies of 8 KiB in flight.
extern "C" __global__ void __launch_bounds__(32)
    copy_all(const uint4* data, unsigned long long count, unsigned int*) {
  constexpr unsigned int kBytes = 8192, kSlots = 5;
  __shared__ __align__(128) unsigned char pages[kSlots * kBytes];
  __shared__ __align__(8) unsigned long long arrived[kSlots];
  if (threadIdx.x != 0) return;
  const auto shared = [](const void* p) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(p));
  };
  for (unsigned int i = 0; i < kSlots; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&arrived[i])));
  asm volatile("fence.mbarrier_init.release.cluster;");
  const unsigned long long whole = count * 16 / kBytes;
  const unsigned long long mine = (whole + gridDim.x - 1 - blockIdx.x) / gridDim.x;
  for (unsigned long long n = 0; n < mine + kSlots; ++n) {
    const unsigned int slot = n % kSlots, barrier = shared(&arrived[slot]);
    if (n >= kSlots) {
      unsigned int done = 0;
      while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(static_cast<unsigned int>(n / kSlots - 1) & 1)
            : "memory");
    }
    if (n >= mine) continue;
    const char* from = reinterpret_cast<const char*>(data) + (n * gridDim.x + blockIdx.x) * kBytes;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(kBytes)
                 : "memory");
    const unsigned int page = shared(pages + slot * kBytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1], %2, [%3];" ::"r"(page), "l"(from), "r"(kBytes), "r"(barrier)
        : "memory");
  }
}
"""


class ReadFloor:
    """Measures streaming reads of a buffer of ``size`` bytes on the GPU."""

    def __init__(self, size: int) -> None:
        from cuda.core import Device, LaunchConfig, Program, ProgramOptions

        self.size = size // 16 * 16
        self._device = Device(torch.cuda.current_device())
        self._device.set_current()
        program = Program(SOURCE, "c++", ProgramOptions(arch="sm_90a", std="c++17"))
        cubin = program.compile("cubin")
        workers = torch.cuda.get_device_properties(0).multi_processor_count
        self._ways = (
            (cubin.get_kernel("load_all"), LaunchConfig(grid=2 * workers, block=512)),
            (cubin.get_kernel("copy_all"), LaunchConfig(grid=4 * workers, block=32)),
        )
        self._data = torch.randint(0, 256, (self.size,), dtype=torch.uint8, device="cuda")
        self._sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def bandwidth(self) -> float:
        """Bytes per second of a read of the whole buffer."""
        return self.size / self.microseconds(self.size) * 1e6

    def ceiling(self) -> dict[str, float]:
        """``bandwidth`` and ``bandwidth_median`` of a trace's machine, as bytes/s.

        Those of the fastest and of the median of the rounds of half a second, of several passes
        over the buffer each.
        """
        size = PASSES * self.size
        rounds = max(ROUNDS, int(SECONDS * 1e6 / self.microseconds(size, rounds=1)))
        times = self._times(size, rounds)
        return {
            "bandwidth": size / min(times) * 1e6,
            "bandwidth_median": size / statistics.median(times) * 1e6,
        }

    def microseconds(self, size: int, rounds: int = 50) -> float:
        """Median time to read ``size`` bytes: full passes over the buffer and a partial one."""
        return statistics.median(self._times(size, rounds))

    def _times(self, size: int, rounds: int) -> list[float]:
        """Microseconds of every round of the faster way to read ``size`` bytes."""
        from cuda.core import Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)

        def read(kernel: Any, config: Any) -> None:
            left = size
            while left > 0:
                part = min(left, self.size)
                arguments: tuple[Any, ...] = (self._data.data_ptr(), part // 16)
                launch(stream, config, kernel, *arguments, self._sink.data_ptr())
                left -= part

        ways = (gpu_times(functools.partial(read, *way), rounds) for way in self._ways)
        return min(ways, key=statistics.median)


def time_gpu(work: Any, rounds: int, warm_up: int = 5) -> float:
    """Median microseconds of ``work`` by GPU events."""
    return statistics.median(gpu_times(work, rounds, warm_up))


def gpu_times(work: Any, rounds: int, warm_up: int = 5) -> list[float]:
    """Microseconds of every round of ``work`` by GPU events."""
    for _ in range(warm_up):
        work()
    times: list[float] = []
    new_event: Any = torch.cuda.Event
    for _ in range(rounds):
        begin, end = (new_event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return times
