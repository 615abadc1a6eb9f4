"""Kernels of the CPU machine against torch, on the shapes of Llama-3.2-1B, in one run.

Both use the same number of threads and the same weights. Each weight has several copies that
together exceed the caches, as the layers of a model do. Times are the best of several runs, with
megavm and torch in turn.

    python benchmarks/cpu_kernels.py [--rows 1 4 8 128] [--dtype bfloat16 float32] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Instruction
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16, F32, DType, Part, TensorKind, TensorSpec

DTYPES = {"bfloat16": BF16, "float32": F32}


@dataclass(frozen=True)
class Shape:
    """A product of a Llama layer: [columns, k] weights, two of them if ``gated`` (gate and up)."""

    name: str
    columns: int
    k: int
    gated: bool = False

    @property
    def weight_rows(self) -> int:
        return self.columns * (2 if self.gated else 1)


SHAPES = [
    Shape("qkv 3072 x 2048", 3072, 2048),
    Shape("o 2048 x 2048", 2048, 2048),
    Shape("gate, up 2 x 8192 x 2048", 8192, 2048, gated=True),
    Shape("down 2048 x 8192", 2048, 8192),
    Shape("lm_head 128256 x 2048", 128256, 2048),
]


def cut(size: int, pieces: int, unit: int = 16) -> Iterator[tuple[int, int]]:
    """Cut [0, size) at multiples of ``unit`` into at most ``pieces`` nearly equal ranges."""
    units = -(-size // unit)
    pieces = min(pieces, units)
    for i in range(pieces):
        yield units * i // pieces * unit, min(units * (i + 1) // pieces * unit, size)


def tiles(
    shape: Shape, rows: int, workers: int, row_tile: int, column_tile: int
) -> Iterator[tuple[int, int, int, int]]:
    """(worker, first column, end column, first row) of each tile; equal weights are adjacent."""
    for worker, (left, right) in enumerate(cut(shape.columns, workers)):
        for begin, end in cut(right - left, max(1, -(-(right - left) // column_tile))):
            for top in range(0, rows, row_tile):
                yield worker, left + begin, left + end, top


def build(
    shape: Shape,
    dtype: DType,
    rows: int,
    copies: int,
    workers: int,
    row_tile: int,
    column_tile: int,
) -> Program:
    """A program of one product with each copy of the weight."""
    tensors = [
        TensorSpec("x", (rows, shape.k), dtype, TensorKind.INPUT),
        TensorSpec("out", (rows, shape.columns), dtype, TensorKind.STATE),
    ]
    instructions: list[Instruction] = []
    queues: list[list[int]] = [[] for _ in range(workers)]
    for copy in range(copies):
        handle = len(tensors)
        name = f"weight{copy}"
        parts = [Part(f"{name}.{part}", shape.columns) for part in ("gate", "up") if shape.gated]
        tensors.append(
            TensorSpec(
                name,
                (shape.weight_rows, shape.k),
                dtype,
                TensorKind.WEIGHT,
                parts=tuple(parts),
            )
        )
        for worker, begin, end, top in tiles(shape, rows, workers, row_tile, column_tile):
            common: dict[str, Any] = {
                "x": 0,
                "out": 1,
                "row_begin": top,
                "row_end": min(top + row_tile, rows),
                "column_begin": begin,
                "column_end": end,
                "eps": 1e-5,
            }
            queues[worker].append(len(instructions))
            if shape.gated:
                instructions.append(GateUp(weight=handle, **common))
            else:
                bottom = min(top + row_tile, rows)
                whole: dict[str, Any] = {"part": 0, "part_k": shape.k}
                instructions.append(Matmul(weight=handle, x_rows=bottom, tile=0, **whole, **common))
    return Program.build(tensors, instructions, queues)


def best(
    functions: list[Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> list[float]:
    """The shortest time of each function by ``clock``; the functions take turns."""
    times = [float("inf")] * len(functions)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            begin = clock()
            function()
            times[i] = min(times[i], clock() - begin)
    return times


def torch_product(shape: Shape, x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], None]:
    """The same products with torch's kernels."""

    def run() -> None:
        if shape.gated:
            for gate, up in (weight.chunk(2) for weight in weights):
                a, b = torch.nn.functional.linear(x, gate), torch.nn.functional.linear(x, up)
                torch.nn.functional.silu(a).mul_(b)
        else:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

    return run


def default_tile(shape: Shape, dtype: DType, rows: int) -> tuple[int, int]:
    """Rows and columns of a tile: all columns for few rows, else as Target.sums_bytes allows."""
    if rows < 16:
        return rows, shape.columns
    row_tile = min(rows, 128)
    sums = TARGETS["cpu"].sums_bytes // 4 // row_tile
    return row_tile, sums // 2 if shape.gated else sums


def main() -> None:
    """Measure all shapes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 128])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=1.0, help="per row of the table")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", default=None)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of the process: with one worker, on a machine that is not idle",
    )
    parser.add_argument("--shapes", nargs="+", default=None, help="first words of the shapes")
    text = "total size of the copies of a weight: more than the caches hold"
    parser.add_argument("--megabytes", type=float, default=400.0, help=text)
    parser.add_argument("--row-tile", type=int, default=None)
    parser.add_argument("--column-tile", type=int, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.workers)
    machine = CpuMachine(level=args.level)
    print(f"{args.workers} workers, kernels {machine.level}, torch {torch.__version__}")
    print(
        f"{'shape':26} {'dtype':9} {'rows':>4}  {'ours us':>9} {'torch us':>9} {'ratio':>6}"
        f"  {'GB/s':>6} {'TFLOP/s':>8}"
    )
    for name in args.dtype:
        for shape in SHAPES:
            if args.shapes and not shape.name.startswith(tuple(args.shapes)):
                continue
            for rows in args.rows:
                measure(shape, DTYPES[name], rows, args, machine)


def measure(
    shape: Shape, dtype: DType, rows: int, args: argparse.Namespace, machine: CpuMachine
) -> None:
    """Measure one shape and print its line of the table."""
    if rows * shape.columns > 2**25:
        rows = min(rows, 8)
    size = shape.weight_rows * shape.k * dtype.size
    copies = max(1, min(16, round(args.megabytes * 1e6 / size)))
    row_tile, column_tile = default_tile(shape, dtype, rows)
    program = build(
        shape,
        dtype,
        rows,
        copies,
        args.workers,
        args.row_tile or row_tile,
        args.column_tile or column_tile,
    )
    memory = Memory()
    generator = torch.Generator().manual_seed(0)
    weights = []
    for spec in program.tensors:
        if spec.kind is TensorKind.WEIGHT:
            value = torch.empty(spec.shape, dtype=TORCH_DTYPE[dtype]).normal_(
                0, 0.02, generator=generator
            )
            memory.bind(spec, *value.chunk(max(len(spec.parts), 1)))
            weights.append(value)
    memory.allocate(program.tensors)
    x = memory.storage("x")
    x.normal_(generator=generator)
    executable = machine.load(program, memory, verify=False)
    clock = time.process_time if args.cpu_time else time.perf_counter
    ours, theirs = (
        t / copies
        for t in best([executable.run, torch_product(shape, x, weights)], args.seconds, clock)
    )
    flops = 2 * rows * shape.weight_rows * shape.k
    print(
        f"{shape.name:26} {dtype.name.lower():9} {rows:4}  {ours * 1e6:9.0f} {theirs * 1e6:9.0f} "
        f"{theirs / ours:6.2f}  {size / ours / 1e9:6.1f} {flops / ours / 1e12:8.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
