"""Examples of AttentionMerge."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megavm.instructions.attention_merge import AttentionMerge
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32, TensorKind


def examples(rng: np.random.Generator) -> Iterator[Example]:
    cases = [
        # name, heads, head_dim, splits, head range, out, tagged, live
        ("two splits", 4, 16, 2, (0, 4), F32, False, 5),
        ("seven splits, odd heads", 3, 10, 7, (1, 3), F32, False, 4),
        ("bf16", 2, 64, 3, (0, 2), BF16, False, 5),
        ("tagged", 2, 20, 3, (0, 2), BF16, True, 5),
        ("long heads", 1, 130, 2, (0, 1), F32, True, 3),
        ("no live row", 4, 16, 2, (0, 4), F32, True, 1),
        ("not counted", 4, 16, 2, (0, 4), F32, True, None),
    ]
    for name, heads, d, splits, head_range, out_type, tagged, live in cases:
        table = Table(rng)
        partial = table.normal(5, splits, heads, d + 2)
        partial[..., d] *= 20
        partial[..., d + 1] = partial[..., d + 1].abs() + 0.5
        # All but one split of the last row are empty.
        partial[4, 1:] = 0
        partial[4, 1:, :, d] = -torch.inf
        inst = AttentionMerge(
            partial=table.add(
                "partial",
                (5, splits, heads, d + 2),
                F32,
                TensorKind.ACTIVATION,
                partial,
                tagged=tagged,
            ),
            out=table.output("out", (5, heads * d), out_type, tagged=tagged),
            row_count=table.count("row_count", live),
            row_begin=1,
            row_end=5,
            head_begin=head_range[0],
            head_end=head_range[1],
            head_dim=d,
            num_splits=splits,
        )
        yield Example(name, inst, table.specs, table.values)
