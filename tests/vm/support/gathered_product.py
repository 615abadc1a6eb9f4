"""A product of gathered rows: its operands include a weight and an index."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, TensorKind, TensorSpec

GATHERED = {
    "x": TensorSpec("x", (4, 8), F32, TensorKind.INPUT),
    "w": TensorSpec("w", (8, 8), F32, TensorKind.STATE),
    "y": TensorSpec("y", (4, 8), F32, TensorKind.STATE),
    "ids": TensorSpec("ids", (4,), I32, TensorKind.INPUT),
    "source": TensorSpec("source", (8, 8), F32, TensorKind.INPUT),  # of copies
}
GATHER = Matmul(
    x=0,
    weight=1,
    out=2,
    row_index=3,
    row_begin=0,
    row_end=4,
    column_begin=0,
    column_end=8,
    x_rows=4,
    tile=0,
    part=0,
    part_k=8,
    eps=0.0,
)


def gathered(*copies: Copy, **changes: dict[str, Any]) -> Program:
    """The product, then ``copies`` on the same worker; ``changes`` replaces fields of tensors by name."""
    tensors = [replace(t, **changes.get(name, {})) for name, t in GATHERED.items()]
    return Program.build(tensors, [GATHER, *copies], [range(1 + len(copies))])
