"""Causal attention of the step's rows over the paged KV cache, one part of each row's context."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megavm.instructions.qkv_rope import SLOTS, check_newest
from megavm.instructions.step_rows import KV_FAULTS
from megavm.instructions.tiles import (
    aligned,
    ranges,
    result_columns,
    round_up,
    shapes,
)
from megavm.vm.config import (
    CPU_LANES,
    MAX_ATTENTION_ELEMENTS,
    MAX_GROUP_ROWS,
    MAX_MATRIX_ROWS,
    MIN_GROUP_ROWS,
    NONE,
    NUM_CONSUMER_WARPS,
)
from megavm.vm.constants import Constant, largest, same
from megavm.vm.isa import Instruction, StepShape, TagOrder
from megavm.vm.layout import Layout, swizzled_if_possible
from megavm.vm.operands import integer, present, real, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole

# The CPU's kernel reads a KV block once for up to so many rows of a sequence, as long as their queries for
# one KV head have no more elements than this, and weighs the scores of so many tokens together.
ROWS_AT_ONCE = 8
QUERY_ELEMENTS = 8192
RUN_TOKENS = 64

_MOST_CHUNK = 2**31 - 1  # tokens; a kernel adds the length of a context to it in 32 bits


class Attention(Instruction):
    """out[r, h] := softmax(scale * q[r, h] . K[0..p, g(h)]) . V[0..p, g(h)]

    for the live rows of [row_begin, row_end) and the query heads of the KV heads [head_begin, head_end);
    p is the row's position (row_position[r] plus the number of the step within its launch), g(h) the KV
    head of query head h, and K and V are found through the row's block table.

    A row's p + 1 tokens form n = ceil((p + 1) / chunk) chunks; split i of N covers the chunks
    [i n // N, (i + 1) n // N). With one split the result goes to ``out``. With more, the split's
    unnormalised sum, its maximum m and its sum l of exp(score - m) go to ``partial`` (an empty split
    writes m = -inf, l = 0), and AttentionMerge joins them. Softmax is computed online over KV blocks
    (Milakov and Gimelshein 2018, arXiv:1805.02867; the split: Flash-Decoding, Dao et al. 2023).

    Sequences of the step may share blocks of the caches only if earlier steps wrote those blocks: a row
    reads what this step writes only in its own sequence, at positions up to p.

    With ``k_new`` and ``v_new`` the row's own token comes from them: K[p] := k_new[r], V[p] := v_new[r].
    The instruction then reads the caches only at positions below p, which earlier steps wrote, so the rows
    of the step must belong to different sequences. Position p lies in the last chunk, so only the last
    split reads k_new and v_new.
    """

    opcode = 8
    faults = KV_FAULTS
    # Programs split attention or not, depending on the context; with the merge one kernel serves both.
    companions = ("attention_merge",)
    earlier_operand = "k_new"

    q = tensor("rotated queries [rows, heads * d]", F32, BF16, tagged=True)
    k_cache = tensor(
        "keys [blocks, kv heads, block_size, d]", F32, BF16, produced=True, index=SLOTS
    )
    v_cache = tensor(
        "values [blocks, kv heads, block_size, d]", F32, BF16, produced=True, index=SLOTS
    )
    k_new = tensor(
        "keys of the rows themselves [rows, kv heads * d]", F32, BF16, optional=True, tagged=True
    )
    v_new = tensor(
        "values of the rows themselves [rows, kv heads * d]", F32, BF16, optional=True, tagged=True
    )
    out = tensor(
        "result [rows, heads * d], with one split",
        F32,
        BF16,
        optional=True,
        tagged=True,
        gathered=True,
    )
    partial = tensor(
        "[rows, splits, heads, d + 2], with several splits", F32, optional=True, tagged=True
    )
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    block_table = tensor("KV blocks of every sequence [sequences, max blocks]", I32)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    head_begin = integer("first KV head")
    head_end = integer("end of the KV heads")
    split = integer("which split this is")
    num_splits = integer("how many there are")
    chunk = integer("tokens per chunk, a multiple of block_size")
    context = integer("most tokens a row may see (for the cost only)")
    step_rows = integer("rows of the step whose keys and values may be read")
    scale = real("factor of the scores")

    def group(self, tensors: Sequence[TensorSpec]) -> int:
        """Query heads per KV head."""
        cache = tensors[self.k_cache]
        return tensors[self.q].columns // (cache.shape[1] * cache.shape[3])

    def newest(self) -> Iterator[int]:
        """k_new and v_new, if this split reads them."""
        return present(self.k_new, self.v_new) if self.split == self.num_splits - 1 else iter(())

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        head_dim = tensors[self.k_cache].shape[3]
        columns = (self.head_begin * head_dim, self.head_end * head_dim)
        group = self.group(tensors)
        yield Region(self.q, rows, (columns[0] * group, columns[1] * group))
        for cache in (self.k_cache, self.v_cache):
            earlier = self.k_new != NONE
            yield Region(cache, (0, self.step_rows), columns, indexed=True, earlier=earlier)
        for handle in self.newest():
            yield Region(handle, rows, columns)
        yield Region(self.row_sequence, rows, (0, 1))
        yield Region(self.row_position, rows, (0, 1))
        yield whole(tensors, self.block_table)
        for handle in present(self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        head_dim = tensors[self.k_cache].shape[3]
        group = self.group(tensors)
        first, last = self.head_begin * group, self.head_end * group
        for handle in present(self.out):
            yield Region(handle, rows, (first * head_dim, last * head_dim))
        for handle in present(self.partial):
            width = head_dim + 2
            base = self.split * (tensors[self.q].columns // head_dim)
            yield Region(handle, rows, ((base + first) * width, (base + last) * width))

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        cache, q = tensors[self.k_cache], tensors[self.q]
        rows, heads = self.row_end - self.row_begin, self.head_end - self.head_begin
        tokens = self.context // self.num_splits
        width = heads * cache.shape[3]
        copied = sum(width * tensors[h].dtype.size for h in self.newest())
        queries = 2 * width * self.group(tensors) * q.dtype.size
        readers = rows if self.k_new != NONE else 1  # rows of a prompt read the caches together
        return readers * 2 * tokens * width * cache.dtype.size + rows * (queries + copied)

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        rows, heads = self.row_end - self.row_begin, self.head_end - self.head_begin
        width = heads * self.group(tensors) * tensors[self.k_cache].shape[3]
        return 4 * rows * width * (self.context // self.num_splits)

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        _, _, block_size, head_dim = tensors[self.k_cache].shape
        group, size = self.group(tensors), tensors[self.k_cache].dtype.size
        newest = 0 if self.k_new == NONE else 2 * aligned(block_size * head_dim * size)
        values = (
            aligned(4 * block_size * head_dim) if size != 4 else 0
        )  # of one KV block, as float32
        width = round_up(head_dim, CPU_LANES)
        rows = min(ROWS_AT_ONCE, max(1, QUERY_ELEMENTS // (group * width)))
        heads = min(self.row_end - self.row_begin, rows) * group
        keys = aligned(4 * width * CPU_LANES)
        queries = 2 * aligned(4 * heads * width)  # queries, and as many sums
        run = max(RUN_TOKENS // block_size, 1) * block_size
        scores = aligned(4 * heads * round_up(run, CPU_LANES))
        return newest + values + keys + queries + scores + 2 * aligned(4 * heads)

    def scratch_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        # Every consumer leaves sums, highest score and total weight of every query head.
        head_dim = tensors[self.k_cache].shape[3]
        states = 4 * NUM_CONSUMER_WARPS * self.group(tensors) * (head_dim + 2)
        # Of the queries of a run, half are there (tile.cuh).
        runs = self.forms_runs and self.is_fast(tensors)
        return max(states, BF16.size * MAX_ATTENTION_ELEMENTS // 2 if runs else 0)

    @property
    def forms_runs(self) -> bool:
        """Whether the kernel has code for rows of a sequence that attend together on the GPU.

        Those for decode steps of up to 64 rows have not, as it leaves no registers to other code. Larger
        decode steps run the kernel of prompts.
        """
        decodes = self.k_new != NONE and self.step_rows <= MAX_MATRIX_ROWS // 2
        return self.step_rows > MAX_GROUP_ROWS and not decodes

    def constants(self, tensors: Sequence[TensorSpec]) -> dict[str, Constant]:
        cache, group = tensors[self.k_cache], self.group(tensors)
        head_dim = cache.shape[3]
        rows, heads = self.row_end - self.row_begin, self.head_end - self.head_begin
        several = rows * heads > 1 and self.step_rows > MIN_GROUP_ROWS
        return {
            "head_dim": same(head_dim),
            "group": same(group),
            "block_size": same(cache.shape[2]),
            "fast": same(self.is_fast(tensors)),
            "pairs": largest(int(several or self.step_rows > MAX_GROUP_ROWS)),
            "runs": largest(int(self.forms_runs)),
        }

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        return {
            name: (swizzled_if_possible(tensors[cache]),)
            for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache))
        }

    def is_fast(self, tensors: Sequence[TensorSpec]) -> bool:
        """Whether the GPU's kernel for common shapes applies (fast.cuh); the others use a plain kernel."""
        _, _, block_size, head_dim = tensors[self.k_cache].shape
        types = {tensors[h].dtype for h in (self.k_cache, self.q, *present(self.k_new, self.v_new))}
        whole_blocks = block_size % 8 == 0 and block_size & (block_size - 1) == 0
        return (
            types == {BF16} and head_dim in (64, 128) and self.group(tensors) <= 8 and whole_blocks
        )

    @classmethod
    def prefers_words(cls, operand: str, operands: Collection[str], shape: StepShape) -> bool:
        # One worker reads each word. Without k_new it waits for a barrier, because of the caches. Matrix
        # products store words no sooner than they signal. With several pairs of a row and a head, the
        # machine would wait for the words of all before the first.
        few = shape.rows <= MAX_GROUP_ROWS and shape.pairs <= 1
        return shape.rows == 1 or ("k_new" in operands and few)

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        rows, heads = self.row_end - self.row_begin, self.head_end - self.head_begin
        if rows == heads == 1 and self.is_fast(tensors):
            return TagOrder.KEPT
        tagged = any(tensors[h].tagged for h in (self.q, *self.newest()))
        return TagOrder.BY_MACHINE if tagged else TagOrder.READS_LATE

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        q, k_cache, v_cache = (tensors[h] for h in (self.q, self.k_cache, self.v_cache))
        if k_cache.shape != v_cache.shape:
            yield f"k_cache {k_cache.shape} and v_cache {v_cache.shape} must be equal"
            return
        _, kv_heads, block_size, head_dim = k_cache.shape
        yield from ranges(
            rows=(self.row_begin, self.row_end, q.rows),
            heads=(self.head_begin, self.head_end, kv_heads),
            split=(self.split, self.split + 1, self.num_splits),
            step_rows=(0, self.step_rows, q.rows),
        )
        if q.columns % (kv_heads * head_dim):
            yield f"q has {q.columns} columns, not a multiple of {kv_heads} KV heads of {head_dim}"
            return
        if self.step_rows < self.row_end:
            # Row r reads the keys and values of its sequence up to those of row r of the step.
            yield f"step_rows is {self.step_rows}, below row_end {self.row_end}"
        if not 0 < self.chunk <= _MOST_CHUNK or self.chunk % block_size:
            yield f"chunk {self.chunk} is not a multiple of block_size {block_size} up to {_MOST_CHUNK}"
        if (self.out == NONE) == (self.num_splits == 1) or (self.partial == NONE) == (
            self.num_splits > 1
        ):
            yield f"{self.num_splits} splits need {'out' if self.num_splits == 1 else 'partial'} only"
        heads = q.columns // head_dim
        yield from shapes(
            tensors,
            row_count=(self.row_count, 1, 1),
            k_new=(self.k_new, None, kv_heads * head_dim),
            v_new=(self.v_new, None, kv_heads * head_dim),
        )
        yield from result_columns(tensors, out=(self.out, q.columns))
        for spec in (tensors[h] for h in present(self.out)):
            if spec.tagged and head_dim * spec.dtype.size % 4:
                head = f"a head of {head_dim} {spec.dtype.name}"
                yield f"out {spec.name} is tagged, but {head} is no whole words"
        yield from check_newest(tensors, self.k_cache, self.v_cache, self.k_new, self.v_new)
        for handle in present(self.partial):
            spec = tensors[handle]
            if spec.columns < self.num_splits * heads * (head_dim + 2) or spec.rows < self.row_end:
                yield (
                    f"partial {spec.name} of {spec.shape} is smaller than "
                    f"[{self.row_end}, {self.num_splits}, {heads}, {head_dim + 2}]"
                )
            yield from check_partial(spec, head_dim)


def check_partial(partial: TensorSpec, head_dim: int) -> Iterator[str]:
    """A sentence about a tensor of splits whose rows begin between two elements that are accessed together."""
    if head_dim % 2 == 0 and partial.columns % 2:
        yield (
            f"partial {partial.name} has rows of {partial.columns} elements, expected an even number for "
            f"heads of {head_dim}"
        )
