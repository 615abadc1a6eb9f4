"""A program whose ranks give each rank other values, on a machine of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from copy_programs import copy

from megavm.vm.machine import Machine
from megavm.vm.program import Program
from megavm.vm.tensors import DType, TensorKind, TensorSpec
from megavm.vm.verify import verify

X, ALL, Y = range(3)
ROWS = 2


def scattering(columns: int, dtype: DType, ranks: int) -> Program:
    """Rank r gives rank s columns [s * columns, (s + 1) * columns) of its x; y := what came to a rank."""
    wide = ROWS, ranks * columns
    rows = 0, ROWS
    scatter = [
        copy(*(X, ALL, (0, columns), [(1, 0)]), 0, rows, only=rank, x_column=rank * columns)
        for rank in range(ranks)
    ]
    read = copy(ALL, Y, (0, wide[1]), [(0, ranks * ranks)], 1, rows)
    return Program.build(
        [
            TensorSpec("x", wide, dtype, TensorKind.INPUT),
            TensorSpec("all", wide, dtype, TensorKind.ACTIVATION, shares=ranks),
            TensorSpec("y", wide, dtype, TensorKind.STATE),
        ],
        [*scatter, read],
        [[i] for i in range(ranks + 1)],
        barriers=["sent", "read"],
        ranks=ranks,
        shared_barriers=2,
    )


def check_scattering(machine: Machine, dtype: DType, widths: Sequence[int], ranks: int = 3) -> None:
    """Run it on shares of so many columns and hold what comes against what was sent."""
    for columns in widths:
        program = scattering(columns, dtype, ranks)
        verify(program, machine.name)
        memory = machine.memory(ranks)
        memory.allocate(program.tensors)
        # x of rank r, row i: its columns count from 70 r + 5 i, which bfloat16 has up to 256.
        width = ranks * columns
        start = 70 * torch.arange(ranks)[:, None, None] + 5 * torch.arange(ROWS)[:, None]
        x = (start + torch.arange(width) % 40).float()
        for number, rank in enumerate(memory.ranks):
            rank.write("x", x[number])
        machine.load(program, memory).run(3)
        for number, rank in enumerate(memory.ranks):
            mine = slice(number * columns, (number + 1) * columns)
            want = torch.cat([x[sender][:, mine] for sender in range(ranks)], dim=1)
            assert torch.equal(rank["y"].cpu().float(), want), (columns, number)
