"""AttentionMerge in torch."""

import torch

from megavm.instructions.attention_merge import AttentionMerge
from megavm.vm.reference import View


def execute(inst: AttentionMerge, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    heads, width = m.tensors[inst.out].own_columns // inst.head_dim, inst.head_dim + 2
    first, last = inst.head_begin * width, inst.head_end * width
    splits = range(0, inst.num_splits * heads * width, heads * width)
    parts = [m.read(inst.partial, rows, (begin + first, begin + last)) for begin in splits]
    partial = torch.stack(parts, 1).view(
        -1, inst.num_splits, inst.head_end - inst.head_begin, width
    )
    sums, highest = partial[..., : inst.head_dim], partial[..., -2:-1]
    totals = partial[..., -1:]
    factors = torch.exp(highest - highest.max(dim=1, keepdim=True).values)
    out = (factors * sums).sum(1) / (factors * totals).sum(1)
    columns = (inst.head_begin * inst.head_dim, inst.head_end * inst.head_dim)
    m.write(inst.out, rows, columns, out.flatten(1))
