"""Operations with their tiles, and waits for exactly what they conflict with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.attention import Attention
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.embed import Embed
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.sample import (
    INTEGER_COLUMNS,
    MASK_BITS,
    REAL_COLUMNS,
    SEGMENT_TOKENS,
    Sample,
    segment_words,
)
from megavm.vm.config import MAX_WAITS, NONE
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, DType, Region, TensorKind, TensorSpec


@dataclass
class Operation:
    label: str
    tiles: list[Instruction]


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def conflict(tensors: Sequence[TensorSpec], a: Region, b: Region) -> bool:
    """Whether two regions may share an element."""
    if a.tensor != b.tensor:
        return False
    if a.indexed == b.indexed:
        return overlap(a.rows, b.rows) and overlap(a.columns, b.columns)
    return len(tensors[a.tensor].shape) == 4 or overlap(a.columns, b.columns)


class Accesses:
    """What the tiles of a program read and write, of tensors that can change."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.tensors = tensors
        self.known: dict[int, tuple[list[Region], list[Region]]] = {}

    def of(self, tile: Instruction) -> tuple[list[Region], list[Region]]:
        if id(tile) not in self.known:
            reads = [r for r in tile.reads(self.tensors) if self.tensors[r.tensor].writable]
            self.known[id(tile)] = reads, list(tile.writes(self.tensors))
        return self.known[id(tile)]

    def ordered(self, before: Instruction, after: Instruction, same_step: bool) -> bool:
        """Whether ``after`` needs a barrier behind ``before``."""
        (reads, writes), (later_reads, later_writes) = self.of(before), self.of(after)
        return any(
            conflict(self.tensors, a, b)
            for earlier, later, is_flow in (
                (writes, later_reads, True),
                (writes, later_writes, False),
                (reads, later_writes, False),
            )
            for a in earlier
            for b in later
            # Tagged words of the same step are waited for without a barrier.
            if not (is_flow and same_step and self.tensors[a.tensor].tagged)
            # What earlier steps wrote is not written by this one, nor by a later one.
            and not a.earlier
            and not (b.earlier and same_step)
        )


Need = tuple[int, int]  # operation, and 0 for this step or -1 for the step before


def build(
    tensors: Sequence[TensorSpec], operations: Sequence[Operation], workers: int, dynamic: bool
) -> Program:
    """Give every operation a barrier, and let every tile wait for what it needs and nothing implied."""
    accesses = Accesses(tensors)
    needs: dict[int, list[set[Need]]] = {}  # by operation, of each tile
    for number, operation in enumerate(operations):
        needs[number] = [
            {
                need
                for other, source in enumerate(operations)
                if (need := need_of(accesses, tile, number, source, other, dynamic))
            }
            for tile in operation.tiles
        ]
    implied = {number: set().union(*tiles) for number, tiles in needs.items()}
    for _ in operations:  # transitive
        for known in implied.values():
            known |= {(o, s + step) for n, step in known for o, s in implied[n] if s + step >= -1}
    barriers = [o.label for o in operations]
    instructions: list[Instruction] = []
    labels: list[str] = []
    queues: list[list[int]] = [[] for _ in range(1 if dynamic else workers)]
    tiles = [(number, tile) for number, o in enumerate(operations) for tile in o.tiles]
    for turn, (number, tile) in enumerate(tiles):
        wanted = needs[number][operations[number].tiles.index(tile)]
        others = {w: {(o, s + w[1]) for o, s in implied[w[0]]} for w in wanted}
        # Reads of earlier rows are ordered by waits for their writers alone: these are not implied,
        # and stay in the header.
        own = {n for n, _ in wanted if writes_earlier_rows(accesses, operations[n], tile)}
        waits = [
            Wait(n, 0 if step else len(operations[n].tiles))
            for n, step in sorted(wanted, key=lambda need: (need[0] in own, need))
            if n in own
            or not any({(n, step), (n, 0)} & others[w] for w in wanted if w != (n, step))
        ]
        queue = queues[turn % len(queues)]
        while len(waits) > MAX_WAITS:  # join some of them
            queue.append(len(instructions))
            instructions.append(Noop(waits=waits[:MAX_WAITS], signal=len(barriers)))
            waits = [*waits[MAX_WAITS:], Wait(len(barriers), 1)]
            labels.append("join")
            barriers.append(f"join {len(barriers)}")
        queue.append(len(instructions))
        instructions.append(tile.with_sync(waits, number))
        labels.append(operations[number].label)
    return Program.build(
        tensors,
        instructions,
        queues,
        barriers=barriers,
        dynamic=dynamic,
        workers=workers,
        labels=labels,
    )


