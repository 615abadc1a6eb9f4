"""The differential tool: runs a program on two machines and finds the first instruction where they differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import sequential_order
from megavm.vm.tensors import DType, Region, TensorSpec

RELATIVE = {DType.F32: 1e-4, DType.BF16: 2**-7, DType.I32: 0.0}
ABSOLUTE = {DType.F32: 1e-5, DType.BF16: 1e-3, DType.I32: 0.0}


@dataclass(frozen=True)
class Divergence:
    """The first instruction after which two machines hold different values."""

    step: int
    rank: int  # the rank whose tensor differs
    instruction: int
    disassembly: str
    label: str
    tensor: str
    row: int  # row and column of the tensor as a matrix
    column: int
    values: tuple[float, float]
    elements: int  # number of elements of the tensor that differ

    def __str__(self) -> str:
        return (
            f"step {self.step}, instruction {self.instruction} ({self.label}): {self.tensor}"
            f"{f' of rank {self.rank}' if self.rank else ''}[{self.row}, {self.column}] is {self.values[0]:.9g} and {self.values[1]:.9g} "
            f"({self.elements} elements differ) after {self.disassembly}"
        )


def first_divergence(
    program: Program,
    memory: Memory,
    left: Machine,
    right: Machine,
    *,
    steps: int = 1,
    relative: dict[DType, float] | None = None,
    absolute: dict[DType, float] | None = None,
) -> Divergence | None:
    """Run ``steps`` steps of ``program`` on two machines from equal memories; None when they agree.

    Works on copies of ``memory``, which share read-only tensors. After each instruction, compares what it
    wrote, except workspaces, element by element: |a - b| <= absolute + relative * max(|a|, |b|), by dtype;
    NaN equals NaN. Then copies the first machine's values to the second, so that every instruction is
    judged alone.

    Raises ValueError when the program does not verify, MachineFault when an instruction fails.
    """
    memories = (memory.copy(left.memory_device), memory.copy(right.memory_device))
    executables = (left.load(program, memories[0]), right.load(program, memories[1]))
    tolerance = (RELATIVE | (relative or {}), ABSOLUTE | (absolute or {}))
    order = list(sequential_order(program))
    for step in range(steps):
        for rank, index in order:
            for executable in executables:
                executable.execute_one(index, step, rank)
            inst = program.instructions[index]
            for region in inst.writes(program.tensors):
                if region.tensor in inst.workspaces():
                    continue
                spec = program.tensors[region.tensor]
                reached_ranks: Iterable[int] = range(program.ranks) if spec.shares > 1 else (rank,)
                if region.only is not None:
                    reached_ranks = (region.only,)
                for reached in reached_ranks:
                    pair = memories[0].ranks[reached], memories[1].ranks[reached]
                    difference = _compare(spec, region, rank, pair, tolerance)
                    if difference is not None:
                        text = inst.disassemble(program.tensors)
                        label = program.labels[index]
                        return Divergence(step, reached, index, text, label, spec.name, *difference)
                    pair[1].take(spec.name, pair[0])
    return None


def _compare(
    spec: TensorSpec,
    region: Region,
    rank: int,
    memories: tuple[Memory, Memory],
    tolerance: tuple[dict[DType, float], dict[DType, float]],
) -> tuple[int, int, tuple[float, float], int] | None:
    top = left = 0
    a, b = (m[spec.name].cpu().reshape(spec.rows, -1).double() for m in memories)
    if not region.indexed:
        top, left = region.rows[0], region.columns[0]
        left += spec.share_begin(rank)
        width = region.columns[1] - region.columns[0]
        a, b = (t[top : region.rows[1], left : left + width] for t in (a, b))
    relative, absolute = (t[spec.dtype] for t in tolerance)
    close = torch.isclose(a, b, rtol=0.0, atol=absolute, equal_nan=True)
    close |= (a - b).abs() <= absolute + relative * torch.maximum(a.abs(), b.abs())
    different = torch.nonzero(~close)
    if not len(different):
        return None
    row, column = (int(v) for v in different[0])
    values = (float(a[row, column]), float(b[row, column]))
    return top + row, left + column, values, len(different)
