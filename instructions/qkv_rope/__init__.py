"""Query, key and value projections with rotary position embedding; keys and values go to the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.product import Product
from megavm.instructions.step_rows import KV_FAULTS, position_fault
from megavm.instructions.tiles import ranges, shapes, whole_groups
from megavm.vm.config import NONE
from megavm.vm.constants import Constant, same, union
from megavm.vm.layout import Layout, swizzled_if_possible, units
from megavm.vm.operands import integer, present, real, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole

SLOTS = (0, 2)  # the index of a KV cache chooses a block and a slot in it


class QkvRope(Product):
    """q[r], k_cache[slot(r)], v_cache[slot(r)] := rope(queries), rope(keys), values of s[r] * (x[r] . weight^T)

    for the live rows of [row_begin, row_end) and the *rotation pairs* [pair_begin, pair_end). The weight has
    the rows of the query heads, then of the key heads, then of the value heads. Pair p belongs to head
    p // (d / 2) of these and stands for that head's elements j = p % (d / 2) and j + d / 2, which ``rope``
    rotates together (d = head_dim)::

        (a_j, a_{j+d/2}) := (a_j cos t - a_{j+d/2} sin t, a_{j+d/2} cos t + a_j sin t),  t = angle[position, j]

    ``rope`` holds cos t in its first and sin t in its second half of columns (Su et al. 2021,
    arXiv:2104.09864, with the halves paired as in Hugging Face's Llama). Values are not rotated. The slot
    of a row at position p of sequence s is row p % block_size of KV block block_table[s, p // block_size];
    p is row_position[r] plus the number of the step within its launch. The scale s[r], from ``x_squares``,
    the bias and the rounding are as in Matmul.

    With ``k_new`` and ``v_new`` the rotated key and the value are also written to row r of these:
    k_new[r], v_new[r] := k_cache[slot(r)], v_cache[slot(r)]. Attention can read them as tagged words;
    then no instruction of the step waits for the caches.
    """

    opcode = 7
    faults = KV_FAULTS

    x = tensor("input [rows, k]", F32, BF16, tagged=True)
    weight = tensor(
        "query, key and value rows [(heads + 2 kv heads) * d, k]", F32, BF16, parts=True
    )
    bias = tensor(
        "bias of these rows [(heads + 2 kv heads) * d]", F32, BF16, optional=True, parts=True
    )
    x_squares = tensor(
        "squares of x before its gain [rows, ceil(k / 8) or k / 64]",
        F32,
        optional=True,
        tagged=True,
    )
    q = tensor("rotated queries [rows, heads * d]", F32, BF16, tagged=True)
    k_cache = tensor(
        "keys [blocks, kv heads, block_size, d]", F32, BF16, produced=True, index=SLOTS
    )
    v_cache = tensor(
        "values [blocks, kv heads, block_size, d]", F32, BF16, produced=True, index=SLOTS
    )
    k_new = tensor("the keys again [rows, kv heads * d]", F32, BF16, optional=True, tagged=True)
    v_new = tensor("the values again [rows, kv heads * d]", F32, BF16, optional=True, tagged=True)
    rope = tensor("cos and sin of the angles [positions, d]", F32)
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    block_table = tensor("KV blocks of every sequence [sequences, max blocks]", I32)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    pair_begin = integer("first rotation pair")
    pair_end = integer("end of the rotation pairs")
    eps = real("added to the mean square of x_squares", least=0.0)
    matrix = integer("1: a GPU multiplies the rows as a matrix; 0: in groups", default=0)

    def _weight_rows(self, tensors: Sequence[TensorSpec]) -> Iterator[tuple[int, int]]:
        """The contiguous ranges of the weight's rows that belong to the pairs."""
        head_dim = tensors[self.rope].columns
        half, begin = head_dim // 2, self.pair_begin
        while begin < self.pair_end:
            head, low = divmod(begin, half)
            if low == 0 and self.pair_end - begin >= half:
                stop = self.pair_end // half * half
                yield 2 * begin, 2 * stop
            else:
                stop = min(self.pair_end, (head + 1) * half)
                for first in (head * head_dim + low, head * head_dim + half + low):
                    yield first, first + stop - begin
            begin = stop

    def weight_rows(self) -> tuple[int, int]:
        return 2 * self.pair_begin, 2 * self.pair_end

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.x, rows, (0, tensors[self.x].columns))
        for weight_rows in self._weight_rows(tensors):
            yield Region(self.weight, weight_rows, (0, tensors[self.weight].columns))
            for handle in present(self.bias):
                yield Region(handle, weight_rows, (0, 1))
        for handle in present(self.x_squares):
            yield Region(handle, rows, (0, tensors[handle].columns))
        yield Region(self.row_sequence, rows, (0, 1))
        yield Region(self.row_position, rows, (0, 1))
        for handle in present(self.rope, self.block_table, self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        queries, keys = (
            tensors[self.q].columns,
            QkvRope.k_cache.entry_columns(tensors[self.k_cache]),
        )
        outputs = (
            (0, queries, self.q, NONE),
            (queries, keys, self.k_cache, self.k_new),
            (queries + keys, keys, self.v_cache, self.v_new),
        )
        for begin, end in self._weight_rows(tensors):
            for first, size, output, copy in outputs:
                columns = max(begin - first, 0), min(end - first, size)
                if columns[0] < columns[1]:
                    yield Region(output, rows, columns, indexed=output != self.q)
                    for handle in present(copy):
                        yield Region(handle, rows, columns)

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        rows = self.row_end - self.row_begin
        k = tensors[self.x].columns
        columns = 2 * (self.pair_end - self.pair_begin)
        x, weight, q = tensors[self.x], tensors[self.weight], tensors[self.q]
        copied = sum(
            r.elements * tensors[r.tensor].dtype.size
            for r in self.writes(tensors)
            if r.tensor in (self.k_new, self.v_new)
        )
        product = columns * (k * weight.dtype.size + rows * q.dtype.size)
        return rows * k * x.dtype.size + product + copied

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        tile = 2 * (self.row_end - self.row_begin) * (self.pair_end - self.pair_begin)
        return tile * (2 * tensors[self.x].columns + 3)

    def constants(self, tensors: Sequence[TensorSpec]) -> dict[str, Constant]:
        block_size = tensors[self.k_cache].shape[2]
        copies = self.kinds(tensors, self.q, self.k_new, self.v_new).value
        if not self.matrix:  # steps of the same kernel store words or not, by their size
            copies |= (copies << 2 | copies >> 2) & 0xF
        return {
            **super().constants(tensors),
            "block_size": same(block_size),
            "copy_kinds": union(copies),
        }

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        caches = {
            name: (swizzled_if_possible(tensors[cache]),)
            for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache))
        }
        return {"weight": (units(tensors[self.rope].columns // 2),), **caches}

    @staticmethod
    def pair_unit(head_dim: int, column_unit: int) -> int:
        """Tiles begin at multiples of this many rotation pairs. It divides half a head."""
        return math.gcd(head_dim // 2, column_unit // 2)

    @classmethod
    def stored_columns(cls, columns: Mapping[str, int], column_unit: int) -> int:
        return cls.pair_unit(columns["rope"], column_unit)  # the halves of a head lie apart

    def fault(self, name: str, target: int, tensors: Sequence[TensorSpec]) -> str:
        if name == "POSITION" and tensors[self.rope].rows == target:
            return position_fault("rope")
        return super().fault(name, target, tensors)

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, q = tensors[self.x], tensors[self.q]
        k_cache, v_cache = tensors[self.k_cache], tensors[self.v_cache]
        head_dim = tensors[self.rope].columns
        if k_cache.shape != v_cache.shape or head_dim % 2:
            yield (
                f"k_cache {k_cache.shape} and v_cache {v_cache.shape} must be equal, and head_dim {head_dim} even"
            )
            return
        kv_columns = k_cache.shape[1] * head_dim
        weight_rows = q.columns + 2 * kv_columns
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(x.rows, q.rows)),
            pairs=(self.pair_begin, self.pair_end, weight_rows // 2),
        )
        if k_cache.shape[3] != head_dim or q.columns % head_dim:
            yield (
                f"head_dim is {head_dim} in rope, {k_cache.shape[3]} in k_cache; q has {q.columns} columns"
            )
        yield from shapes(
            tensors,
            weight=(self.weight, weight_rows, tensors[self.weight].columns),
            k_new=(self.k_new, None, kv_columns),
            v_new=(self.v_new, None, kv_columns),
        )
        yield from super().check(tensors)
        yield from whole_groups(tensors, head_dim, weight=self.weight, bias=self.bias)
        yield from check_newest(tensors, self.k_cache, self.v_cache, self.k_new, self.v_new)
        for name in ("q", "k_new", "v_new"):
            for spec in (tensors[h] for h in present(getattr(self, name))):
                if spec.tagged and head_dim // 2 * spec.dtype.size % 4:
                    half = f"half a head of {head_dim} {spec.dtype.name}"
                    yield f"{name} {spec.name} is tagged, but {half} is no whole words"


def check_newest(
    tensors: Sequence[TensorSpec], k_cache: int, v_cache: int, k_new: int, v_new: int
) -> Iterator[str]:
    """Sentences about caches, k_new and v_new of different types, and about k_new without v_new."""
    if (k_new == NONE) != (v_new == NONE):
        yield f"{'k_new' if k_new == NONE else 'v_new'} is missing: k_new and v_new go together"
    elif k_new != NONE and tensors[k_new].tagged != tensors[v_new].tagged:
        tagged, plain = (k_new, v_new) if tensors[k_new].tagged else (v_new, k_new)
        yield (
            f"{tensors[tagged].name} is tagged and {tensors[plain].name} is not: "
            "k_new and v_new are read alike"
        )
    for spec in (tensors[h] for h in (v_cache, *present(k_new, v_new))):
        cache = tensors[k_cache]
        if spec.dtype is not cache.dtype:
            yield f"{spec.name} holds {spec.dtype.name}, {cache.name} holds {cache.dtype.name}"
