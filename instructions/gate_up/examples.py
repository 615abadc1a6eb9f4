"""Examples of GateUp."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megavm.instructions.gate_up import GateUp
from megavm.instructions.product import is_matrix_product
from megavm.vm.config import NONE
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32


def examples(rng: np.random.Generator) -> Iterator[Example]:
    cases = [
        # name, rows, k, columns, weights, x, out, live, tagged, squares and bias and parts
        ("vector", 1, 64, 32, F32, F32, F32, None, False, False),
        ("tails", 3, 45, 21, F32, F32, F32, 2, False, True),
        ("sums stay", 40, 1040, 18, F32, F32, F32, None, False, True),
        ("vector, bf16", 1, 64, 32, BF16, F32, BF16, None, True, True),
        ("tails, bf16", 4, 46, 21, BF16, BF16, BF16, 3, False, True),
        ("tagged", 2, 64, 34, BF16, BF16, F32, None, True, True),
        ("many rows, bf16", 35, 70, 23, BF16, BF16, BF16, 34, False, False),
        ("sums stay, bf16", 97, 1100, 40, BF16, F32, BF16, None, False, True),
        ("sixteen rows", 16, 2304, 150, BF16, BF16, BF16, 15, False, True),
        ("matrix", 100, 328, 150, BF16, BF16, BF16, 97, False, True),
        ("matrix, many rows", 200, 136, 150, BF16, BF16, BF16, 190, False, True),
        ("matrix, float32 result", 17, 64, 21, BF16, BF16, F32, None, False, False),
        ("no live row", 2, 64, 32, F32, F32, F32, 0, True, True),
        ("quads", 100, 328, 152, BF16, BF16, BF16, 97, False, True),
        ("quads, many rows", 200, 136, 148, BF16, BF16, BF16, 190, False, True),
        ("quads, float32 result", 17, 128, 20, BF16, BF16, F32, None, False, False),
        ("quads, four tiles of rows", 400, 128, 20, BF16, BF16, BF16, 391, False, True),
        ("quads, long rows", 20, 2304, 12, BF16, BF16, BF16, 18, False, True),
    ]
    for name, rows, k, columns, weight, x_type, out_type, live, tagged, extras in cases:
        table = Table(rng)
        begin = 4 if name.startswith("quads") else 2  # in whole units of pairs, or not
        width = columns + columns % 2 + begin
        parts = {"gate": width, "up": width} if extras else {}
        inst = GateUp(
            x=table.activation("x", (rows + 1, k), x_type, tagged=tagged),
            weight=table.weight("weight", (2 * width, k), weight, parts=parts),
            bias=table.weight("bias", (2 * width,), weight, parts=parts) if extras else NONE,
            x_squares=table.squares("x_squares", rows + 1, k, tagged=tagged) if extras else NONE,
            out=table.output("out", (rows + 2, width), out_type, tagged=tagged),
            row_count=table.count("row_count", None if live is None else live + 1),
            row_begin=1,
            row_end=rows + 1,
            column_begin=begin,
            column_end=columns + begin,
            eps=1e-5,
            matrix=int(is_matrix_product(table.specs[0], table.specs[1], rows)),
        )
        yield Example(name, inst, table.specs, table.values)
