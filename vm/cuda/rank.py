"""The part of a program that is on the GPU of one rank: its tables, and its share of every launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megavm.vm.config import NONE, NUM_THREADS, NUM_WARPS, SHARED_BYTES
from megavm.vm.cuda.boxes import operand_maps
from megavm.vm.cuda.faults import FAULT_RECORD, Record
from megavm.vm.cuda.launch import (
    DTYPE_SHIFT,
    GATHERED_SHIFT,
    LAUNCH,
    LAYOUT_SHIFT,
    RANK_SHIFT,
    TAGGED_SHIFT,
    TENSOR,
)
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import TensorSpec

if TYPE_CHECKING:
    from megavm.vm.cuda.machine import CudaMachine

RECORD_WORDS = FAULT_RECORD.size // 4
LOAD_BYTES = 16  # most that a thread loads at once

LaunchParameters = LAUNCH.ctypes_class()


class Tables:
    """The tables that are the same for all ranks of a program, on the host."""

    def __init__(self, program: Program) -> None:
        queues = program.queues[:1] if program.dynamic else program.queues
        self.order = np.concatenate([*queues, np.empty(0, np.int32)])
        begin = np.cumsum([0, *map(len, queues)])
        if not program.dynamic:
            begin = np.concatenate([begin, np.full(program.workers + 1 - len(begin), begin[-1])])
        self.begin = begin
        self.exchanges = program.exchanges
        self.signals = np.concatenate([program.signals, self.exchanges.signals])
        exchanges_words = any(spec.tagged for spec in program.tensors)
        # Workers signal them at the end of a step; those of a common queue after each instruction.
        self.step_barriers = len(self.signals) if exchanges_words else NONE
        each = len(self.order) if program.dynamic else sum(1 for q in queues if len(q))
        self.step_signals = each * program.ranks
        self.num_counters = len(self.signals) + 2 * exchanges_words


class RankPart:
    """The part of an executable on one GPU."""

    def __init__(
        self,
        machine: CudaMachine,
        program: Program,
        memory: Memory,
        rank: int,
        function: Any,
        tables: Tables,
        counters: torch.Tensor,
        box_rows: int | None,
    ) -> None:
        self.memory = memory
        self.rank = rank
        self.driver = machine.drivers[rank]
        self._program = program
        self._box_rows = box_rows
        self._side = machine.side_streams[rank]
        self._function = function
        self._device = memory.device
        exchanges = tables.exchanges
        self._instructions = self.upload(program.words[tables.order])
        self._queue_begin = self.upload(tables.begin.astype(np.uint32))
        self.exchanges = self.upload(exchanges.table[tables.order])
        self._regions = self.upload(exchanges.regions)
        self._counts = self.upload(exchanges.counts)
        self._signals = self.upload(tables.signals)
        self._ticket = self.driver.zeros(1)
        # Counters of barriers and hints, then the abort word.
        self.counters = counters
        self._abort = counters[-1:]
        self.records = self.driver.zeros(program.workers * NUM_WARPS * RECORD_WORDS)
        self._host_abort = self.driver.host_word()
        self._aborted = self._host_abort.numpy()
        self._stream: int | None = None  # launches run on it until ``wait`` returns
        self.parameters = LaunchParameters(
            instructions=self._instructions.data_ptr(),
            queue_begin=self._queue_begin.data_ptr(),
            barriers=counters.data_ptr(),
            signals=self._signals.data_ptr(),
            ticket=self._ticket.data_ptr(),
            exchanges=self.exchanges.data_ptr(),
            regions=self._regions.data_ptr(),
            counts=self._counts.data_ptr(),
            faults=self.records.data_ptr(),
            abort=self._abort.data_ptr(),
            timeout=int(machine.timeout * 1e9),
            dynamic=int(program.dynamic),
            rank=rank,
            shared_barriers=program.shared_barriers,
            step_barriers=tables.step_barriers,
            step_signals=tables.step_signals,
        )
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.parameters))

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array's bytes on the GPU, for launches on torch's current stream from now on."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return self.driver.upload(torch.from_numpy(data))

    def resolve(self) -> None:
        """Build the tables of tensors on the GPU and keep their storage alive.

        Raises ValueError when a tensor that was bound does not begin where a GPU can load it.
        """
        specs = self._program.tensors
        table = np.zeros(max(len(specs), 1), dtype=TENSOR.dtype())
        self.storages: dict[str, torch.Tensor] = {}  # by the names of tensors
        for entry, spec in zip(table, specs, strict=False):
            storage = self.memory.storage(spec.name)
            if storage.data_ptr() % LOAD_BYTES:
                raise ValueError(
                    f"tensor {spec.name} begins at address {storage.data_ptr()}: GPUs load "
                    f"{LOAD_BYTES} bytes at once, so that it must begin at a multiple of that"
                )
            order = int(self.memory.layout(spec.name).order)
            entry["address"] = (
                storage.data_ptr()
                | spec.dtype.code << DTYPE_SHIFT
                | spec.tagged << TAGGED_SHIFT
                | order << LAYOUT_SHIFT
            )
            entry["rows"], entry["columns"] = spec.rows, spec.columns
            self.storages[spec.name] = storage
        self._tensors = self.upload(table)
        for entry, spec in zip(table, specs, strict=False):
            if spec.shares > 1:
                on_rank_0 = int(entry["address"]) - (self.rank << RANK_SHIFT)
                share = on_rank_0 + _share_begin(spec, self.rank)
                entry["address"] = share | 1 << GATHERED_SHIFT
        self._written = self.upload(table)
        if self._box_rows is not None:
            maps = operand_maps(self.driver, self.memory, specs, self._box_rows)
            self._maps = self.upload(maps)
            self.parameters.maps = self._maps.data_ptr()
        self.parameters.tensors = self._tensors.data_ptr()
        self.parameters.written = self._written.data_ptr()

    def stream(self) -> int:
        """The stream for launches: torch's current one, or the rank's own if it shares its GPU."""
        if self._side is None:
            return self.driver.stream()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return int(self._side.cuda_stream)

    def start(self, stream: int, parameters: Any = None, workers: int = 0) -> None:
        """Launch with the rank's parameters, or with others on ``workers`` workers. Raises CudaError."""
        pointers = self._pointers
        if parameters is not None:
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        driver = self.driver
        with driver.current():
            if self._program.dynamic:
                driver.call("cuMemsetD32Async", self._ticket.data_ptr(), 0, 1, stream)
            driver.call(
                "cuLaunchKernel",
                *(self._function, workers or self._program.workers, 1, 1, NUM_THREADS, 1, 1),
                *(SHARED_BYTES, stream, ctypes.addressof(pointers), 0),
            )
        self._stream = stream

    def fetch(self) -> None:
        """Copy the abort word to the host, behind the launch. Raises CudaError."""
        with self.driver.current():
            self.driver.call(
                *("cuMemcpyDtoHAsync", self._host_abort.data_ptr(), self._abort.data_ptr()),
                *(4, self._stream),
            )
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def wait(self) -> bool:
        """Wait for the stream. Returns whether a warp has faulted. Raises CudaError."""
        if self._stream is None:
            return False
        with self.driver.current():
            self.driver.call("cuStreamSynchronize", self._stream)
        self._stream = None
        return bool(self._aborted[0])

    def synchronize(self) -> None:
        """Wait for all work on the GPU. Raises CudaError."""
        with self.driver.current():
            self.driver.call("cuCtxSynchronize")

    def forget(self) -> None:
        """Forget launches in progress, after their end."""
        self._stream = None
        self._aborted[0] = 0

    def take_records(self) -> list[Record]:
        """The fault records of the rank's warps. Clears them, and the abort word."""
        words = self.records.cpu().numpy().view(np.uint32).reshape(-1, RECORD_WORDS)
        records = [
            Record.read(i // NUM_WARPS, i % NUM_WARPS, words[i].tolist(), self.rank)
            for i in np.flatnonzero(words[:, 0]).tolist()
        ]
        self.records.zero_()
        self._abort.zero_()
        return records


def _share_begin(spec: TensorSpec, rank: int) -> int:
    """Bytes from the beginning of a stored row to the rank's share."""
    return spec.share_begin(rank) * spec.dtype.size
