"""Examples of Reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megavm.instructions.reduce import Reduce
from megavm.vm.config import UNIT_ROWS, WIDE_SQUARES
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32


def examples(rng: np.random.Generator) -> Iterator[Example]:
    # parts, type of out, live rows of 4 or 9, columns, size, type of bias, of residual, of out_scaled
    cases: list[tuple[str, int, Any, int | None, tuple[int, int], int, Any, Any, Any]] = [
        ("two parts", 2, F32, None, (0, 40), 40, None, None, None),
        ("one part", 1, BF16, 3, (0, 40), 40, None, None, None),
        ("eight parts, bias, residual", 8, F32, 4, (0, 40), 40, BF16, F32, None),
        ("some columns", 3, BF16, 2, (16, 38), 40, F32, BF16, None),
        ("odd size", 5, F32, 4, (8, 39), 39, None, F32, None),
        ("no live row", 2, F32, 0, (0, 40), 40, None, None, None),
        ("scaled", 2, F32, 4, (8, 32), 40, None, F32, F32),
        ("scaled, ragged", 4, F32, 3, (16, 46), 46, BF16, F32, BF16),
        ("scaled, units", 6, F32, 3, (8, 64), 72, BF16, F32, BF16),
        ("scaled, wide", 2, F32, 3, (8, 2600), 2600, None, F32, BF16),
        ("scaled, half as wide", 5, F32, 3, (8, 1800), 1800, None, F32, BF16),
        ("scaled, rows side by side", 3, BF16, 4, (8, 328), 336, None, F32, F32),
        ("scaled, 9 rows", 9, F32, 8, (0, 520), 520, None, F32, BF16),
        ("sums of 64", 4, BF16, 3, (64, 192), 256, BF16, F32, BF16),
        ("sums of 64, units", 6, F32, 4, (64, 320), 320, None, F32, BF16),
        ("sums of 64, wide", 2, F32, 3, (64, 2624), 2624, None, F32, F32),
    ]
    for tagged in (False, True):
        for name, parts, out_type, live, columns, size, bias, residual, scaled in cases:
            if tagged and size % 2 and out_type is BF16:
                continue
            rows = 9 if "9 rows" in name else 4
            table = Table(rng)
            handles: dict[str, Any] = {
                "parts": table.activation("parts", (rows, parts * size), F32, tagged=tagged),
                "row_count": table.count("row_count", live),
                "out": table.output("out", (rows, size), out_type, tagged=tagged),
            }
            if bias is not None:
                handles["bias"] = table.weight("bias", (size,), bias)
            if residual is not None:
                handles["residual"] = table.activation(
                    "residual", (rows, size), residual, tagged=tagged
                )
            if scaled is not None:
                unit = WIDE_SQUARES if name.startswith("sums of 64") else UNIT_ROWS
                handles |= table.scaled((rows, size), scaled, tagged=tagged, unit=unit)
            inst = Reduce(
                **handles,
                row_begin=0,
                row_end=rows,
                column_begin=columns[0],
                column_end=columns[1],
            )
            yield Example(f"{name}{', tagged' if tagged else ''}", inst, table.specs, table.values)
