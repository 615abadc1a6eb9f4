"""Examples of RmsNorm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32


def examples(rng: np.random.Generator) -> Iterator[Example]:
    cases = [
        ("float32", F32, F32, F32, False, 64, None),
        ("bfloat16", BF16, BF16, BF16, False, 64, 3),
        ("odd width", F32, BF16, BF16, False, 37, 2),
        ("narrow", BF16, F32, F32, False, 2, 9),
        ("tagged", F32, BF16, BF16, True, 48, 3),
        ("tagged bf16", BF16, BF16, F32, True, 38, 3),
        ("no live row", F32, BF16, BF16, True, 48, 1),
    ]
    for name, x_type, gain_type, out_type, tagged, k, live in cases:
        table = Table(rng)
        inst = RmsNorm(
            x=table.activation("x", (5, k), x_type, tagged=tagged),
            gain=table.gain("gain", k, gain_type),
            out=table.output("out", (5, k), out_type, tagged=tagged),
            row_count=table.count("row_count", live),
            row_begin=1,
            row_end=4,
            eps=1e-5,
        )
        yield Example(name, inst, table.specs, table.values)
    # A row of zeros stays zero.
    table = Table(rng)
    inst = RmsNorm(
        x=table.output("x", (1, 16), F32),
        gain=table.gain("gain", 16, F32),
        out=table.activation("out", (1, 16), F32),
        row_begin=0,
        row_end=1,
        eps=1e-6,
    )
    yield Example("zero row", inst, table.specs, table.values)