def writes_earlier_rows(accesses: Accesses, source: Operation, tile: Instruction) -> bool:
    """Whether a step of the operation writes what the tile reads in the next step."""
    return any(
        conflict(accesses.tensors, written, read)
        for other in source.tiles
        for written in accesses.of(other)[1]
        for read in accesses.of(tile)[0]
        if read.earlier
    )


def need_of(
    accesses: Accesses,
    tile: Instruction,
    number: int,
    source: Operation,
    other: int,
    dynamic: bool,
) -> Need | None:
    """What a tile of operation ``number`` needs of operation ``other``."""
    sources = [s for s in source.tiles if dynamic or s is not tile]
    if other < number and any(accesses.ordered(s, tile, True) for s in sources):
        return other, 0
    if any(accesses.ordered(s, tile, False) for s in sources):
        return other, -1
    return None


def cut(size: int, pieces: int) -> Iterable[tuple[int, int]]:
    return ((size * i // pieces, size * (i + 1) // pieces) for i in range(pieces))


class Model:
    """Tensors and operations of small networks."""

    def __init__(self, tagged: bool, rows: int = 1, newest: bool = False) -> None:
        self.tagged = tagged
        self.rows = rows
        self.newest = newest  # attention reads the keys and values of the step from k_new and v_new
        self.tensors: list[TensorSpec] = []
        self.operations: list[Operation] = []
        self.handles: dict[str, int] = {}

    def tensor(
        self,
        name: str,
        *shape: int,
        kind: TensorKind = TensorKind.ACTIVATION,
        dtype: DType = F32,
        tagged: bool | None = None,
    ) -> int:
        if name not in self.handles:
            tag = self.tagged and kind is TensorKind.ACTIVATION if tagged is None else tagged
            self.handles[name] = len(self.tensors)
            self.tensors.append(TensorSpec(name, shape, dtype, kind, tag))
        return self.handles[name]

    def weight(self, name: str, *shape: int) -> int:
        return self.tensor(name, *shape, kind=TensorKind.WEIGHT)

    def given(self, name: str, *shape: int, dtype: DType = I32) -> int:
        return self.tensor(name, *shape, kind=TensorKind.INPUT, dtype=dtype)

    def state(self, name: str, *shape: int, dtype: DType = F32) -> int:
        return self.tensor(name, *shape, kind=TensorKind.STATE, dtype=dtype)

    def add(self, label: str, tiles: Iterable[Instruction]) -> None:
        self.operations.append(Operation(label, list(tiles)))

    def matmul(self, x: int, out: int, tiles: int, residual: int = NONE) -> None:
        k, columns = self.tensors[x].columns, self.tensors[out].columns
        label = f"{self.tensors[x].name} to {self.tensors[out].name}"
        weight = self.weight(f"{label}.weight", columns, k)
        self.add(
            label,
            (
                Matmul(
                    x=x,
                    weight=weight,
                    residual=residual,
                    out=out,
                    row_begin=0,
                    row_end=self.rows,
                    x_rows=self.rows,
                    tile=0,
                    part=0,
                    part_k=k,
                    column_begin=begin,
                    column_end=end,
                    eps=0.0,
                )
                for begin, end in cut(columns, tiles)
            ),
        )

    def mlp(self, x: int, out: int, name: str) -> None:
        k = self.tensors[x].columns
        hidden = self.tensor(f"{name}.hidden", self.rows, 2 * k)
        weight = self.weight(f"{name}.gate_up_weight", 4 * k, k)
        self.add(
            f"{name}.gate_up",
            (
                GateUp(
                    x=x,
                    weight=weight,
                    out=hidden,
                    row_begin=0,
                    row_end=self.rows,
                    column_begin=begin,
                    column_end=end,
                    eps=0.0,
                )
                for begin, end in cut(2 * k, 3)
            ),
        )
        self.matmul(hidden, out, 2, residual=x)

    def project(self, x: int, name: str, caches: str) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Queries, keys and values of ``x``; returns the handles of the step, the caches, the queries."""
        rows, heads, d, block = self.rows, 2, 2, 2
        step: dict[str, Any] = {
            "row_sequence": self.given("row_sequence", rows),
            "row_position": self.given("row_position", rows),
            "block_table": self.given("block_table", rows, 2),
            "row_count": self.given("row_count", 1),
        }
        k = self.tensors[x].columns
        cache: dict[str, Any] = {
            f"{c}_cache": self.state(f"{caches}.{c}", 2, heads, block, d) for c in "kv"
        }
        q = self.tensor(f"{name}.q", rows, heads * d)
        if self.newest:
            cache |= {f"{c}_new": self.tensor(f"{name}.{c}_new", rows, heads * d) for c in "kv"}
        weight = self.weight(f"{name}.qkv_weight", 3 * heads * d, k)
        self.add(
            f"{name}.qkv",
            (
                QkvRope(
                    x=x,
                    weight=weight,
                    q=q,
                    rope=self.given("rope", 4, d, dtype=F32),
                    pair_begin=begin,
                    pair_end=end,
                    row_begin=0,
                    row_end=rows,
                    eps=0.0,
                    **cache,
                    **step,
                )
                for begin, end in cut(3 * heads * d // 2, 1 if caches != name else 3)
            ),
        )
        return step, cache, q

    def attention(self, x: int, out: int, name: str, splits: int) -> None:
        """Two query heads, one KV head each, of two elements."""
        rows, heads, d, block = self.rows, 2, 2, 2
        step, cache, q = self.project(x, name, name)
        partial = self.tensor(f"{name}.partial", rows, splits, heads, d + 2) if splits > 1 else NONE
        self.add(
            f"{name}.attention",
            (
                Attention(
                    q=q,
                    out=out if splits == 1 else NONE,
                    partial=partial,
                    row_begin=0,
                    row_end=rows,
                    head_begin=head,
                    head_end=head + 1,
                    split=split,
                    num_splits=splits,
                    chunk=block,
                    context=4,
                    step_rows=rows,
                    scale=1.0,
                    **cache,
                    **step,
                )
                for head in range(heads)
                for split in range(splits)
            ),
        )
        if splits > 1:
            self.add(
                f"{name}.merge",
                (
                    AttentionMerge(
                        partial=partial,
                        out=out,
                        row_count=step["row_count"],
                        row_begin=0,
                        row_end=rows,
                        head_begin=head,
                        head_end=head + 1,
                        head_dim=d,
                        num_splits=splits,
                    )
                    for head in range(heads)
                ),
            )

    def embed(self, out: int) -> None:
        self.add(
            "embed",
            (
                Embed(
                    table=self.weight("table", 6, self.tensors[out].columns),
                    tokens=self.state("tokens", self.rows, 4, dtype=I32),
                    row_sequence=self.given("row_sequence", self.rows),
                    row_position=self.given("row_position", self.rows),
                    row_count=self.given("row_count", 1),
                    out=out,
                    row_begin=row,
                    row_end=row + 1,
                    column_begin=0,
                    column_end=self.tensors[out].columns,
                )
                for row in range(self.rows)
            ),
        )

    def sample(self, logits: int) -> None:
        """The largest logit if logits are tagged words; else a choice as sequences ask for it."""
        rows, vocabulary = self.tensors[logits].shape
        sources: dict[str, Any] = {"logits": logits}
        given: dict[str, Any] = {
            "tokens": self.state("tokens", self.rows, 4, dtype=I32),
            "sampling_real": self.given("sampling_real", rows, REAL_COLUMNS, dtype=F32),
            "sampling_integer": self.given("sampling_integer", rows, INTEGER_COLUMNS),
            "logit_row": self.given("logit_row", rows),
            "logit_count": self.given("logit_count", 1),
            "row_sequence": self.given("row_sequence", rows),
            "row_position": self.given("row_position", rows),
        }
        if not self.tensors[logits].tagged:
            sources = {
                "adjusted": self.tensor("adjusted", rows, vocabulary, tagged=False),
                "segments": self.tensor("segments", rows, segment_words(vocabulary), tagged=False),
            }
            masks: dict[str, Any] = {
                "allowed": self.given("allowed", rows, -(-vocabulary // MASK_BITS)),
                "bias": self.given("bias", rows, vocabulary, dtype=F32),
                "masks_written": self.given("masks_written", 1),
                "masks_awaited": self.given("masks_awaited", 1),
            }
            self.add(
                "adjust",
                (
                    AdjustLogits(
                        logits=logits,
                        **sources,
                        **given,
                        **masks,
                        row_begin=row,
                        row_end=row + 1,
                        column_begin=begin,
                        column_end=min(begin + SEGMENT_TOKENS, vocabulary),
                    )
                    for row in range(rows)
                    for begin in range(0, vocabulary, SEGMENT_TOKENS)
                ),
            )
        self.add(
            "sample",
            (Sample(**sources, **given, row_begin=row, row_end=row + 1) for row in range(rows)),
        )
