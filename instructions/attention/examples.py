"""Examples of Attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megavm.instructions.attention import Attention
from megavm.vm.config import NONE
from megavm.vm.example import Example, Table, paged_step
from megavm.vm.tensors import BF16, F32, DType, TensorKind


@dataclass(frozen=True)
class Case:
    """One instruction. Rows are (sequence, position)."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    rows: list[tuple[int, int]]
    live: int | None  # None: there is no count, all rows are live
    block_size: int = 8
    q: DType = F32
    cache: DType = F32
    out: DType = F32
    tagged: bool = False
    kv_head_range: tuple[int, int] | None = None
    splits: tuple[int, int, int] = (0, 1, 8)  # split, number of splits, chunk
    newest: bool = False  # k_new and v_new: rows of different sequences
    context: int = 64  # most tokens of a sequence
    sign: int = 1  # -1: the scale is negative


APART = [(0, 37), (1, 0), (2, 8), (3, 63), (4, 7)]
MIXED = [(0, 37), (1, 0), (1, 1), (1, 2), (2, 63), (2, 7)]
MANY = [(i, 5 * i + 3) for i in range(5)] + [(2, i) for i in range(14, 44)]
LONG = [(0, i) for i in range(1000, 1100)] + [(1, 900)] + [(2, i) for i in range(70)]
ENDS = [(0, i) for i in range(128, 256)]  # GPUs take 32 rows and 128 tokens at a time
HALVES = [(0, i) for i in range(280, 320)] + [(1, i) for i in range(40)]
LONG_APART = [(i, (0, 63, 64, 199, 5, 130)[i % 6] + i // 6) for i in range(18)]
FEW_APART = LONG_APART[:15]
# The first warpgroup has all query rows of the run, and the second one is ahead of it.
RUN_THEN_ROW = [(0, i) for i in range(364, 384)] + [(1, 0)]
# Warps that have read all of a row help with rows that are much longer.
UNEVEN = [(i, (1000, 3, 64, 620, 0, 63, 1023, 127)[i % 8]) for i in range(18)]
# Arguments of cases that the fast kernel of the GPU accepts.
FAST: dict[str, Any] = {"q": BF16, "cache": BF16, "out": BF16, "block_size": 16}
FAST |= {"splits": (0, 1, 16)}
FAST_HALF = FAST | {"splits": (0, 2, 16)}
LAST = {"splits": (1, 2, 16)}
NEWEST = {"newest": True, "tagged": True}


def blocks(size: int) -> dict[str, Any]:
    return {"block_size": size, "splits": (0, 1, size)}


CASES = [
    Case("multi-head", 2, 2, 16, MIXED, 6),
    Case("grouped", 8, 2, 64, MIXED, 6, kv_head_range=(1, 2)),
    Case("group of three, odd shapes", 6, 2, 10, MIXED, 5, block_size=5, splits=(0, 1, 5)),
    Case("multi-query", 9, 1, 24, MIXED, 6, block_size=16, splits=(0, 1, 16)),
    Case("long heads", 2, 1, 130, MIXED, 6, block_size=32, splits=(0, 1, 32)),
    Case(
        "bf16", 8, 2, 64, MIXED, 6, q=BF16, cache=BF16, out=BF16, block_size=16, splits=(0, 1, 16)
    ),
    Case(
        "bf16, odd shapes", 5, 1, 18, MIXED, 4, cache=BF16, out=BF16, block_size=3, splits=(0, 1, 3)
    ),
    Case("tagged", 4, 2, 16, MIXED, 6, cache=BF16, tagged=True),
    Case("smallest head", 2, 1, 2, MIXED, 6, block_size=1, splits=(0, 1, 1)),
    Case("first of three splits", 4, 2, 16, MIXED, 6, splits=(0, 3, 16)),
    Case("second of three splits", 4, 2, 16, MIXED, 6, cache=BF16, splits=(1, 3, 16)),
    Case("last of three splits", 4, 2, 20, MIXED, 6, tagged=True, splits=(2, 3, 16)),
    Case("split of some heads", 6, 3, 8, MIXED, 6, kv_head_range=(1, 3), splits=(1, 2, 8)),
    Case("newest", 4, 2, 16, APART, 5, newest=True),
    Case("newest, bf16", 8, 2, 64, APART, 4, q=BF16, cache=BF16, out=BF16, newest=True),
    Case("newest, tagged, at position 0", 6, 3, 10, [(1, 0)], 1, tagged=True, newest=True),
    Case(
        "newest, tagged, some heads",
        8,
        4,
        64,
        [(0, 40)],
        1,
        block_size=16,
        q=BF16,
        cache=BF16,
        out=BF16,
        tagged=True,
        newest=True,
        kv_head_range=(1, 3),
        splits=(0, 1, 16),
    ),
    Case("newest, first of two splits", 4, 2, 16, APART, 5, newest=True, splits=(0, 2, 16)),
    Case("newest, last of two splits", 4, 2, 16, APART, 5, newest=True, splits=(1, 2, 16)),
    Case(
        "newest, tagged, last of three splits",
        4,
        2,
        20,
        APART,
        3,
        cache=BF16,
        tagged=True,
        newest=True,
        splits=(2, 3, 8),
    ),
    Case("fast, long heads", 6, 2, 128, MIXED, 5, **FAST),
    Case("fast, first of two splits", 4, 1, 64, APART, 4, **FAST_HALF),
    Case("fast, last of two splits", 4, 1, 64, APART, 5, **(FAST_HALF | LAST)),
    Case("fast, many rows", 4, 2, 64, MANY, 35, **FAST),
    Case("fast, prompts", 8, 2, 64, MANY, 33, **FAST),
    Case("fast, prompts, long heads", 8, 2, 128, MANY, 35, **FAST),
    Case("fast, prompts, multi-head", 3, 3, 64, MANY, 34, **FAST),
    Case("fast, prompts, group of three", 6, 2, 64, MANY, 35, **FAST),
    Case("fast, prompts, group of eight", 8, 1, 64, MANY, 35, **FAST),
    Case("fast, prompts, group of seven, long heads", 7, 1, 128, MANY, 35, **FAST),
    Case("fast, prompts, first of two splits", 4, 1, 64, MANY, 35, **FAST_HALF),
    Case("fast, prompts, last of two splits", 4, 1, 64, MANY, 33, **(FAST_HALF | LAST)),
    Case(
        "fast, prompts, last of two splits, long heads", 4, 1, 128, MANY, 35, **(FAST_HALF | LAST)
    ),
    Case("fast, long prompts", 4, 1, 64, LONG, 171, context=1100, **FAST),
    Case("fast, long prompts, long heads", 8, 2, 128, LONG, 150, context=1100, **FAST),
    Case("fast, prompts, small blocks", 4, 2, 128, MANY, 35, **(FAST | blocks(8))),
    Case(
        "fast, prompts, blocks of a step", 8, 2, 128, LONG, 171, context=1152, **(FAST | blocks(64))
    ),
    Case("fast, prompts, large blocks", 4, 1, 64, LONG, 171, context=1152, **(FAST | blocks(128))),
    Case("fast, rows apart", 4, 1, 64, LONG_APART, 17, context=256, **FAST),
    Case("fast, rows apart, long heads", 8, 2, 128, LONG_APART, 14, context=256, **FAST),
    Case("fast, rows apart, newest", 4, 2, 64, LONG_APART, 18, newest=True, context=256, **FAST),
    Case(
        "fast, rows apart, of one head", 2, 2, 128, LONG_APART, 9, newest=True, context=256, **FAST
    ),
    Case("fast, few rows apart", 8, 2, 128, FEW_APART, 14, context=256, **FAST),
    Case("fast, few rows apart, newest", 4, 2, 64, FEW_APART, 15, newest=True, context=256, **FAST),
    Case("fast, few rows apart, tagged", 8, 1, 64, FEW_APART, 11, context=256, **(FAST | NEWEST)),
    Case("fast, rows apart, two", 4, 1, 64, LONG_APART, 2, newest=True, context=256, **FAST),
    Case("fast, rows apart, one", 4, 1, 128, LONG_APART, 1, newest=True, context=256, **FAST),
    Case("fast, rows apart, tagged", 8, 1, 64, LONG_APART, 11, context=256, **(FAST | NEWEST)),
    Case(
        "fast, rows apart, last of two",
        6,
        2,
        64,
        LONG_APART,
        12,
        context=256,
        **(FAST_HALF | LAST | NEWEST),
    ),
    Case("fast, uneven rows", 4, 1, 64, UNEVEN, 18, context=1024, **FAST),
    Case("fast, uneven rows, newest", 4, 1, 64, UNEVEN, 11, newest=True, context=1024, **FAST),
    Case("fast, uneven rows, four", 4, 1, 64, UNEVEN, 4, newest=True, context=1024, **FAST),
    Case("fast, uneven rows, two", 2, 1, 128, UNEVEN, 2, newest=True, context=1024, **FAST),
    Case(
        "fast, uneven rows, small blocks", 4, 1, 64, UNEVEN, 16, context=1024, **(FAST | blocks(8))
    ),
    Case(
        "fast, uneven rows, blocks of 64", 4, 1, 64, UNEVEN, 18, context=1024, **(FAST | blocks(64))
    ),
    Case(
        "fast, a prompt, then a row",
        3,
        1,
        128,
        RUN_THEN_ROW,
        21,
        context=512,
        **(FAST | blocks(64)),
    ),
    Case("fast, uneven rows, long heads", 8, 2, 128, UNEVEN, 15, context=1024, **FAST),
    Case("fast, few uneven rows", 4, 1, 64, UNEVEN[:12], 12, newest=True, context=1024, **FAST),
    Case(
        "fast, few uneven rows, tagged", 8, 1, 128, UNEVEN[:14], 13, context=1024, **(FAST | NEWEST)
    ),
    Case(
        "fast, uneven rows, first of two", 6, 2, 64, UNEVEN, 7, context=1024, **(FAST_HALF | NEWEST)
    ),
    Case(
        "fast, uneven rows, last of two",
        4,
        1,
        128,
        UNEVEN,
        16,
        context=1024,
        **(FAST_HALF | LAST | NEWEST),
    ),
    Case("fast, newest, tagged", 8, 2, 64, APART, 5, **(FAST | NEWEST)),
    Case("fast, newest, tagged, long heads", 6, 2, 128, APART, 4, **(FAST | NEWEST)),
    Case("fast, newest, tagged, first of two", 4, 1, 64, APART, 4, **(FAST_HALF | NEWEST)),
    Case("fast, newest, tagged, last of two", 4, 1, 64, APART, 5, **(FAST_HALF | LAST | NEWEST)),
    Case("no live row", 2, 2, 16, MIXED, 0, tagged=True),
    Case("not counted", 2, 2, 16, MIXED, None),
    Case("fast, long prompts, first of two", 4, 1, 64, HALVES, 80, context=320, **FAST_HALF),
    Case(
        "fast, long prompts, last of two", 8, 2, 128, HALVES, 79, context=320, **(FAST_HALF | LAST)
    ),
    Case("fast, long prompts, ends of turns", 8, 2, 128, ENDS, 128, context=256, **FAST),
    Case("fast, long prompts, turned round", 4, 1, 64, LONG, 171, context=1100, sign=-1, **FAST),
]


def examples(rng: np.random.Generator) -> Iterator[Example]:
    for case in CASES:
        yield example(rng, case)


def example(rng: np.random.Generator, case: Case) -> Example:
    """An example whose KV blocks are scattered over a cache. Slots that no row sees hold NaN."""
    table = Table(rng)
    d, rows = case.head_dim, len(case.rows)
    per_sequence = -(-case.context // case.block_size)
    sequences = max(sequence for sequence, _ in case.rows) + 1
    num_blocks = sequences * per_sequence + 4
    steps = paged_step(table, case.rows, case.live, per_sequence, num_blocks)
    cache_shape = (num_blocks, case.kv_heads, case.block_size, d)
    split, num_splits, chunk = case.splits
    out = partial = NONE
    if num_splits == 1:
        out = table.output("out", (rows, case.heads * d), case.out, tagged=case.tagged)
    else:
        shape = (rows, num_splits, case.heads, d + 2)
        partial = table.output("partial", shape, F32, tagged=case.tagged)
    head_begin, head_end = case.kv_head_range or (0, case.kv_heads)
    newest: dict[str, Any] = {
        name: table.activation(name, (rows, case.kv_heads * d), case.cache, tagged=case.tagged)
        for name in ("k_new", "v_new")
        if case.newest
    }
    blocks = table.values["block_table"]
    unseen = torch.ones(num_blocks, case.block_size, dtype=torch.bool)
    seen: dict[int, int] = {}  # tokens of each sequence
    for sequence, position in case.rows:
        seen[sequence] = max(seen.get(sequence, 0), position + (not case.newest))
    for sequence, count in seen.items():
        token = torch.arange(count)
        unseen[blocks[sequence, token // case.block_size].long(), token % case.block_size] = False

    def cache(name: str) -> int:
        value = table.normal(*cache_shape)
        value.transpose(1, 2)[unseen] = math.nan
        return table.add(name, cache_shape, case.cache, TensorKind.STATE, value)

    inst = Attention(
        q=table.activation("q", (rows, case.heads * d), case.q, tagged=case.tagged),
        k_cache=cache("k_cache"),
        v_cache=cache("v_cache"),
        out=out,
        partial=partial,
        **newest,
        row_sequence=steps.row_sequence,
        row_position=steps.row_position,
        block_table=steps.block_table,
        row_count=steps.row_count,
        row_begin=0,
        row_end=rows,
        head_begin=head_begin,
        head_end=head_end,
        split=split,
        num_splits=num_splits,
        chunk=chunk,
        context=case.context,
        step_rows=rows,
        scale=case.sign * d**-0.5,
    )
    return Example(case.name, inst, table.specs, table.values)
