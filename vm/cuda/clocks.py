"""How far the clocks of a machine's GPUs are apart: up to 300 us, and they drift by microseconds a second."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megavm.vm.cuda.arena import Arena
from megavm.vm.cuda.compiler import ROOT, compile_kernel
from megavm.vm.cuda.driver import Driver

ENTRY, KERNEL_NAME = "cuda/clocks.cu", "megavm_clocks"
ROUNDS = 200
TIMEOUT = 1_000_000_000  # ns that a word may take


@dataclass(frozen=True)
class Offset:
    """The clock of a rank less that of rank 0, and how much more or less it may be, in ns."""

    nanoseconds: int
    uncertainty: int


class Clocks:
    """Compares the clock of every rank with that of rank 0, by a ping-pong of words (Cristian 1989,
    "Probabilistic clock synchronization", doi:10.1007/BF01784024: the shortest trip counts)."""

    def __init__(self, drivers: Sequence[Driver], arena: Arena, root: Path = ROOT) -> None:
        self._drivers = drivers
        cubin = compile_kernel("", root=root, entry=ENTRY).cubin
        loaded = {driver: driver.function(cubin, KERNEL_NAME, 0) for driver in set(drivers)}
        self._functions = [loaded[driver] for driver in drivers]
        new_stream: Any = torch.cuda.Stream
        self._streams = [new_stream(driver.device) for driver in drivers]
        self._words = arena.allocate((2,), torch.int64)
        self._found = torch.zeros(2, dtype=torch.int64, device=self._words[0].device)
        self._first = 1

    def measure(self) -> list[Offset]:
        """The offset of every rank; that of rank 0 is 0. Raises RuntimeError when a GPU does not answer."""
        offsets = [Offset(0, 0)]
        for rank in range(1, len(self._drivers)):
            self._found.zero_()
            torch.cuda.synchronize(self._found.device)
            own, peer = (self._words[r].data_ptr() for r in (0, rank))
            first, self._first = self._first, (self._first + ROUNDS) & 0xFF
            self._start(0, own, peer + 8, 1, first)
            self._start(rank, peer + 8, own, 0, first)
            for either in (0, rank):
                self._streams[either].synchronize()
            apart, trip = self._found.tolist()
            if trip == 0:
                raise RuntimeError(f"the GPU of rank {rank} did not answer within {TIMEOUT} ns")
            offsets.append(Offset(apart, -(-trip // 2)))
        return offsets

    def _start(self, rank: int, own: int, peer: int, leads: int, first: int) -> None:
        values: list[Any] = [
            ctypes.c_uint64(own),
            ctypes.c_uint64(peer),
            ctypes.c_uint32(leads),
            ctypes.c_uint32(ROUNDS),
            ctypes.c_uint32(first),
            ctypes.c_uint64(TIMEOUT),
            ctypes.c_uint64(self._found.data_ptr()),
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with self._drivers[rank].current():
            self._drivers[rank].call(
                *("cuLaunchKernel", self._functions[rank], 1, 1, 1, 1, 1, 1, 0),
                *(self._streams[rank].cuda_stream, ctypes.addressof(pointers), 0),
            )
