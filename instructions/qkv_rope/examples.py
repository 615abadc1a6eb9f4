"""Examples of QkvRope."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megavm.instructions.product import is_matrix_product
from megavm.instructions.qkv_rope import QkvRope
from megavm.vm.config import NONE
from megavm.vm.example import Example, Table, paged_step
from megavm.vm.tensors import BF16, F32, DType, TensorKind

POSITIONS = 40


@dataclass(frozen=True)
class Case:
    """One instruction; ``pairs`` None: all of them. Rows are (sequence, position)."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: list[tuple[int, int]]
    live: int | None  # None: there is no count, all rows are live
    k: int = 48
    pairs: tuple[int, int] | None = None
    weight: DType = F32
    x: DType = F32
    q: DType = F32
    cache: DType = F32
    tagged: bool = False
    extras: bool = False  # bias, x_squares, and weight and bias in parts
    newest: bool = False  # k_new and v_new


MIXED = [(0, 17), (1, 0), (1, 1), (1, 2), (2, 39)]
LONG = [(0, i) for i in range(35)]
APART = [(i % 4, 9 * (i // 4)) for i in range(16)]
LONGER = [(i % 4, i // 4) for i in range(150)]

ALL_BF16: dict[str, Any] = {"weight": BF16, "x": BF16, "q": BF16, "cache": BF16}

CASES = [
    Case("multi-head", 2, 2, 16, MIXED, 5),
    Case("grouped", 4, 2, 32, MIXED, 5, pairs=(0, 128)),
    Case("multi-query, odd shapes", 3, 1, 10, MIXED, 4, k=37, extras=True),
    Case("part of a head", 4, 2, 64, [(0, 3)], 1, pairs=(40, 75), extras=True),
    Case("keys and values", 2, 2, 8, MIXED, 5, pairs=(7, 21)),
    Case("smallest head", 2, 1, 2, MIXED, 3),
    Case("bf16", 4, 2, 32, MIXED, 5, k=64, **ALL_BF16, extras=True),
    Case("bf16 of float32", 4, 2, 20, MIXED, 5, k=50, weight=BF16, q=BF16, cache=BF16, extras=True),
    Case(
        "tagged", 4, 1, 16, [(0, 5), (1, 9)], 2, weight=BF16, cache=BF16, tagged=True, extras=True
    ),
    Case("newest", 4, 2, 16, MIXED, 4, newest=True, extras=True),
    Case(
        "newest, bf16, part of the keys",
        4,
        2,
        12,
        MIXED,
        5,
        pairs=(22, 33),
        cache=BF16,
        newest=True,
    ),
    Case("newest, tagged", 4, 2, 16, [(1, 0)], 1, q=BF16, cache=BF16, tagged=True, newest=True),
    Case("newest, tagged, rows", 2, 2, 10, MIXED, 3, k=37, tagged=True, newest=True),
    Case(
        "newest, tagged, part of a head",
        2,
        1,
        64,
        [(0, 9)],
        1,
        pairs=(72, 120),
        tagged=True,
        newest=True,
    ),
    Case("prefill", 4, 2, 64, LONG, 34, k=70, **ALL_BF16),
    Case(
        "prefill, sums stay",
        1,
        1,
        40,
        LONG,
        35,
        k=2100,
        weight=BF16,
        q=BF16,
        cache=BF16,
        extras=True,
    ),
    Case("prefill, float32", 2, 1, 24, LONG, 35, k=1100),
    Case("sixteen rows", 4, 2, 64, APART, 15, k=2200, **ALL_BF16, extras=True, newest=True),
    Case("matrix", 4, 2, 64, LONG, 34, k=264, **ALL_BF16, extras=True),
    Case("matrix, many rows", 4, 2, 64, LONGER, 141, k=136, weight=BF16, x=BF16, cache=BF16),
    Case("matrix, newest", 2, 2, 32, LONG, 33, k=136, pairs=(7, 90), **ALL_BF16, newest=True),
    Case("no live row", 2, 1, 8, MIXED, 0, tagged=True),
    Case("not counted", 2, 1, 8, MIXED, None),
]


def examples(rng: np.random.Generator) -> Iterator[Example]:
    for case in CASES:
        yield example(rng, case)


def example(rng: np.random.Generator, case: Case) -> Example:
    """An example whose rows write to random KV blocks of a cache that is full of other values."""
    table = Table(rng)
    d, block_size = case.head_dim, 8
    q_columns, kv_columns = case.heads * d, case.kv_heads * d
    num_rows = len(case.rows)
    num_blocks = 5 * (max(s for s, _ in case.rows) + 1) + 2
    steps = paged_step(table, case.rows, case.live, 5, num_blocks)
    angles = torch.from_numpy(rng.uniform(0, 6.28, (POSITIONS, d // 2)).astype(np.float32))
    cache_shape = (num_blocks, case.kv_heads, block_size, d)
    caches: dict[str, Any] = {
        name: table.add(name, cache_shape, case.cache, TensorKind.STATE, table.normal(*cache_shape))
        for name in ("k_cache", "v_cache")
    }
    copies: dict[str, Any] = {
        name: table.output(name, (num_rows, kv_columns), case.cache, tagged=case.tagged)
        for name in ("k_new", "v_new")
        if case.newest
    }
    weight_rows = q_columns + 2 * kv_columns
    parts = {"q": q_columns, "k": kv_columns, "v": kv_columns} if case.extras else {}
    pairs = case.pairs or (0, weight_rows // 2)
    x = table.activation("x", (num_rows, case.k), case.x, tagged=case.tagged)
    weight = table.weight("weight", (weight_rows, case.k), case.weight, parts=parts)
    inst = QkvRope(
        x=x,
        weight=weight,
        bias=table.weight("bias", (weight_rows,), case.weight, parts=parts)
        if case.extras
        else NONE,
        x_squares=table.squares("x_squares", len(case.rows), case.k, tagged=case.tagged)
        if case.extras
        else NONE,
        q=table.output("q", (num_rows, q_columns), case.q, tagged=case.tagged),
        **caches,
        **copies,
        rope=table.add(
            "rope",
            (POSITIONS, d),
            F32,
            TensorKind.WEIGHT,
            torch.cat([angles.cos(), angles.sin()], 1),
        ),
        row_sequence=steps.row_sequence,
        row_position=steps.row_position,
        block_table=steps.block_table,
        row_count=steps.row_count,
        row_begin=0,
        row_end=num_rows,
        pair_begin=pairs[0],
        pair_end=pairs[1],
        eps=1e-5,
        matrix=int(is_matrix_product(table.specs[x], table.specs[weight], num_rows)),
    )
    return Example(case.name, inst, table.specs, table.values)
