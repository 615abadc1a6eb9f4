"""Examples of Copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from megavm.instructions.copy import Copy
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32


def examples(rng: np.random.Generator) -> Iterator[Example]:
    kinds = itertools.product((F32, BF16), (False, True), (F32, BF16), (False, True))
    for i, (x_type, x_tagged, out_type, out_tagged) in enumerate(kinds):
        table = Table(rng)
        # An odd column of bfloat16 begins in the middle of a tagged word.
        columns, x_column, out_column = ((38, 0, 0), (33, 3, 1), (1, 5, 7))[i % 3]
        x = table.activation("x", (5, 48), x_type, tagged=x_tagged)
        out = table.output("out", (4, 40), out_type, tagged=out_tagged)
        inst = Copy(
            x=x,
            out=out,
            x_row=2,
            x_column=x_column,
            row_begin=1,
            row_end=3,
            column_begin=out_column,
            column_end=out_column + columns,
        )
        words = [
            f"{t.name.lower()}{' tagged' * g}"
            for t, g in ((x_type, x_tagged), (out_type, out_tagged))
        ]
        yield Example(f"{words[0]} to {words[1]}", inst, table.specs, table.values)
