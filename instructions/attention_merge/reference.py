"""AttentionMerge in torch."""

import torch

from megavm.instructions.attention_merge import AttentionMerge
from megavm.vm.reference import View


def execute(inst: AttentionMerge, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    heads, width = m.tensors[inst.out].own_columns // inst.head_dim, inst.head_dim + 2
    partial = m.read(inst.partial, rows, (0, inst.num_splits * heads * width))
    partial = partial.view(-1, inst.num_splits, heads, width)
    partial = partial[:, :, inst.head_begin : inst.head_end]
    sums, highest = partial[..., : inst.head_dim], partial[..., -2:-1]
    totals = partial[..., -1:]
    factors = torch.exp(highest - highest.max(dim=1, keepdim=True).values)
    out = (factors * sums).sum(1) / (factors * totals).sum(1)
    columns = (inst.head_begin * inst.head_dim, inst.head_end * inst.head_dim)
    m.write(inst.out, rows, columns, out.flatten(1))
