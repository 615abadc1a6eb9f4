"""QkvRope in torch."""

import torch

from megavm.instructions.products import norm_scale, product
from megavm.instructions.qkv_rope import QkvRope
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: QkvRope, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    x, scale = m.read(inst.x, rows), norm_scale(m, inst, rows)
    half = m.tensors[inst.rope].columns // 2
    heads, kv_heads = m.tensors[inst.q].columns // (2 * half), m.tensors[inst.k_cache].shape[1]
    for pair in range(inst.pair_begin, inst.pair_end):
        head, j = divmod(pair, half)
        low = 2 * half * head + j
        high = low + half
        a = product(m, x, inst.weight, (low, low + 1), scale, inst.bias)[:, 0]
        b = product(m, x, inst.weight, (high, high + 1), scale, inst.bias)[:, 0]
        if head < heads + kv_heads:
            angles = m.raw(inst.rope)[[m.position(inst.row_position, r) for r in range(*rows)]]
            cos, sin = angles[:, j], angles[:, half + j]
            a, b = a * cos - b * sin, b * cos + a * sin
        if head < heads:
            output, cache = inst.q, None
        elif head < heads + kv_heads:
            head -= heads
            output, cache = inst.k_new, m.raw(inst.k_cache)
        else:
            head -= heads + kv_heads
            output, cache = inst.v_new, m.raw(inst.v_cache)
        if output != NONE:
            for element, value in ((j, a), (half + j, b)):
                column = 2 * half * head + element
                m.write(output, rows, (column, column + 1), value[:, None])
        if cache is None:
            continue
        for i, row in enumerate(range(*rows)):
            block, slot = place(inst, m, row)
            cache[block, head, slot, [j, half + j]] = torch.stack([a[i], b[i]]).to(cache.dtype)


def place(inst: QkvRope, m: View, row: int) -> tuple[int, int]:
    """(KV block, slot in it) of a step row."""
    block_size = m.tensors[inst.k_cache].shape[2]
    position = m.position(inst.row_position, row)
    sequence = int(m.raw(inst.row_sequence)[row])
    block = int(m.raw(inst.block_table)[sequence, position // block_size])
    return block, position % block_size
