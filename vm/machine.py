"""The interface of machines: load a program on a memory, run it for some steps, or fault with its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from megavm.vm.events import SM_SHIFT
from megavm.vm.memory import Memory
from megavm.vm.program import Program

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WorkerState:
    """Where a worker was when the machine stopped."""

    worker: int  # its number within its rank
    role: str
    instruction: int | None  # None: no instruction was running
    disassembly: str
    waiting_for: str  # "" when it did not wait; names barrier or tensor, value and target
    rank: int | None = None  # None: the program has one rank

    def __str__(self) -> str:
        where = "idle" if self.instruction is None else f"instruction {self.instruction}"
        rank = "" if self.rank is None else f"rank {self.rank}, "
        text = f"{rank}worker {self.worker} ({self.role}): {where}"
        if self.disassembly:
            text += f": {self.disassembly}"
        return f"{text}; waits for {self.waiting_for}" if self.waiting_for else text


class MachineFault(RuntimeError):
    """A launch could not finish. ``cause`` is one sentence, ``workers`` the state of each worker.

    The memory's activations and state are unspecified afterwards. The executable runs again after
    ``reset``.
    """

    def __init__(self, cause: str, workers: tuple[WorkerState, ...] = ()) -> None:
        super().__init__("\n  ".join([cause, *map(str, workers)]))
        self.cause = cause
        self.workers = workers


class MachineLost(MachineFault):
    """The machine cannot run anything in this process any more; a new process can."""


@dataclass(frozen=True, eq=False)
class Notes:
    """The trace of one launch: a row for every executed instruction.

    Rows are ordered by worker, step and place in the queue; rows of a dynamic queue by step and place.
    Workers are numbered through all ranks.
    ``times`` is int64 [rows, n] on the machine's device, in nanoseconds of one clock for all workers and
    launches, 0 for an event that did not happen. ``events`` maps events of the profiler to columns.
    ``worker_column`` is the column of the executing worker (None: the machine does not record it); a GPU adds
    the worker's SM above SM_SHIFT.
    ``offsets``: for each of several ranks the offset of its clock that was taken off its times, and how much
    more or less it may be, in ns.
    """

    steps: int
    times: torch.Tensor
    events: Mapping[str, int]
    worker_column: int | None = None
    offsets: tuple[tuple[int, int], ...] = ()

    def places(self, program: Program) -> tuple[Ints, Ints, Ints, Ints]:
        """Worker (-1: unknown), step, slot in the queue and instruction of every row: int32 [rows] each."""
        queues = program.queues * program.ranks
        lengths = [len(queue) for queue in queues]
        order = np.concatenate([np.empty(0, np.int32), *queues])
        slots = np.concatenate([np.arange(n, dtype=np.int32) for n in (0, *lengths)])
        if self.worker_column is not None:
            workers = (self._worker_values() & ((1 << SM_SHIFT) - 1)).astype(np.int32)
        elif program.dynamic:
            workers = np.full(len(order) * self.steps, -1, np.int32)
        else:
            of_queue = np.multiply(lengths, self.steps)
            workers = np.repeat(np.arange(len(lengths), dtype=np.int32), of_queue)
        length = np.repeat(lengths, np.multiply(lengths, self.steps))
        first = np.repeat(np.cumsum([0, *lengths])[:-1], np.multiply(lengths, self.steps))
        number = np.arange(len(length)) - first * self.steps  # among the executions of its queue
        place = first + number % length
        return workers, (number // length).astype(np.int32), slots[place], order[place]

    def sms(self) -> Ints:
        """The SM on which every row was executed, a number on its rank's GPU; -1: unknown. int32 [rows]."""
        if self.worker_column is None:
            return np.full(len(self.times), -1, np.int32)
        return ((self._worker_values() >> SM_SHIFT) - 1).astype(np.int32)

    def _worker_values(self) -> npt.NDArray[np.int64]:
        values: npt.NDArray[np.int64] = self.times[:, self.worker_column].cpu().numpy()
        return values


class Machine(Protocol):
    """Runs programs. One machine may hold many loaded programs on one memory."""

    name: str
    memory_device: str  # where the memory of its programs must be, as torch names it; of rank 0

    def memory(self, ranks: int = 1) -> Memory:
        """An empty memory for programs of so many ranks. Raises ValueError for a number it cannot run."""
        ...

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> Executable:
        """Verify the program and resolve its tensors in ``memory``, which must outlive the result.

        Raises ValueError for a program that does not verify, or a tensor or rank that memory does not have.
        """
        ...


def memory_on_cpu(ranks: int = 1) -> Memory:
    """``Machine.memory`` of the machines that run on the CPU."""
    return Memory("cpu", ranks)


def require_ranks(program: Program, memory: Memory) -> None:
    """Raise ValueError when memory has another number of ranks than the program."""
    if len(memory.ranks) != program.ranks:
        raise ValueError(f"the program has {program.ranks} ranks, its memory {len(memory.ranks)}")


class TracingExecutable(Protocol):
    """A program on a machine that traces."""

    program: Program

    def trace(self) -> list[Notes]:
        """The traces of all launches since the last call, in order. They are kept until this call.

        Raises ValueError when the machine does not trace.
        """
        ...


class Executable(Protocol):
    """A program on a machine."""

    program: Program

    def run(self, steps: int = 1) -> None:
        """Run the program ``steps`` times and return when it has finished. Advances ``memory.epoch``.

        Raises MachineFault when it cannot finish; the executable then needs ``reset`` to run again.
        """
        ...

    def reset(self) -> None:
        """Set all counters to those of a fresh load, so that the program runs again after a fault.

        Waits for launches in progress and drops their traces. Keeps ``memory.epoch``: a run advances it
        before it begins, so that no later step takes the tagged words of a broken one. (On a GPU the next
        launch empties them.) Raises MachineLost when the
        machine cannot run anything any more.
        """
        ...

    def execute_one(self, index: int, step: int = 0, rank: int = 0) -> None:
        """Run one instruction of a rank alone, without its waits and signal, as in step ``step`` of a launch.

        For tools; keeps ``memory.epoch``. Raises MachineFault when the instruction fails.
        """
        ...
