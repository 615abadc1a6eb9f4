"""Small programs of copies, and a function that returns the verifier's sentence about a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megavm.instructions.copy import Copy
from megavm.vm.config import NONE
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify

WEIGHT, INPUT, STATE, ACTIVATION = (
    TensorKind.WEIGHT,
    TensorKind.INPUT,
    TensorKind.STATE,
    TensorKind.ACTIVATION,
)


TENSORS = (
    TensorSpec("a", (2, 8), F32, STATE),
    TensorSpec("b", (2, 8), F32, ACTIVATION),
    TensorSpec("c", (2, 8), F32, ACTIVATION),
    TensorSpec("w", (2, 8), F32, WEIGHT),
    TensorSpec("n", (2, 8), F32, INPUT),
    TensorSpec("t", (2, 8), BF16, ACTIVATION, tagged=True),
    TensorSpec("ids", (4,), I32, INPUT),
)
A, B, C, W, N, T, IDS = range(len(TENSORS))


def copy(
    x: int,
    out: int,
    columns: tuple[int, int] = (0, 8),
    waits: Sequence[tuple[int, int]] = (),
    signal: int | None = None,
    rows: tuple[int, int] = (0, 1),
    only: int = NONE,
    x_column: int | None = None,
) -> Copy:
    """Copy a tile of tensor ``x`` to the same place of tensor ``out``; ``waits``: (barrier, target).

    ``x_column``: of the tile in ``x``, if it is another one.
    """
    return Copy(
        x=x,
        out=out,
        x_row=rows[0],
        x_column=columns[0] if x_column is None else x_column,
        row_begin=rows[0],
        row_end=rows[1],
        column_begin=columns[0],
        column_end=columns[1],
        only=only,
        waits=[Wait(*w) for w in waits],
        signal=signal,
    )


def program(
    instructions: Sequence[Instruction], queues: Sequence[Sequence[int]], dynamic: bool = False
) -> Program:
    """A program over TENSORS, with as many barriers (x, y, z) as the instructions use."""
    used = {w.barrier for i in instructions for w in i.waits} | {i.signal for i in instructions}
    count = max((b for b in used if b is not None), default=-1) + 1
    return Program.build(
        TENSORS,
        instructions,
        queues,
        barriers=[f"{'xyz'[i]}" for i in range(count)],
        dynamic=dynamic,
        workers=3 if dynamic else None,
        labels=[f"op{i}" for i in range(len(instructions))],
    )


def edit(base: Program, instruction: int, word: int, value: int) -> Program:
    """The program with one instruction word changed."""
    words = base.words.copy()
    words[instruction, word] = value
    return replace(base, words=words)


def fault(broken: Program, machine: str = "reference") -> str:
    """The sentence with which the verifier rejects the program."""
    with pytest.raises(VerificationError) as error:
        verify(broken, machine)
    return str(error.value)


# A producer and a consumer, with both waits.
PAIR = [copy(A, B, waits=[(1, 0)], signal=0), copy(B, C, waits=[(0, 1)], signal=1)]
CHAIN = program(PAIR, [[0], [1]])
