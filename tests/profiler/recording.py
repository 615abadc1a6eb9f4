"""Traces that a CPU machine records of small programs."""

from __future__ import annotations

import numpy as np
import torch

from megavm.instructions.copy import Copy
from megavm.profiler.recorder import Recorder
from megavm.profiler.trace import Trace
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Instruction, Wait
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec

COLUMNS = 16
POSITIONS = np.zeros(1, np.int32)


def ring(workers: int, rounds: int, tagged: bool = False, dynamic: bool = False) -> Program:
    """A row is copied from worker to worker, ``rounds`` times; a hop waits for the one before."""
    hops = workers * rounds
    tensors = [TensorSpec("start", (1, COLUMNS), F32, TensorKind.STATE)]
    tensors += [
        TensorSpec(f"hop{i}", (1, COLUMNS), F32, TensorKind.ACTIVATION, tagged) for i in range(hops)
    ]
    instructions: list[Instruction] = []
    for i in range(hops):
        waits = [Wait(hops - 1, 0)] if i == 0 else [] if tagged else [Wait(i - 1, 1)]
        signal = None if tagged and i < hops - 1 else i
        instructions.append(
            Copy(
                x=i,
                out=i + 1,
                x_row=0,
                x_column=0,
                row_begin=0,
                row_end=1,
                column_begin=0,
                column_end=COLUMNS,
                waits=waits,
                signal=signal,
            )
        )
    queues = [list(range(hops))]
    if not dynamic:
        queues = [[i for i in range(hops) if i % workers == w] for w in range(workers)]
    return Program.build(
        tensors,
        instructions,
        queues,
        barriers=[f"hop{i}.done" for i in range(hops)],
        dynamic=dynamic,
        workers=workers,
        labels=[f"rounds.{i // workers}.hop" for i in range(hops)],
    )


def record(
    program: Program, launches: int = 2, steps: int = 3, keep: int | None = None
) -> Recorder:
    """Run the program on a tracing CPU machine."""
    memory = Memory()
    memory.allocate(program.tensors)
    memory.storage("start").copy_(torch.arange(COLUMNS, dtype=torch.float32)[None])
    executable = CpuMachine(trace=True).load(program, memory)
    recorder = Recorder(keep)
    for _ in range(launches):
        executable.run(steps)
        recorder.add(executable, POSITIONS, rows=1)
    return recorder


def record_ring(tagged: bool = False, dynamic: bool = False) -> Trace:
    """A trace of six steps in two launches."""
    return record(ring(3, 2, tagged, dynamic)).trace()
