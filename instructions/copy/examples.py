"""Examples of Copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from megavm.instructions.copy import Copy
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32, DType


def examples(rng: np.random.Generator) -> Iterator[Example]:
    kinds = itertools.product((F32, BF16), (False, True), (F32, BF16), (False, True))
    for i, (x_type, x_tagged, out_type, out_tagged) in enumerate(kinds):
        # An odd column of bfloat16 begins in the middle of a tagged word.
        tile = ((38, 0, 0), (33, 3, 1), (1, 5, 7))[i % 3]
        words = [
            f"{t.name.lower()}{' tagged' * g}"
            for t, g in ((x_type, x_tagged), (out_type, out_tagged))
        ]
        yield _example(
            rng, f"{words[0]} to {words[1]}", tile, x_type, out_type, x_tagged, out_tagged
        )
    # Kernels may load and store four of these at once.
    yield _example(rng, "fours", (28, 4, 8), F32, F32)
    yield _example(rng, "eights", (24, 8, 16), BF16, BF16)
    yield _gathered(rng, "gathered", F32, F32, width=19)
    yield _gathered(rng, "gathered, rounded", F32, BF16, width=64)
    yield _gathered(rng, "gathered fours", F32, F32, width=64)
    yield _gathered(rng, "gathered eights", BF16, BF16, width=64, rows=70, live=66)
    yield _gathered(rng, "gathered, no live row", BF16, BF16, width=64, live=0)


def _example(
    rng: np.random.Generator,
    name: str,
    tile: tuple[int, int, int],
    x_type: DType,
    out_type: DType,
    x_tagged: bool = False,
    out_tagged: bool = False,
) -> Example:
    """``tile``: how many columns, the first one of x, and of out."""
    columns, x_column, out_column = tile
    table = Table(rng)
    inst = Copy(
        x=table.activation("x", (5, 48), x_type, tagged=x_tagged),
        out=table.output("out", (4, 40), out_type, tagged=out_tagged),
        x_row=2,
        x_column=x_column,
        row_begin=1,
        row_end=3,
        column_begin=out_column,
        column_end=out_column + columns,
    )
    return Example(name, inst, table.specs, table.values)


def _gathered(
    rng: np.random.Generator,
    name: str,
    x_type: DType,
    out_type: DType,
    width: int,
    rows: int = 7,
    live: int | None = None,
) -> Example:
    """Rows of ``width`` columns, of which ``live`` are live; all if that is None."""
    table, x_rows = Table(rng), 9
    inst = Copy(
        x=table.activation("x", (x_rows + 1, width + 16), x_type),
        out=table.output("out", (rows + 2, width + 24), out_type),
        row_index=table.integers("row_index", torch.from_numpy(rng.integers(0, x_rows, rows + 1))),
        row_count=table.count("row_count", None if live is None else live + 1),
        x_row=0,
        x_rows=x_rows,
        x_column=16,
        row_begin=1,
        row_end=rows + 1,
        column_begin=8,
        column_end=8 + width,
    )
    return Example(name, inst, table.specs, table.values)
