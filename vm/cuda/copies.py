"""Copies between pinned memory and a GPU that start at once and keep Python's interpreter.

Copies of torch give the interpreter up, several times each. A launch that makes a dozen of them waits
as often to get it back, if other threads want it too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megavm.vm.cuda.compiler import compile_kernel
from megavm.vm.cuda.driver import Driver

ENTRY = "cuda/copies.cu"
THREADS = 256


class Words:
    """Words of a table and where they are in it, in memory of the host; pinned for a GPU.

    ``values`` int32 and ``places`` int64, [size]; ``value_array`` and ``place_array`` are the same for numpy.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size = size
        self.values = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.places = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self.value_array: npt.NDArray[np.int32] = self.values.numpy()
        self.place_array: npt.NDArray[np.int64] = self.places.numpy()
        # Arguments of launches, by kernel and table.
        self._arguments: dict[tuple[int, int], _Arguments] = {}

    def arguments(self, function: int, table: torch.Tensor) -> _Arguments:
        """The arguments of a kernel for these words; making them takes as long as a launch."""
        key = function, table.data_ptr()
        if key not in self._arguments:
            addresses = [tensor.data_ptr() for tensor in (self.values, table, self.places)]
            self._arguments[key] = _Arguments(addresses)
        return self._arguments[key]


class _Arguments:
    """Arguments of a kernel of ENTRY: ``count``, and ``address`` of the pointers to all of them."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self.count = ctypes.c_uint32()
        self._kept = *map(ctypes.c_void_p, addresses), self.count
        self._pointers = (ctypes.c_void_p * len(self._kept))(*map(ctypes.addressof, self._kept))
        self.address = ctypes.addressof(self._pointers)


class Copies:
    """Copies to and from one GPU, in the order of its default stream; they do not wait.

    Only ``send_beside`` has an order of its own. ``beside``: whether it reaches a kernel that runs.

    Call all methods where that is torch's current stream. Memory of the host is pinned, and whoever calls
    keeps it until the copy has run.
    """

    # With that variable a launch returns when it has ended.
    beside = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") in ("", "0")

    def __init__(self, device: torch.device) -> None:
        self._driver = driver = Driver(device.index or 0)
        self._torch_stream = torch.cuda.default_stream(device)
        self._stream = int(self._torch_stream.cuda_stream)
        # It does not wait for the default stream. Torch hands streams out in turn, those of high priority
        # apart from the others, which may have kernels.
        self._beside = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        cubin = compile_kernel("", entry=ENTRY).cubin
        self._gather = driver.function(cubin, "megavm_gather", 0)
        self._scatter = driver.function(cubin, "megavm_scatter", 0)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous words of the host to the GPU. Raises CudaError."""
        self._send(target, source, self._stream)

    def send_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``send`` without waiting for the kernel that runs, in the order of these copies alone."""
        self._send(target, source, int(self._beside.cuda_stream))

    def _send(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        with self._driver.current():
            self._driver.call(
                *("cuMemcpyHtoDAsync", target.data_ptr(), source.data_ptr()),
                *(source.nbytes, stream),
            )

    def gather(self, words: Words, table: torch.Tensor, count: int) -> None:
        """Bring the first ``count`` words from their places in an int32 table on the GPU. Raises CudaError."""
        self._start(self._gather, words, table, count)

    def scatter(self, words: Words, table: torch.Tensor, count: int) -> None:
        """Bring the first ``count`` words to their places in an int32 table on the GPU. Raises CudaError."""
        self._start(self._scatter, words, table, count)

    def _start(self, function: int, words: Words, table: torch.Tensor, count: int) -> None:
        if not count:
            return
        arguments = words.arguments(function, table)
        arguments.count.value = count
        with self._driver.current():
            self._driver.call(
                *("cuLaunchKernel", function, -(-count // THREADS), 1, 1, THREADS, 1, 1, 0),
                *(self._stream, arguments.address, 0),
            )

    def mark(self) -> Callable[[], None]:
        """Note the copies so far; the result waits for them. Both raise CudaError."""
        return self._driver.mark()

    def event(self) -> Any:
        """An event that knows its time."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._torch_stream)  # creates it
        return event

    def record(self, event: Any) -> None:
        """Record an event behind the work on the stream. Raises CudaError."""
        with self._driver.current():
            self._driver.call("cuEventRecord", event.cuda_event, self._stream)

    def is_over(self, event: Any) -> bool:
        """Whether the work before an event has ended; None stands for no work. Raises CudaError."""
        if event is None:
            return True
        with self._driver.current():
            return self._driver.is_over(event.cuda_event)

    def seconds(self, begin: Any, end: Any) -> float:
        """From one event to another; both are over. Raises CudaError."""
        with self._driver.current():
            return self._driver.seconds(begin.cuda_event, end.cuda_event)


class HostCopies:
    """Copies to and from an emulated GPU, whose memory is the host's."""

    beside = False  # the host runs the kernel itself

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Copies.send``."""
        target.copy_(source)

    def send_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Copies.send_beside``."""
        self.send(target, source)

    def gather(self, words: Words, table: torch.Tensor, count: int) -> None:
        """See ``Copies.gather``."""
        torch.index_select(table, 0, words.places[:count], out=words.values[:count])

    def scatter(self, words: Words, table: torch.Tensor, count: int) -> None:
        """See ``Copies.scatter``."""
        table.index_copy_(0, words.places[:count], words.values[:count])

    def mark(self) -> Callable[[], None]:
        """See ``Copies.mark``: all copies have run."""
        return lambda: None

    # Times of an emulated GPU mean nothing.

    def event(self) -> Any:
        """See ``Copies.event``: there is none."""

    def record(self, event: Any) -> None:
        """See ``Copies.record``."""

    def is_over(self, event: Any) -> bool:
        """See ``Copies.is_over``: false, so that no launch counts as late."""
        return False

    def seconds(self, begin: Any, end: Any) -> float:
        """See ``Copies.seconds``: none."""
        return 0.0
