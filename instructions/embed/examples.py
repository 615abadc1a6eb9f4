"""Examples of Embed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megavm.instructions.embed import Embed
from megavm.vm.config import UNIT_ROWS, WIDE_SQUARES
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32, I32, TensorKind


def examples(rng: np.random.Generator) -> Iterator[Example]:
    cases = [
        ("all rows", F32, F32, False, 4, (0, 40), 40, None),
        ("dead rows", BF16, F32, False, 2, (0, 40), 40, None),
        ("no live row", BF16, BF16, False, 0, (0, 40), 40, BF16),
        ("not counted", F32, F32, True, None, (0, 40), 40, None),
        ("some columns", BF16, BF16, False, 4, (16, 39), 40, None),
        ("tagged", BF16, F32, True, 3, (8, 40), 40, None),
        ("tagged bf16", F32, BF16, True, 3, (8, 40), 40, None),
        ("scaled", F32, F32, False, 4, (8, 32), 40, F32),
        ("scaled bf16", BF16, F32, False, 3, (0, 46), 46, BF16),
        ("scaled, tagged", BF16, F32, True, 3, (16, 46), 46, BF16),
        ("scaled, tagged, wide", BF16, F32, True, 1, (8, 2600), 2600, BF16),
        ("sums of 64", F32, F32, False, 3, (64, 192), 256, F32),
        ("sums of 64, bf16", BF16, F32, False, 4, (64, 320), 320, BF16),
        ("sums of 64, tagged", BF16, F32, True, 4, (0, 192), 192, BF16),
        ("sums of 64, wide", BF16, F32, False, 1, (64, 2624), 2624, BF16),
    ]
    for name, table_type, out_type, tagged, live, columns, size, scaled in cases:
        table = Table(rng)
        tokens = rng.integers(0, 50, (3, 9)).astype(np.int32)
        handles: dict[str, Any] = {
            "table": table.weight("table", (50, size), table_type),
            "tokens": table.add("tokens", (3, 9), I32, TensorKind.STATE, table.tensor(tokens)),
            "row_sequence": table.integers("row_sequence", [2, 0, 0, 1]),
            "row_position": table.integers("row_position", [8, 0, 1, 3]),
            "row_count": table.count("row_count", live),
            "out": table.output("out", (4, size), out_type, tagged=tagged),
        }
        if scaled is not None:
            unit = WIDE_SQUARES if name.startswith("sums of 64") else UNIT_ROWS
            handles |= table.scaled((4, size), scaled, tagged=tagged, unit=unit)
        inst = Embed(
            **handles,
            row_begin=0,
            row_end=4,
            column_begin=columns[0],
            column_end=columns[1],
        )
        yield Example(name, inst, table.specs, table.values)
