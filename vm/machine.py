"""What every machine does: load a program on a memory, run it for some steps, or fault with its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megavm.vm.memory import Memory
from megavm.vm.program import Program


@dataclass(frozen=True)
class WorkerState:
    """Where a worker was when the machine stopped."""

    worker: int
    role: str
    instruction: int | None  # None: no instruction was running
    disassembly: str
    waiting_for: str  # "" when it did not wait; names barrier or tensor, value and target

    def __str__(self) -> str:
        where = "idle" if self.instruction is None else f"instruction {self.instruction}"
        text = f"worker {self.worker} ({self.role}): {where}"
        if self.disassembly:
            text += f": {self.disassembly}"
        return f"{text}; waits for {self.waiting_for}" if self.waiting_for else text


class MachineFault(RuntimeError):
    """A launch ended before its time. ``cause`` is one sentence; ``workers`` the state of each worker.

    The memory's activations and state are unspecified afterwards.
    """

    def __init__(self, cause: str, workers: tuple[WorkerState, ...] = ()) -> None:
        super().__init__("\n  ".join([cause, *map(str, workers)]))
        self.cause = cause
        self.workers = workers


class Machine(Protocol):
    """Runs programs. One machine may hold many loaded programs on one memory."""

    name: str
    memory_device: str  # where the memory of its programs must be, as torch names it

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> Executable:
        """Verify the program and resolve its tensors in ``memory``, which must outlive the result.

        Raises ValueError for a program that does not verify or a tensor that memory does not have.
        """
        ...


class Executable(Protocol):
    """A program on a machine."""

    program: Program

    def run(self, steps: int = 1) -> None:
        """Run the program ``steps`` times and return when all is done. Advances ``memory.epoch``.

        Raises MachineFault when it cannot be finished.
        """
        ...

    def execute_one(self, index: int, step: int = 0) -> None:
        """Run one instruction alone, without its waits and signal, as in step ``step`` of a launch.

        For tools; ``memory.epoch`` stays. Raises MachineFault when the instruction fails.
        """
        ...
