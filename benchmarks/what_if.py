"""What-if predictions against programs that really were changed, on the CPU machine.

    python benchmarks/what_if.py [--steps 300] [--rounds 3] [--save]

A program of matrix products in three phases is recorded. Each change is predicted from its fastest
step, which no other work disturbed, and compared with the fastest step of a program in which
the change was made: fewer or more columns of a phase or a worker, or no wait for a phase.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from environment import save
from megavm.instructions.matmul import Matmul
from megavm.profiler.recorder import Recorder
from megavm.profiler.trace import Trace
from megavm.profiler.what_if import parse_change, predict
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Wait
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec

K = 512
WORKERS = 2
LAYERS = 4
PHASES = ("first", "second", "third")


@dataclass(frozen=True)
class Shape:
    """Columns of the phases, the same for every worker but for a factor; waits left out."""

    columns: tuple[int, ...] = (256, 512, 384)
    workers: tuple[float, ...] = (1.0, 0.75)
    without: int = -1  # nobody waits for this phase


# The changes: for the prediction, and in the program.
CHANGES = {
    "computing:second=0.5": Shape(columns=(256, 256, 384)),
    "computing:second=2": Shape(columns=(256, 1024, 384)),
    "computing:first=0.5": Shape(columns=(128, 512, 384)),
    "computing=0.5": Shape(columns=(128, 256, 192)),
    "worker:0=0.5": Shape(workers=(0.5, 0.75)),
    "worker:1=2": Shape(workers=(1.0, 1.5)),
    "balance=0": Shape(workers=(0.875, 0.875)),
    "wait:second barrier=0": replace(Shape(), without=1),
}


def make_program(shape: Shape) -> Program:
    """Rounds of products; each waits for all of the round before."""
    tensors = [TensorSpec("x", (1, K), F32, TensorKind.STATE)]
    instructions: list[Matmul] = []
    labels: list[str] = []
    queues: list[list[int]] = [[] for _ in range(WORKERS)]
    rounds = LAYERS * len(shape.columns)
    for number in range(rounds):
        phase = number % len(shape.columns)
        sizes = [round(shape.columns[phase] * factor) for factor in shape.workers]
        weight, out = len(tensors), len(tensors) + 1
        tensors += [
            TensorSpec(f"weight{number}", (sum(sizes), K), F32, TensorKind.WEIGHT),
            TensorSpec(f"out{number}", (1, sum(sizes)), F32, TensorKind.ACTIVATION),
        ]
        waits = [Wait(number - 1, WORKERS)] if number else [Wait(rounds - 1, 0)]
        if number and (number - 1) % len(shape.columns) == shape.without:
            waits = []
        for worker, size in enumerate(sizes):
            begin = sum(sizes[:worker])
            queues[worker].append(len(instructions))
            labels.append(f"layers.{number // len(shape.columns)}.{PHASES[phase]}")
            instructions.append(
                Matmul(
                    x=0, weight=weight, out=out, row_begin=0, row_end=1, column_begin=begin,
                    column_end=begin + size, x_rows=1, tile=0, part=0, part_k=K, eps=0.0,
                    signal=number, waits=waits,
                )
            )  # fmt: skip
    barriers = [f"round{number}" for number in range(rounds)]
    return Program.build(tensors, instructions, queues, barriers=barriers, labels=labels)


def record(shape: Shape, steps: int) -> Trace:
    """A trace of launches of one step each."""
    program, memory = make_program(shape), Memory()
    memory.allocate(program.tensors)
    executable = CpuMachine(trace=True).load(program, memory)
    executable.run(5)
    executable.trace()
    recorder = Recorder()
    for _ in range(steps):
        executable.run(1)
        recorder.add(executable, np.zeros(1, np.int32), rows=1)
    return recorder.trace()


def fastest(trace: Trace) -> int:
    return int((trace.step_end - trace.step_begin).argmin())


def measure(steps: int, rounds: int) -> list[dict[str, object]]:
    """Every change: the fastest steps of all rounds without and with it, and the prediction."""
    bases = [record(Shape(), steps)]
    changed: dict[str, list[float]] = {name: [] for name in CHANGES}
    for _ in range(rounds):
        for name, shape in CHANGES.items():
            trace = record(shape, steps)
            changed[name].append(float((trace.step_end - trace.step_begin).min()))
        bases.append(record(Shape(), steps))
    base = min(bases, key=lambda t: int((t.step_end - t.step_begin).min()))
    rows: list[dict[str, object]] = []
    for name in CHANGES:
        found = predict(base, fastest(base), [parse_change(name)])
        truth, recorded = min(changed[name]), float(found["step_ns"])
        rows.append(
            {
                "change": name,
                "recorded_us": recorded / 1e3,
                "predicted_us": found["ns"] / 1e3,
                "measured_us": truth / 1e3,
                "error_of_step": (found["ns"] - truth) / recorded,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.steps, arguments.rounds)
    for row in rows:
        print(
            f"{row['change']:20} recorded {row['recorded_us']:8.1f} us, predicted "
            f"{row['predicted_us']:8.1f}, measured {row['measured_us']:8.1f}: "
            f"{row['error_of_step']:+.1%} of the step"
        )
    if arguments.save:
        save("what_if", {"changes": rows})


if __name__ == "__main__":
    main()
