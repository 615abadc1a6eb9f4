"""Examples of Matmul."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megavm.instructions.matmul import Matmul
from megavm.instructions.product import is_matrix_product
from megavm.vm.config import NONE, UNIT_ROWS
from megavm.vm.example import Example, Table
from megavm.vm.tensors import BF16, F32, DType


@dataclass(frozen=True)
class Case:
    """One instruction; the defaults make the simplest one."""

    name: str
    rows: int = 1
    k: int = 64
    columns: int = 32
    weight: DType = F32
    x: DType = F32
    out: DType = F32
    live: int | None = None
    tagged: bool = False
    extras: bool = False  # bias, squares of x, residual
    scaled: bool = False  # out_gain, out_scaled, out_squares
    whole: bool = False  # begins and ends with units, as if scaled
    unit: int = UNIT_ROWS  # columns of a sum of squares, of x too
    equal: bool = False  # rows of x of zeros: all results are the largest
    gather: bool = False
    tiles: int = 0  # column tiles that peaks have room for; 0: no peaks
    part: int = 0
    part_k: int = 0  # columns of x of a part; 0: all
    parts: int = 0  # number of parts that are added


CASES = [
    Case("vector"),
    Case("tails", rows=3, k=37, columns=21),
    Case("rows of every register tile", rows=7, k=48, columns=19),
    Case("many rows", rows=33, k=96, columns=50),
    Case("one column", rows=2, k=16, columns=1),
    Case("narrow", rows=5, k=3, columns=5),
    Case("deep", rows=2, k=1100, columns=20),
    Case("sums stay", rows=40, k=1100, columns=35),
    Case("rows in turn", rows=37, k=200, columns=70, gather=True, live=35, extras=True),
    Case("everything", rows=4, k=40, columns=24, extras=True, live=3),
    Case("tagged", rows=2, k=64, columns=34, tagged=True, extras=True),
    Case("gathered", rows=6, k=48, columns=20, gather=True, live=4),
    Case("no live row", rows=3, live=0, tagged=True),
]

PEAKS = [
    Case("peaks", rows=3, columns=45, tiles=1),
    Case("peaks of one column", columns=1, tiles=2),
    Case("peaks, tagged", rows=2, columns=34, tagged=True, extras=True, tiles=3),
    Case("peaks, gathered", rows=4, k=48, columns=70, gather=True, live=3, tiles=4),
    Case("peaks, sums stay", rows=40, k=1100, columns=35, tiles=2),
    Case("peaks, long rows in turn", rows=37, k=2102, columns=70, extras=True, tiles=2),
]


PARTS = [
    Case("first part", k=160, part_k=64),
    Case("inner part", rows=3, k=160, columns=21, part=1, part_k=64, live=2),
    Case("last part", rows=2, k=164, part=2, part_k=64),
    Case("deep part", rows=7, k=3100, part=1, part_k=1536, columns=19),
    Case("parts added", rows=3, k=96, columns=21, part=1, part_k=64, parts=2, tagged=True),
    Case("one part added to everything", rows=9, columns=22, extras=True, parts=1, live=8),
    Case("part, gathered", rows=6, k=160, part=2, part_k=64, gather=True),
    Case("part, sums stay", rows=40, k=2200, columns=35, part=1, part_k=1088),
    Case("parts added, sums stay", rows=40, k=2200, columns=35, part_k=1088, parts=2),
]

SCALED = [
    Case("scaled", rows=3, columns=48, scaled=True),
    Case("scaled, tails", rows=2, k=96, columns=22, scaled=True, extras=True, live=1),
    Case("scaled, one row", columns=40, k=1056, scaled=True, tagged=True, extras=True),
    Case("scaled, tagged", rows=9, columns=24, scaled=True, tagged=True, extras=True),
    Case("scaled, parts added", rows=8, k=192, columns=16, part=2, part_k=64, parts=2, scaled=True),
    Case("scaled, sums stay", rows=40, k=1100, columns=88, scaled=True, extras=True),
    Case("scaled, wide", rows=2, columns=2056, scaled=True, x=BF16, out=BF16, extras=True),
    Case("squares of long rows", rows=3, k=4136, columns=16, extras=True, tagged=True, live=2),
    Case("squares of one long row", k=2056, columns=16, extras=True, tagged=True, gather=True),
    Case("squares of long rows, untagged", rows=6, k=4128, columns=16, extras=True, gather=True),
]

# bfloat16 x and weights, and rows of whole 16 bytes. Up to 16 rows: groups of 16 rows on the GPU.
GROUPS = [
    Case("sixteen rows", rows=16, k=128, columns=64, whole=True),
    Case("sixteen rows, long", rows=16, k=3104, columns=203, extras=True),
    Case("sixteen rows, scaled", rows=14, k=2048, columns=152, live=11, extras=True, scaled=True),
    Case("sixteen rows, peaks", rows=16, k=2560, columns=170, live=15, tiles=2),
    Case("sixteen rows, parts added", rows=12, k=640, columns=136, part=1, part_k=320, parts=3),
    Case("sixteen rows, gathered", rows=13, k=264, columns=300, gather=True, live=9, tiles=4),
    Case("sixteen rows, none live", rows=16, live=0),
    Case("sixteen rows, long and tagged", rows=12, k=2112, columns=75, tagged=True, extras=True),
    Case("sixteen rows, long and scaled", rows=10, k=4160, columns=80, extras=True, scaled=True),
    Case("eight rows, long", rows=8, k=3104, columns=299, tiles=2, live=7),
    Case("eight rows, long and scaled", rows=7, k=4160, columns=88, extras=True, scaled=True),
    Case("eight rows, long and tagged", rows=5, k=2112, columns=75, tagged=True, extras=True),
    # Chunks of three pages, all of them full.
    Case("eight rows, three pages", rows=6, k=3072, columns=90, live=5),
    Case("sixteen rows, five pages", rows=13, k=5120, columns=80, extras=True, live=11),
]
# More: products of many rows.
MATRIX = [
    Case("matrix", rows=17, k=128, columns=64),
    Case("matrix, tails", rows=37, k=200, columns=83, live=33),
    Case("matrix, odd ends", rows=17, k=128, columns=62, tiles=1),
    Case("matrix, several blocks", rows=20, k=96, columns=600),
    Case("matrix, deep", rows=64, k=3104, columns=72, extras=True),
    Case("matrix, rows in turn", rows=300, k=136, columns=40, live=290, extras=True, scaled=True),
    Case("matrix, groups in turn", rows=140, k=264, columns=328, extras=True, tiles=2),
    Case("matrix, scaled", rows=100, k=1024, columns=136, extras=True, scaled=True, live=97),
    Case("matrix, part", rows=64, k=1088, columns=40, part=2, part_k=448, live=62),
    Case("matrix, part of many rows", rows=250, k=520, columns=200, part=1, part_k=256, live=201),
    Case("matrix, many rows, scaled", rows=256, k=136, columns=136, extras=True, scaled=True),
    Case("matrix, parts added", rows=40, k=640, columns=136, part=1, part_k=320, parts=3),
    Case("matrix, peaks", rows=50, k=264, columns=300, live=41, tiles=4),
    Case("matrix, few columns in turn", rows=150, k=776, columns=24, extras=True),
    Case("matrix, no live row", rows=17, live=0),
]
# The same, finished quads at a time (matrix_quads.cuh).
QUADS = [
    Case("quads", rows=37, k=200, columns=136, live=33, whole=True),
    Case("quads, bf16 result", rows=70, k=128, columns=328, out=BF16, extras=True, whole=True),
    Case("quads, shared block", rows=32, k=256, columns=48, extras=True, whole=True, tiles=1),
    Case("quads, shared rows", rows=120, k=512, columns=64, extras=True, whole=True, tiles=1),
    Case("quads, few shared rows", rows=17, k=256, columns=64, live=7, scaled=True, tiles=1),
    Case("quads, peaks", rows=140, k=200, columns=600, whole=True, tiles=2, live=131),
    Case("sums of 64", rows=100, k=1024, columns=192, extras=True, scaled=True, live=97, unit=64),
    Case("sums of 64, long rows", rows=40, k=3136, columns=64, extras=True, scaled=True, unit=64),
    Case("sums of 64, in turn", rows=270, k=128, columns=384, extras=True, scaled=True, unit=64),
    Case("quads, equal peaks", rows=60, k=128, columns=200, whole=True, tiles=1, equal=True),
]


def examples(rng: np.random.Generator) -> Iterator[Example]:
    for case in [*GROUPS, *MATRIX, *QUADS]:
        yield example(rng, replace(case, weight=BF16, x=BF16))
    for case in CASES:
        yield example(rng, case)
        yield example(rng, replace(case, name=f"{case.name}, bf16", weight=BF16))
        yield example(
            rng,
            replace(
                case,
                name=f"{case.name}, all bf16",
                weight=BF16,
                x=BF16,
                out=BF16,
                k=case.k // 2 * 2,
            ),
        )
    yield example(rng, Case("bf16 input of float32 weights", rows=3, x=BF16, out=BF16, extras=True))
    yield example(rng, Case("large bf16", rows=80, k=1056, columns=70, weight=BF16, extras=True))
    yield example(
        rng, Case("large all bf16", rows=130, k=1088, columns=40, weight=BF16, x=BF16, live=129)
    )
    for case in PARTS:
        yield example(rng, case)
        yield example(rng, replace(case, name=f"{case.name}, bf16", weight=BF16))
        tagged = replace(case, name=f"{case.name}, tagged", weight=BF16, x=BF16, tagged=True)
        yield example(rng, replace(tagged, k=case.k // 2 * 2))
    for case in [*PEAKS, *SCALED]:
        yield example(rng, case)
        yield example(rng, replace(case, name=f"{case.name}, bf16", weight=BF16))


def example(rng: np.random.Generator, case: Case) -> Example:
    """An example whose tile lies inside larger tensors, so that stores outside of it are noticed."""
    table = Table(rng)
    column_begin = 1 if case.out is F32 or not case.tagged else 2
    spare = case.columns % 2 + 2  # tagged rows are whole words
    whole = case.scaled or case.whole
    if whole:
        column_begin = case.unit
        spare = case.unit if case.columns % 8 else 2 * case.unit
    x_rows = case.rows + 4 if case.gather else case.rows + 1
    out_shape = (case.rows + 2, case.columns + spare)
    columns = out_shape[1]
    left = 0 if case.parts else case.part * columns  # where the result begins
    small = case.weight
    x = table.activation("x", (x_rows, case.k), case.x, tagged=case.tagged)
    weight = table.weight("weight", (columns, case.k), case.weight)
    scaled: dict[str, Any] = {}
    if case.scaled:
        scaled = table.scaled(out_shape, case.weight, tagged=case.tagged, unit=case.unit)
    inst = Matmul(
        x=x,
        weight=weight,
        bias=table.weight("bias", (columns,), small) if case.extras else NONE,
        x_squares=table.squares("x_squares", x_rows, case.k, tagged=case.tagged, unit=case.unit)
        if case.extras
        else NONE,
        residual=table.activation("residual", out_shape, case.out, tagged=case.tagged)
        if case.extras
        else NONE,
        out=table.output("out", (out_shape[0], left + columns), case.out, tagged=case.tagged),
        addends=table.activation(
            "addends", (out_shape[0], case.parts * columns), F32, tagged=case.tagged
        )
        if case.parts
        else NONE,
        **scaled,
        peaks=table.output("peaks", (out_shape[0], 2 * case.tiles), F32, tagged=case.tagged)
        if case.tiles
        else NONE,
        row_index=table.integers(
            "row_index", [0] + [int(i) for i in rng.integers(0, x_rows, case.rows + 1)]
        )
        if case.gather
        else NONE,
        row_count=table.count("row_count", None if case.live is None else case.live + 1),
        row_begin=1 if not case.gather or case.live else 0,
        row_end=case.rows + 1,
        column_begin=column_begin,
        column_end=case.columns + (column_begin if whole else 1),
        part=case.part,
        part_k=case.part_k or case.k,
        x_rows=x_rows if case.gather else case.rows + 1,
        tile=max(case.tiles - 1, 0),
        eps=1e-5,
        matrix=int(
            not case.gather and is_matrix_product(table.specs[x], table.specs[weight], case.rows)
        ),
    )
    if case.equal:
        table.values["x"][: case.rows // 2] = 0.0
    return Example(case.name, inst, table.specs, table.values)
