"""Query, key and value projections with rotary position embedding; keys and values go to the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.tiles import (
    product_constants,
    product_tag_order,
    product_working_bytes,
    ranges,
    shapes,
    squares_of,
    units_of,
)
from megavm.vm.config import NONE
from megavm.vm.isa import (
    BF16,
    F32,
    I32,
    Constant,
    Instruction,
    Region,
    TagOrder,
    TensorSpec,
    integer,
    present,
    real,
    same,
    tensor,
    whole,
)
from megavm.vm.layout import Layout, swizzled_if_possible, units


class QkvRope(Instruction):
    """q[r], k_cache[slot(r)], v_cache[slot(r)] := rope(s[r] * (x[r] . q_weight^T)), rope(... k_weight^T), ... v_weight^T

    for the live rows of [row_begin, row_end) and the *rotation pairs* [pair_begin, pair_end). Pairs are
    counted over the query heads, then the key heads, then the value heads: pair p belongs to head
    p // (d / 2) and stands for that head's elements j = p % (d / 2) and j + d / 2, which ``rope`` rotates
    together (d = head_dim)::

        (a_j, a_{j+d/2}) := (a_j cos t - a_{j+d/2} sin t, a_{j+d/2} cos t + a_j sin t),  t = angle[position, j]

    ``rope`` holds cos t in its first and sin t in its second half of columns (Su et al. 2021,
    arXiv:2104.09864, with the halves paired as in Hugging Face's Llama). Values are not rotated. The slot
    of a row at position p of sequence s is row p % block_size of KV block block_table[s, p // block_size];
    p is row_position[r] plus the number of the step within its launch. The scale s[r], from ``x_squares``,
    the biases and the rounding are as in Matmul.

    With ``k_new`` and ``v_new`` the rotated key and the value are also written to row r of these:
    k_new[r], v_new[r] := k_cache[slot(r)], v_cache[slot(r)]. Attention can read them as tagged words;
    then no instruction of the step waits for the caches.
    """

    opcode = 7

    x = tensor("input [rows, k]", F32, BF16, tagged=True)
    q_weight = tensor("query weight [heads * d, k]", F32, BF16)
    k_weight = tensor("key weight [kv heads * d, k]", F32, BF16)
    v_weight = tensor("value weight [kv heads * d, k]", F32, BF16)
    q_bias = tensor("query bias [heads * d]", F32, BF16, optional=True)
    k_bias = tensor("key bias [kv heads * d]", F32, BF16, optional=True)
    v_bias = tensor("value bias [kv heads * d]", F32, BF16, optional=True)
    x_squares = tensor(
        "squares of x before its gain [rows, ceil(k / 8)]", F32, optional=True, tagged=True
    )
    q = tensor("rotated queries [rows, heads * d]", F32, BF16, tagged=True)
    k_cache = tensor("keys [blocks, kv heads, block_size, d]", F32, BF16, produced=True)
    v_cache = tensor("values [blocks, kv heads, block_size, d]", F32, BF16, produced=True)
    k_new = tensor("the keys again [rows, kv heads * d]", F32, BF16, optional=True, tagged=True)
    v_new = tensor("the values again [rows, kv heads * d]", F32, BF16, optional=True, tagged=True)
    rope = tensor("cos and sin of the angles [positions, d]", F32)
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    block_table = tensor("KV blocks of every sequence [sequences, max blocks]", I32)
    row_count = tensor("number of live rows [1]", I32)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    pair_begin = integer("first rotation pair")
    pair_end = integer("end of the rotation pairs")
    eps = real("added to the mean square of x_squares", least=0.0)

    def parts(self, tensors: Sequence[TensorSpec]) -> Iterator[tuple[int, int, int, int]]:
        """The contiguous column ranges covered: (part, begin, end, k) with part 0, 1, 2 for q, k, v.

        ``k`` is the number of columns of the weight.
        """
        head_dim = tensors[self.rope].columns
        half = head_dim // 2
        first = 0
        for part, handle in enumerate((self.q_weight, self.k_weight, self.v_weight)):
            weight = tensors[handle]
            count = weight.rows // 2
            begin, end = max(self.pair_begin - first, 0), min(self.pair_end - first, count)
            first += count
            while begin < end:
                head, low = divmod(begin, half)
                if low == 0 and end - begin >= half:
                    stop = end // half * half
                    yield part, 2 * begin, 2 * stop, weight.columns
                else:
                    stop = min(end, (head + 1) * half)
                    high = stop - head * half
                    yield part, head * head_dim + low, head * head_dim + high, weight.columns
                    second = head * head_dim + half
                    yield part, second + low, second + high, weight.columns
                begin = stop

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.x, rows, (0, tensors[self.x].columns))
        weights = (self.q_weight, self.k_weight, self.v_weight)
        biases = (self.q_bias, self.k_bias, self.v_bias)
        for part, begin, end, k in self.parts(tensors):
            yield Region(weights[part], (begin, end), (0, k))
            for handle in present(biases[part]):
                yield Region(handle, (begin, end), (0, 1))
        for handle in present(self.x_squares):
            yield Region(handle, rows, (0, tensors[handle].columns))
        yield Region(self.row_sequence, rows, (0, 1))
        yield Region(self.row_position, rows, (0, 1))
        for handle in (self.rope, self.block_table, self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        outputs = (self.q, self.k_cache, self.v_cache)
        copies = (NONE, self.k_new, self.v_new)
        for part, begin, end, _ in self.parts(tensors):
            yield Region(outputs[part], rows, (begin, end), indexed=part > 0)
            for handle in present(copies[part]):
                yield Region(handle, rows, (begin, end))

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        rows = self.row_end - self.row_begin
        k = tensors[self.x].columns
        columns = 2 * (self.pair_end - self.pair_begin)
        x, weight, q = tensors[self.x], tensors[self.q_weight], tensors[self.q]
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

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        weight = tensors[self.q_weight]
        return product_working_bytes(
            self.row_end - self.row_begin,
            2 * (self.pair_end - self.pair_begin),
            weight.columns,
            weight.dtype.size,
        )

    def constants(self, tensors: Sequence[TensorSpec]) -> dict[str, Constant]:
        return product_constants(
            tensors,
            x=self.x,
            weight=self.q_weight,
            x_squares=self.x_squares,
            biases=(self.q_bias, self.k_bias, self.v_bias),
        ) | {"block_size": same(tensors[self.k_cache].shape[2])}

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        caches = {
            name: (swizzled_if_possible(tensors[cache]),)
            for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache))
        }
        pairs = (units(tensors[self.rope].columns // 2),)
        return dict.fromkeys(("q_weight", "k_weight", "v_weight"), pairs) | caches

    def tag_order(self, tensors: Sequence[TensorSpec], single_row: bool) -> TagOrder:
        weight = tensors[self.q_weight]
        units = first = 0
        for handle in (self.q_weight, self.k_weight, self.v_weight):
            pairs = tensors[handle].rows // 2
            begin, end = max(self.pair_begin - first, 0), min(self.pair_end - first, pairs)
            first += pairs
            units += units_of(2 * begin, 2 * end) if begin < end else 0
        return product_tag_order(
            tensors,
            rows=self.row_end - self.row_begin,
            units=units,
            k=weight.columns,
            itemsize=weight.dtype.size,
            inputs=(self.x, self.x_squares),
            single_row=single_row,
        )

    def position_holder(self, limit: int, tensors: Sequence[TensorSpec]) -> str:
        return "rope" if tensors[self.rope].rows == limit else self.sequence_holder()

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, q = tensors[self.x], tensors[self.q]
        k_cache, v_cache = tensors[self.k_cache], tensors[self.v_cache]
        head_dim = tensors[self.rope].columns
        if len(k_cache.shape) != 4 or k_cache.shape != v_cache.shape or head_dim % 2:
            yield (
                f"k_cache {k_cache.shape} and v_cache {v_cache.shape} must be equal, of four dimensions, "
                f"and head_dim {head_dim} even"
            )
            return
        kv_columns = k_cache.shape[1] * head_dim
        pairs = q.columns // 2 + kv_columns
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(x.rows, q.rows)),
            pairs=(self.pair_begin, self.pair_end, pairs),
        )
        if k_cache.shape[3] != head_dim or q.columns % head_dim:
            yield (
                f"head_dim is {head_dim} in rope, {k_cache.shape[3]} in k_cache; q has {q.columns} columns"
            )
        yield from shapes(
            tensors,
            q_weight=(self.q_weight, q.columns, x.columns),
            x_squares=(self.x_squares, None, squares_of(x.columns)),
            k_weight=(self.k_weight, kv_columns, x.columns),
            v_weight=(self.v_weight, kv_columns, x.columns),
            q_bias=(self.q_bias, q.columns, 1),
            k_bias=(self.k_bias, kv_columns, 1),
            v_bias=(self.v_bias, kv_columns, 1),
            k_new=(self.k_new, None, kv_columns),
            v_new=(self.v_new, None, kv_columns),
            row_count=(self.row_count, 1, 1),
        )
        yield from check_newest(tensors, self.k_cache, self.v_cache, self.k_new, self.v_new)
        for name in ("q", "k_new", "v_new"):
            for spec in (tensors[h] for h in present(getattr(self, name))):
                if spec.tagged and head_dim // 2 * spec.dtype.size % 4:
                    half = f"half a head of {head_dim} {spec.dtype.name}"
                    yield f"{name} {spec.name} is tagged, but {half} is no whole words"
        types = {tensors[h].dtype for h in (self.q_weight, self.k_weight, self.v_weight)}
        if len(types) != 1:
            yield f"the three weights hold {', '.join(sorted(t.name for t in types))}"


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
