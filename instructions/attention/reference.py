"""Attention in torch."""

import torch

from megavm.instructions.attention import Attention
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: Attention, m: View) -> None:
    _, _, block_size, head_dim = m.tensors[inst.k_cache].shape
    heads = m.tensors[inst.q].columns // head_dim
    group = inst.group(m.tensors)
    for row in range(*m.live(inst.row_count, inst.row_begin, inst.row_end)):
        context = m.position(inst.row_position, row) + 1
        chunks = -(-context // inst.chunk)
        begin = inst.split * chunks // inst.num_splits * inst.chunk
        end = min((inst.split + 1) * chunks // inst.num_splits * inst.chunk, context)
        sequence = int(m.raw(inst.row_sequence)[row])
        table = m.raw(inst.block_table)[sequence]
        blocks = table[begin // block_size : -(-end // block_size)].long()
        for head in range(inst.head_begin, inst.head_end):
            first, last = head * group * head_dim, (head + 1) * group * head_dim
            q = m.read(inst.q, (row, row + 1), (first, last)).view(group, head_dim)
            keys, values = (
                m.raw(cache)[blocks, head].reshape(-1, head_dim)[: max(end - begin, 0)].float()
                for cache in (inst.k_cache, inst.v_cache)
            )
            if inst.k_new != NONE and end == context:
                columns = (head * head_dim, (head + 1) * head_dim)
                keys[-1:], values[-1:] = (
                    m.read(new, (row, row + 1), columns) for new in (inst.k_new, inst.v_new)
                )
            scores = inst.scale * (q @ keys.T)
            highest = torch.full((group, 1), -torch.inf)
            if end > begin:
                highest = scores.max(-1, keepdim=True).values
            weights = torch.exp(scores - highest)
            total = weights.sum(-1, keepdim=True)
            if inst.partial == NONE:
                out = (weights @ values / total).reshape(1, -1)
                m.write(inst.out, (row, row + 1), (first, last), out)
                continue
            part = torch.cat([weights @ values, highest, total], dim=-1).reshape(1, -1)
            base = (inst.split * heads + head * group) * (head_dim + 2)
            m.write(inst.partial, (row, row + 1), (base, base + part.shape[1]), part)
