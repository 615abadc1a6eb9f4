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
    query_pairs, key_pairs = (m.tensors[w].rows // 2 for w in (inst.q_weight, inst.k_weight))
    for pair in range(inst.pair_begin, inst.pair_end):
        if pair < query_pairs:
            part, number = 0, pair
        elif pair < query_pairs + key_pairs:
            part, number = 1, pair - query_pairs
        else:
            part, number = 2, pair - query_pairs - key_pairs
        head, j = divmod(number, half)
        weight = (inst.q_weight, inst.k_weight, inst.v_weight)[part]
        bias = (inst.q_bias, inst.k_bias, inst.v_bias)[part]
        low = 2 * half * head + j
        high = low + half
        a = product(m, x, weight, (low, low + 1), scale, bias)[:, 0]
        b = product(m, x, weight, (high, high + 1), scale, bias)[:, 0]
        if part < 2:
            angles = m.raw(inst.rope)[[m.position(inst.row_position, r) for r in range(*rows)]]
            cos, sin = angles[:, j], angles[:, half + j]
            a, b = a * cos - b * sin, b * cos + a * sin
        if part == 0:
            m.write(inst.q, rows, (low, low + 1), a[:, None])
            m.write(inst.q, rows, (high, high + 1), b[:, None])
            continue
        cache, copy = m.raw(inst.k_cache), inst.k_new
        if part == 2:
            cache, copy = m.raw(inst.v_cache), inst.v_new
        if copy != NONE:
            m.write(copy, rows, (low, low + 1), a[:, None])
            m.write(copy, rows, (high, high + 1), b[:, None])
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
