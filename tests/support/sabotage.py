"""Makes runs fail for real: a counter is set back, and a wait for it is given up in the middle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from megavm.scheduler.engine.step import Step
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.run import machines
from megavm.scheduler.run.runner import Runner
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.executable import CudaExecutable
from megavm.vm.cuda.launch import BARRIER_STRIDE
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import Executable

TIMEOUT = 0.3  # seconds after which an impatient machine gives up


class ImpatientCpuMachine(CpuMachine):
    """A CpuMachine that gives up soon."""

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT)


class ImpatientCudaMachine(CudaMachine):
    """A CudaMachine that gives up soon."""

    def __init__(self, device: int | Sequence[int] = 0) -> None:
        super().__init__(device, timeout=TIMEOUT)


@contextlib.contextmanager
def impatient_machines() -> Iterator[None]:
    """Runners that are made meanwhile have machines that give up soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machines, "CpuMachine", ImpatientCpuMachine)
        patch.setattr(machines, "CudaMachine", ImpatientCudaMachine)
        yield


def lose_signals(executable: Any) -> None:
    """Set a counter back that is waited for in the middle of the program."""
    program = executable.program
    waited = [wait.barrier for inst in program.instructions for wait in inst.waits]
    barrier = waited[len(waited) // 2]
    # One more than a step signals: a wait for earlier steps is not over at the end of this one.
    count = int(program.signals[barrier]) + 1
    if isinstance(executable, CudaExecutable):
        executable._ranks[0].counters[barrier * BARRIER_STRIDE] -= count
        if executable.memory.device.type == "cuda":
            torch.cuda.synchronize()
        return
    for _ in range(count):
        executable._loaded.lose_signal(barrier)


def run_name(of: Runner) -> str:
    """The method of its step memory that each run calls. On a GPU, ``run`` starts the step too."""
    return "start" if isinstance(of._step, DeviceStepMemory) else "run"


class Sabotage:
    """Counts the runs of a runner, and makes some of them fail.

    Attributes:
        runs: how many there were.
        at: the numbers of those that fail.
    """

    def __init__(self, sabotaged: Runner) -> None:
        self.runs = 0
        self.at: set[int] = set()
        memory, name = sabotaged._step, run_name(sabotaged)
        self._run = getattr(memory, name)
        setattr(memory, name, self.run)

    def run(self, executable: Executable, step: Step, steps: int, *started: Any) -> Any:
        number, self.runs = self.runs, self.runs + 1
        if number in self.at:
            lose_signals(executable)
        return self._run(executable, step, steps, *started)

    def fail(self, *after: int) -> None:
        """Let runs fail; 0 is the next."""
        self.at |= {self.runs + number for number in after}
