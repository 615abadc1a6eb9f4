"""The floor of decoding: how long the GPU takes to read so many bytes, and do nothing with them.

A streaming read with 16-byte loads by all SMs, several loads in flight per thread, over a buffer of
its own.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512, 2)
    read_all(const uint4* data, unsigned long long count, unsigned int* sink) {
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
"""


class ReadFloor:
    """Measures streaming reads. Holds a buffer of ``size`` bytes on the GPU."""

    def __init__(self, size: int) -> None:
        from cuda.core import Device, LaunchConfig, Program, ProgramOptions

        self.size = size // 16 * 16
        self._device = Device(torch.cuda.current_device())
        self._device.set_current()
        program = Program(SOURCE, "c++", ProgramOptions(arch="sm_90a", std="c++17"))
        self._kernel = program.compile("cubin").get_kernel("read_all")
        workers = torch.cuda.get_device_properties(0).multi_processor_count
        self._config = LaunchConfig(grid=2 * workers, block=512)
        self._data = torch.randint(0, 256, (self.size,), dtype=torch.uint8, device="cuda")
        self._sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def microseconds(self, size: int, rounds: int = 50) -> float:
        """Median time to read ``size`` bytes: whole passes over the buffer and a part of one."""
        from cuda.core import Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)

        def read() -> None:
            left = size
            while left > 0:
                part = min(left, self.size)
                arguments: tuple[Any, ...] = (self._data.data_ptr(), part // 16)
                launch(stream, self._config, self._kernel, *arguments, self._sink.data_ptr())
                left -= part

        return time_gpu(read, rounds)


def time_gpu(work: Any, rounds: int, warm_up: int = 5) -> float:
    """Median microseconds of ``work`` by GPU events."""
    for _ in range(warm_up):
        work()
    times = []
    new_event: Any = torch.cuda.Event
    for _ in range(rounds):
        begin, end = (new_event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return float(statistics.median(times))
