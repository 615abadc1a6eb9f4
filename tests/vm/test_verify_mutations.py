"""The verifier against an interpreter that knows nothing of it: thousands of broken and of harmless programs.

The interpreter runs a program under any schedule, in events: waits satisfied, one region read, one region
written, signalled. An instruction is abstract: what it writes is a hash of its operands, the step and all
that it read, so that whatever arrives too late or too early shows in the result. The *outcome* of a run is
the hash of every instruction of every step, and the final contents of memory.

What holds for every mutant of a correct program:

* Accepted: it ends under every schedule tried, always with the same outcome. If only waits, signals or the
  order of queues changed, every activation also holds what it held in the original: such a mutant
  lost nothing it needed. (Other mutations may change the meaning: another weight, another tile.)
* Rejected for a deadlock: it hangs.
* Rejected for order: the two accesses named conflict, and there are two schedules, one that delays the
  first access and one that delays the second, that make them in either order (or hang).
* Rejected for reading what is not written: the interpreter reads it unwritten.

Harmless mutations, the last part, are accepted.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from megavm.instructions import instruction_set
from megavm.instructions.attention import Attention
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.copy import Copy
from megavm.instructions.embed import Embed
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.rms_norm import RmsNorm
from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Sample
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import Assignment, CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.config import HEADER_WORDS, MAX_WAITS, NONE
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, DType, Region, TensorKind, TensorSpec
from megavm.vm.verify import Access, VerificationError, verify

MUTANTS_PER_PROGRAM = 230
RANDOM_PROGRAMS = 6000


# ---- Programs: operations with their tiles, and waits for exactly what they conflict with.


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
        waits = [
            Wait(n, 0 if step else len(operations[n].tiles))
            for n, step in sorted(wanted)
            if not any({(n, step), (n, 0)} & others[w] for w in wanted if w != (n, step))
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
        rows, vocabulary = self.tensors[logits].shape
        self.add(
            "sample",
            (
                Sample(
                    logits=logits,
                    adjusted=self.tensor("adjusted", rows, vocabulary, tagged=False),
                    tokens=self.state("tokens", self.rows, 4, dtype=I32),
                    sampling_real=self.given("sampling_real", rows, REAL_COLUMNS, dtype=F32),
                    sampling_integer=self.given("sampling_integer", rows, INTEGER_COLUMNS),
                    logit_row=self.given("logit_row", rows),
                    logit_count=self.given("logit_count", 1),
                    row_sequence=self.given("row_sequence", rows),
                    row_position=self.given("row_position", rows),
                    row_begin=row,
                    row_end=row + 1,
                )
                for row in range(rows)
            ),
        )


def cut(size: int, pieces: int) -> Iterable[tuple[int, int]]:
    return ((size * i // pieces, size * (i + 1) // pieces) for i in range(pieces))


def attend_newest(m: Model) -> None:
    m.newest = True
    attend(m)


def llama_newest(m: Model) -> None:
    m.newest = True
    llama(m)


def copies(m: Model) -> None:
    source = m.state("source", 1, 8)
    for name in ("first", "second", "third"):
        out = m.tensor(name, 1, 8)
        m.add(
            name,
            (
                Copy(
                    x=source,
                    out=out,
                    x_row=0,
                    x_column=begin,
                    row_begin=0,
                    row_end=1,
                    column_begin=begin,
                    column_end=end,
                )
                for begin, end in cut(8, 3 if name == "second" else 2)
            ),
        )
        source = out


def matvecs(m: Model) -> None:
    x = m.state("x", 1, 4)
    y, z = m.tensor("y", 1, 6), m.tensor("z", 1, 4)
    m.matmul(x, y, 3)
    m.matmul(y, z, 2)
    m.tagged = False
    m.matmul(z, x, 2)


def mlps(m: Model) -> None:
    x, y, z = m.state("x", 1, 4), m.tensor("y", 1, 4), m.tensor("z", 1, 4)
    norm = m.tensor("norm", 1, 4)
    m.mlp(x, y, "a")
    m.add(
        "norm",
        [RmsNorm(x=y, gain=m.weight("gain", 4), out=norm, row_begin=0, row_end=1, eps=0.0)],
    )
    m.mlp(norm, z, "b")


def attend(m: Model) -> None:
    x, attended, y = (
        m.state("x", m.rows, 4),
        m.tensor("attended", m.rows, 4),
        m.tensor("y", m.rows, 4),
    )
    m.attention(x, attended, "a", 2)
    m.matmul(attended, y, 2, residual=x)


def rewrite(m: Model) -> None:
    """The queries of one projection are the input of the next, which rewrites the same keys and values."""
    source = m.state("x", 1, 4)
    for name in ("one", "two", "three"):
        m.project(source, name, "cache")
        source = m.handles[f"{name}.q"]


def llama(m: Model) -> None:
    x = m.tensor("x", m.rows, 4)
    m.embed(x)
    for layer in range(2):
        attended = m.tensor(f"{layer}.attended", m.rows, 4)
        between, after = (
            m.tensor(f"{layer}.between", m.rows, 4),
            m.tensor(f"{layer}.after", m.rows, 4),
        )
        m.attention(x, attended, f"{layer}", 1 + layer)
        m.matmul(attended, between, 2, residual=x)
        m.mlp(between, after, f"{layer}")
        x = after
    logits = m.tensor("logits", m.rows, 6, tagged=False)
    m.matmul(x, logits, 2)
    m.sample(logits)


def chunks(_: Model) -> Program:
    """Worker 0 signals one barrier chunk by chunk, worker 1 waits for each chunk alone."""
    tensors = (
        TensorSpec("a", (1, 8), F32, TensorKind.STATE),
        TensorSpec("b", (1, 8), F32, TensorKind.ACTIVATION),
        TensorSpec("c", (1, 8), F32, TensorKind.ACTIVATION),
    )

    def tile(x: int, out: int, i: int, waits: list[Wait], signal: int) -> Copy:
        return Copy(
            x=x,
            out=out,
            x_row=0,
            x_column=2 * i,
            row_begin=0,
            row_end=1,
            column_begin=2 * i,
            column_end=2 * i + 2,
            waits=waits,
            signal=signal,
        )

    produce = [tile(0, 1, i, [Wait(1, 0)] if i == 0 else [], 0) for i in range(4)]
    consume = [tile(1, 2, i, [Wait(0, i + 1)], 1) for i in range(4)]
    return Program.build(
        tensors,
        [*produce, *consume],
        [range(4), range(4, 8)],
        barriers=["produced", "consumed"],
        labels=["produce"] * 4 + ["consume"] * 4,
    )


def compiled(_: Model, assignment: Assignment = "balanced") -> Program:
    """What the compiler makes of a step of one row: attention waits for nothing but earlier steps."""
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=4,
        intermediate_size=6,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
    )
    graph = llama_graph(config, Limits(1, 8, 1, 1, 2, 4), Bucket(1, 1, 8), F32)
    options = CompileOptions(
        4, exchange="tagged", assignment=assignment, column_unit=2, min_chunk=4
    )
    return compile_graph(graph, options)


def compiled_dynamic(m: Model) -> Program:
    return compiled(m, "dynamic")


CASES: list[tuple[Callable[[Model], Any], int, bool, bool, int]] = [
    # network, workers, dynamic, tagged, rows
    (copies, 1, False, False, 1),
    (copies, 3, False, False, 1),
    (copies, 2, False, True, 1),
    (copies, 2, True, False, 1),
    (matvecs, 2, False, False, 1),
    (matvecs, 3, False, True, 1),
    (matvecs, 3, True, False, 1),
    (matvecs, 2, True, True, 1),
    (mlps, 2, False, False, 1),
    (mlps, 4, False, True, 1),
    (mlps, 3, True, False, 1),
    (attend, 3, False, False, 2),
    (attend, 3, False, True, 1),
    (attend, 2, True, False, 1),
    (attend, 4, True, True, 1),
    (rewrite, 2, False, True, 1),
    (rewrite, 2, True, True, 1),
    (llama, 2, False, False, 1),
    (llama, 5, False, False, 2),
    (llama, 3, False, True, 1),
    (llama, 4, True, False, 1),
    (llama, 4, True, True, 1),
    (chunks, 2, False, False, 1),
    (attend_newest, 3, False, False, 2),
    (attend_newest, 4, False, True, 1),
    (attend_newest, 3, True, True, 1),
    (llama_newest, 3, False, True, 1),
    (llama_newest, 4, True, True, 1),
    (compiled, 4, False, True, 1),
    (compiled_dynamic, 4, True, True, 1),
]
NAMES = [
    f"{network.__name__}-{'dynamic' if dynamic else 'static'}{workers}{'-tagged' * tagged}"
    for network, workers, dynamic, tagged, _ in CASES
]


def base_program(case: int) -> Program:
    network, workers, dynamic, tagged, rows = CASES[case]
    model = Model(tagged, rows)
    made = network(model)
    if made is not None:
        return made  # type: ignore[no-any-return]
    return build(model.tensors, model.operations, workers, dynamic)


# ---- The interpreter.


class Hang(Exception):
    pass


@dataclass
class Part:
    """One region as the interpreter accesses it."""

    region: Region
    cells: tuple[int, ...]
    get: Callable[[list[int]], Any]
    words: tuple[int, ...] = ()  # cells of tagged words that have to be there

    def contents(self, run: Run, step: int) -> Any:
        """What a read in ``step`` finds: of earlier rows all that earlier steps wrote, and that alone."""
        if not self.region.earlier:
            return self.get(run.values)
        return tuple(
            tuple(sorted(written for written in run.history.get(cell, ()) if written[0] < step))
            for cell in self.cells
        )


@dataclass
class Code:
    """An instruction as the interpreter runs it."""

    waits: list[tuple[int, int]]
    signal: int | None
    identity: int
    reads: list[Part] = field(default_factory=list)
    writes: list[Part] = field(default_factory=list)


def words_of(tensors: Sequence[TensorSpec], region: Region) -> list[Region]:
    """What is accessed at once: the single words of a tagged tensor, else all of the region."""
    spec = tensors[region.tensor]
    if not spec.tagged:
        return [region]
    per_word = 4 // spec.dtype.size
    begin, end = region.columns[0] // per_word, -(-region.columns[1] // per_word)
    return [
        Region(region.tensor, (row, row + 1), (word * per_word, (word + 1) * per_word))
        for row in range(*region.rows)
        for word in range(begin, end)
    ]


class Interpreter:
    """Runs one program under many schedules."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.dynamic = program.dynamic
        self.queues = [[int(i) for i in q] for q in program.queues]
        self.signals = [int(n) for n in program.signals]
        self.cells: dict[tuple[int, int, int], int] = {}
        self.initial: list[int] = []
        self.must_be_written: set[int] = set()
        self.code = [self._translate(i) for i in range(len(program))]

    def _cell(self, tensor: int, row: int, column: int) -> int:
        number = self.cells.setdefault((tensor, row, column), len(self.cells))
        if number == len(self.initial):
            spec = self.program.tensors[tensor]
            self.initial.append(zlib.crc32(f"{spec.name} {row} {column}".encode()))
            if spec.kind is TensorKind.ACTIVATION:
                self.must_be_written.add(number)
        return number

    def _part(self, region: Region) -> Part:
        spec = self.program.tensors[region.tensor]

        def number(row: int, column: int) -> int:
            if region.indexed and len(spec.shape) == 4:  # the slot of the row, the blocks in order
                _, _, block, d = spec.shape
                head, element = divmod(column, d)
                return self._cell(
                    region.tensor, row // block, (head * block + row % block) * d + element
                )
            return self._cell(region.tensor, row, column)

        def numbers(begin: int, end: int) -> tuple[int, ...]:
            return tuple(number(r, c) for r in range(*region.rows) for c in range(begin, end))

        cells = numbers(*region.columns)
        part = Part(region, cells, itemgetter(*cells))
        if spec.tagged:
            per_word = 4 // spec.dtype.size
            begin, end = region.columns
            part.words = numbers(begin // per_word * per_word, -(-end // per_word) * per_word)
        return part

    def _translate(self, index: int) -> Code:
        inst = self.program.instructions[index]
        tensors = self.program.tensors
        words = self.program.words[index]
        operands = bytes(words[:1].tobytes() + words[HEADER_WORDS:].tobytes())
        constants = [r for r in inst.reads(tensors) if not tensors[r.tensor].writable]
        names = [(tensors[r.tensor].name, r.rows, r.columns) for r in constants]
        return Code(
            [(w.barrier, w.target) for w in inst.waits],
            inst.signal,
            zlib.crc32(operands + repr(names).encode()),
            [self._part(r) for r in inst.reads(tensors) if tensors[r.tensor].writable],
            [self._part(r) for w in inst.writes(tensors) for r in words_of(tensors, w)],
        )

    def run(
        self,
        steps: int,
        rng: random.Random | None,
        *,
        workers: int | None = None,
        held: Access | None = None,
        hurried: Access | None = None,
        limit: int = 1_000_000,
    ) -> Run:
        return Run(self, steps, rng, workers, held, hurried, limit)


class Run:
    """One execution. Raises Hang when nothing can go on before the end.

    Without ``rng`` workers run in turn as far as they can. ``held`` is an access that is made only when
    nothing else can go on; ``hurried`` is made as early as its instruction can.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        steps: int,
        rng: random.Random | None,
        workers: int | None,
        held: Access | None,
        hurried: Access | None,
        limit: int,
    ) -> None:
        self.program = interpreter
        self.steps = steps
        self.rng = rng
        self.held, self.hurried = held, hurried
        self.values = list(interpreter.initial)
        self.epochs = [0] * len(self.values)
        self.counters = [0] * len(interpreter.signals)
        self.digests: dict[tuple[int, int], int] = {}
        self.history: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by cell: step, value
        self.log: list[tuple[int, int, bool, Region]] = []
        self.ticket = 0
        self.changed = False
        self.read_unwritten: set[int] = set()
        self.fetched: dict[tuple[int, int, int], Any] = {}  # earlier rows: instruction, step, part
        if interpreter.dynamic:
            count = workers or len(interpreter.code) * steps
            live = [self._take_tickets() for _ in range(count)]
        else:
            live = [self._run_queue(q) for q in interpreter.queues]
        live += [
            self._read_ahead(index, step, k)
            for step in reversed(range(steps))
            for index, code in enumerate(interpreter.code)
            for k, part in enumerate(code.reads)
            if part.region.earlier
        ]
        self._schedule(live, limit)
        self.outcome = (self.digests, self.values)

    def _run_queue(self, queue: list[int]) -> Generator[bool | None]:
        for step in range(self.steps):
            for index in queue:
                yield from self._execute(index, step)

    def _take_tickets(self) -> Generator[bool | None]:
        queue = self.program.queues[0]
        while self.ticket < self.steps * len(queue):
            step, entry = divmod(self.ticket, len(queue))
            self.ticket += 1
            yield from self._execute(queue[entry], step)

    def _is(self, access: Access | None, index: int, step: int, part: Part, write: bool) -> bool:
        return (
            access is not None
            and access.instruction == index
            and access.step == step
            and access.write == write
            and access.region.tensor == part.region.tensor
            and access.region.indexed == part.region.indexed
            and overlap(access.region.rows, part.region.rows)
            and overlap(access.region.columns, part.region.columns)
        )

    def _order(self, index: int, step: int, parts: list[Part], write: bool) -> list[int]:
        """Accesses in the order to make them: hurried first, held last, plain reads before tagged."""
        order = list(range(len(parts)))
        if self.rng is not None and len(order) > 1:
            self.rng.shuffle(order)
        elif not write:
            order.sort(key=lambda k: bool(parts[k].words))
        if self.held is not None or self.hurried is not None:
            order.sort(
                key=lambda k: (
                    self._is(self.held, index, step, parts[k], write),
                    not self._is(self.hurried, index, step, parts[k], write),
                )
            )
        return order

    def _wait(self, index: int, step: int) -> Generator[bool | None]:
        for barrier, target in self.program.code[index].waits:
            needed = step * self.program.signals[barrier] + target
            while self.counters[barrier] < needed:
                yield False
        yield True

    def _read_ahead(self, index: int, step: int, k: int) -> Generator[bool | None]:
        """Read earlier rows as soon as the waits allow it, whatever else the worker does."""
        yield from self._wait(index, step)
        part = self.program.code[index].reads[k]
        if self.held is not None and self._is(self.held, index, step, part, False):
            yield None
        self.fetched[index, step, k] = part.contents(self, step)
        self.changed = True
        self.log.append((index, step, False, part.region))
        yield True

    def _execute(self, index: int, step: int) -> Generator[bool | None]:
        """Yields True after an event, False when it cannot go on, None before the held access."""
        code, values, epochs = self.program.code[index], self.values, self.epochs
        yield from self._wait(index, step)
        contents: list[Any] = [None] * len(code.reads)
        ahead = [k for k, part in enumerate(code.reads) if part.region.earlier]
        pending = [k for k in self._order(index, step, code.reads, False) if k not in ahead]
        while pending:
            there = (k for k in pending if all(epochs[c] == step + 1 for c in code.reads[k].words))
            k = next(there, -1)
            if k < 0:
                yield False
                continue
            pending.remove(k)
            part = code.reads[k]
            if self.held is not None and self._is(self.held, index, step, part, False):
                yield None
            contents[k] = part.contents(self, step)
            self.read_unwritten.update(
                cell
                for cell in part.cells
                if epochs[cell] == 0 and cell in self.program.must_be_written
            )
            self.log.append((index, step, False, part.region))
            yield True
        for k in ahead:
            while (index, step, k) not in self.fetched:
                yield False
            contents[k] = self.fetched[index, step, k]
        digest = hash((code.identity, step, *contents))
        self.digests[index, step] = digest
        for k in self._order(index, step, code.writes, True):
            part = code.writes[k]
            if self.held is not None and self._is(self.held, index, step, part, True):
                yield None
            base = hash((digest, k))
            for offset, cell in enumerate(part.cells):
                values[cell] = base + offset
                if part.region.indexed:
                    self.history[cell].append((step, base + offset))
                epochs[cell] = step + 1
            self.changed = True
            self.log.append((index, step, True, part.region))
            yield True
        if code.signal is not None:
            self.counters[code.signal] += 1
            self.changed = True
            yield True

    def _schedule(self, live: list[Generator[bool | None]], limit: int) -> None:
        if not self.program.code:
            return
        rng = self.rng
        held: list[Generator[bool | None]] = []
        ready = live
        stalled: list[Generator[bool | None]] = []
        burst = 0.0 if rng is None else rng.choice((0.0, 0.0, 0.5, 0.9))
        at = 0
        for _ in range(limit):
            if not ready:
                if held:
                    ready, held = held, []
                elif stalled:
                    raise Hang
                else:
                    return
            if rng is None:
                at = len(ready) - 1
            elif at >= len(ready) or rng.random() >= burst:
                at = rng.randrange(len(ready))
            worker = ready[at]
            event = next(worker, "end")
            if event is True:
                if self.changed and stalled:
                    ready = [*stalled, *ready]
                    at += len(stalled)
                    stalled = []
                self.changed = False
                continue
            ready[at] = ready[-1]
            ready.pop()
            if event is False:
                stalled.append(worker)
            elif event is None:
                held.append(worker)
        raise AssertionError("the run takes too long")


# ---- Mutations of an encoded program.


class Mutant:
    """A program in parts that can be changed."""

    def __init__(self, base: Program, rng: random.Random) -> None:
        self.base = base
        self.rng = rng
        self.words = base.words.copy()
        self.queues = [[int(i) for i in q] for q in base.queues]
        self.tensors = list(base.tensors)
        self.labels = list(base.labels)

    def program(self) -> Program:
        return replace(
            self.base,
            words=self.words,
            queues=tuple(np.array(q, np.int32) for q in self.queues),
            tensors=tuple(self.tensors),
            labels=tuple(self.labels),
        )

    def instruction(self) -> int:
        return self.rng.randrange(len(self.words))

    def signals(self, i: int, word: int) -> int:
        """How often the barrier in a word is signalled."""
        return int((self.words[:, 1] == self.words[i, word]).sum())

    def used_wait(self) -> tuple[int, int] | None:
        """(instruction, word) of a wait."""
        waits = np.argwhere(self.words[:, 2:HEADER_WORDS:2] != NONE)
        if not len(waits):
            return None
        i, k = self.rng.choice(waits.tolist())
        return i, 2 + 2 * k

    def drop_wait(self) -> None:
        if wait := self.used_wait():
            i, word = wait
            header = self.words[i, 2:HEADER_WORDS].tolist()
            del header[word - 2 : word]
            self.words[i, 2:HEADER_WORDS] = [*header, NONE, 0]

    def change_target(self) -> None:
        if wait := self.used_wait():
            i, word = wait
            most = self.signals(i, word)
            self.words[i, word + 1] = self.rng.randint(0, most + (self.rng.random() < 0.1))

    def zero_target(self) -> None:
        if wait := self.used_wait():
            self.words[wait[0], wait[1] + 1] = 0

    def change_barrier(self) -> None:
        if wait := self.used_wait():
            i, word = wait
            barrier = self.rng.randrange(len(self.base.barriers))
            self.words[i, word] = barrier
            full = self.signals(i, word)
            self.words[i, word + 1] = min(int(self.words[i, word + 1]), full)
            if self.rng.random() < 0.5:
                self.words[i, word + 1] = full

    def drop_signal(self) -> None:
        i = self.instruction()
        barrier = int(self.words[i, 1])
        self.words[i, 1] = NONE
        self.lower_targets(barrier)

    def redirect_signal(self) -> None:
        i = self.instruction()
        barrier = int(self.words[i, 1])
        self.words[i, 1] = self.rng.randrange(len(self.base.barriers))
        self.lower_targets(barrier)

    def lower_targets(self, barrier: int) -> None:
        """Half of the time let targets follow a signal that is gone, as a careless compiler would."""
        if self.rng.random() < 0.5:
            for word in range(2, HEADER_WORDS, 2):
                hit = (self.words[:, word] == barrier) & (self.words[:, word + 1] > 0)
                self.words[hit, word + 1] -= 1

    def swap_neighbours(self) -> None:
        queue = self.rng.choice(self.queues)
        if len(queue) > 1:
            i = self.rng.randrange(len(queue) - 1)
            queue[i], queue[i + 1] = queue[i + 1], queue[i]

    def swap_entries(self) -> None:
        one, two = self.rng.choice(self.queues), self.rng.choice(self.queues)
        if one and two:
            i, j = self.rng.randrange(len(one)), self.rng.randrange(len(two))
            one[i], two[j] = two[j], one[i]

    def move_entry(self) -> None:
        source, target = self.rng.choice(self.queues), self.rng.choice(self.queues)
        if source:
            entry = source.pop(self.rng.randrange(len(source)))
            target.insert(self.rng.randint(0, len(target)), entry)

    def fields(self, i: int) -> tuple[Any, ...]:
        cls = instruction_set().get(int(self.words[i, 0]))
        return cls.fields if cls else ()

    def words_of_kind(self, i: int, kind: str) -> list[int]:
        fields = self.fields(i)
        return [HEADER_WORDS + k for k, f in enumerate(fields) if f.kind.value == kind]

    def shift_tile(self) -> None:
        i = self.instruction()
        if words := self.words_of_kind(i, "integer"):
            word = self.rng.choice(words)
            value = int(self.words[i, word]) + self.rng.choice((-2, -1, 1, 2))
            self.words[i, word] = max(value, 0)

    def shift_both_ends(self) -> None:
        i = self.instruction()
        names = [f.name for f in self.fields(i)]
        pairs = [n for n in names if n.endswith("_begin")]
        if pairs:
            begin = HEADER_WORDS + names.index(self.rng.choice(pairs))
            by = self.rng.choice((-2, -1, 1, 2))
            for word in (begin, begin + 1):
                self.words[i, word] = max(int(self.words[i, word]) + by, 0)

    def change_handle(self) -> None:
        i = self.instruction()
        if words := self.words_of_kind(i, "tensor"):
            word = self.rng.choice(words)
            here = self.words[i, word]
            alike = [
                h
                for h, t in enumerate(self.tensors)
                if here != NONE and t.shape == self.tensors[here].shape and h != here
            ]
            choices = (
                alike if alike and self.rng.random() < 0.8 else [*range(len(self.tensors)), NONE]
            )
            self.words[i, word] = self.rng.choice(choices)

    def wild_field(self) -> None:
        i = self.instruction()
        word = self.rng.randrange(32)
        self.words[i, word] = self.rng.choice((0, 1, 2, 100, 1 << 16, 1 << 31, NONE - 1, NONE))

    def duplicate_entry(self) -> None:
        self.rng.choice(self.queues).append(self.instruction())

    def drop_entry(self) -> None:
        queue = self.rng.choice(self.queues)
        if queue:
            queue.pop(self.rng.randrange(len(queue)))

    def duplicate_instruction(self) -> None:
        i = self.instruction()
        self.words = np.concatenate([self.words, self.words[i : i + 1]])
        self.labels.append(self.labels[i])
        queue = self.rng.choice(self.queues)
        queue.insert(self.rng.randint(0, len(queue)), len(self.words) - 1)

    def drop_instruction(self) -> None:
        i = self.instruction()
        barrier = int(self.words[i, 1])
        self.words = np.delete(self.words, i, axis=0)
        del self.labels[i]
        self.queues = [[e - (e > i) for e in q if e != i] for q in self.queues]
        self.lower_targets(barrier)

    def change_opcode(self) -> None:
        self.words[self.instruction(), 0] = self.rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 77))

    def flip_tagged(self) -> None:
        handles = [h for h, t in enumerate(self.tensors) if t.kind is TensorKind.ACTIVATION]
        handle = self.rng.choice(handles)
        spec = self.tensors[handle]
        self.tensors[handle] = replace(spec, tagged=not spec.tagged)


TIMING_ONLY = (
    Mutant.drop_wait,
    Mutant.change_target,
    Mutant.zero_target,
    Mutant.change_barrier,
    Mutant.drop_signal,
    Mutant.redirect_signal,
    Mutant.swap_neighbours,
    Mutant.swap_entries,
    Mutant.move_entry,
)
OTHERS = (
    Mutant.shift_tile,
    Mutant.shift_both_ends,
    Mutant.change_handle,
    Mutant.wild_field,
    Mutant.duplicate_entry,
    Mutant.drop_entry,
    Mutant.duplicate_instruction,
    Mutant.drop_instruction,
    Mutant.change_opcode,
    Mutant.flip_tagged,
)


# ---- What must hold.


def outcomes(program: Program, rng: random.Random, schedules: int) -> Any:
    """The one outcome of all schedules tried."""
    interpreter = Interpreter(program)
    steps = 3
    expected = interpreter.run(steps, None, workers=1).outcome
    for number in range(schedules):
        held = None
        if number % 2 and len(program):
            index = rng.randrange(len(program))
            code = interpreter.code[index]
            if parts := [(p, False) for p in code.reads] + [(p, True) for p in code.writes]:
                part, write = rng.choice(parts)
                held = Access(index, part.region, write, rng.randrange(steps))
        workers = rng.choice((1, 2, 3, len(program), 2 * len(program)))
        run = interpreter.run(steps, rng, workers=workers, held=held)
        assert run.outcome == expected, "the outcome depends on the schedule"
    return expected


def assert_guilty(program: Program, error: VerificationError) -> None:
    """A schedule shows what the verifier says."""
    interpreter = Interpreter(program)
    if error.rule in ("deadlock", "tag_unreachable"):
        assert hangs(program), str(error)
    elif error.rule == "unwritten":
        access = error.accesses[-1]
        unwritten = interpreter.run(1, None, workers=1).read_unwritten
        assert unwritten & {interpreter.cells[c] for c in elements(access.region)}, str(error)
    elif error.rule == "tag_ambiguous":
        first, second = error.accesses
        assert first.write
        assert second.write
        assert conflict(program.tensors, first.region, second.region)
    else:
        assert error.rule == "unordered"
        first, second = error.accesses
        tensors = program.tensors
        assert first.write or second.write
        assert conflict(tensors, first.region, second.region)
        assert any(
            can_come_first(interpreter, one, other) and can_come_first(interpreter, other, one)
            for word in words_of(tensors, first.region)
            if conflict(tensors, word, second.region)
            for one in [replace(first, region=word)]
            for other in [replace(second, region=word) if tensors[word.tensor].tagged else second]
        ), str(error)


def elements(region: Region) -> Iterable[tuple[int, int, int]]:
    return ((region.tensor, r, c) for r in range(*region.rows) for c in range(*region.columns))


def can_come_first(interpreter: Interpreter, one: Access, other: Access) -> bool:
    """Whether ``one`` can be made while ``other`` is delayed, or delaying hangs the program."""

    def position(run: Run, access: Access) -> int:
        return next(
            n
            for n, (index, step, write, region) in enumerate(run.log)
            if (index, step, write) == (access.instruction, access.step, access.write)
            and conflict(interpreter.program.tensors, region, access.region)
        )

    for steps in (2, 4, 12):
        try:
            run = interpreter.run(steps, None, held=other, hurried=one)
        except Hang:
            return True
        if position(run, one) < position(run, other):
            return True
    return False


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_the_unchanged_program_is_accepted_and_independent_of_the_schedule(case: int) -> None:
    program = base_program(case)
    verify(program)
    outcomes(program, random.Random(case), 40)


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_no_mutant_that_hangs_or_races_is_accepted_and_no_correct_one_rejected(case: int) -> None:
    base = base_program(case)
    rng = random.Random(1000 + case)
    original = outcomes(base, rng, 2)
    verdicts: dict[str, int] = defaultdict(int)
    for number in range(MUTANTS_PER_PROGRAM):
        kinds = TIMING_ONLY if number % 5 < 3 else OTHERS
        mutate = rng.choice(kinds)
        mutant = Mutant(base, rng)
        mutate(mutant)
        if rng.random() < 0.15:
            rng.choice(TIMING_ONLY)(mutant) if kinds is TIMING_ONLY else rng.choice(OTHERS)(mutant)
        try:
            program = mutant.program()
        except ValueError:
            continue
        try:
            verify(program)
        except VerificationError as error:
            verdicts[error.rule] += 1
            if error.rule != "form":
                assert_guilty(program, error)
            continue
        verdicts["accepted"] += 1
        outcome = outcomes(program, rng, 6)
        if kinds is TIMING_ONLY:
            assert outcome == original, f"{mutate.__name__} changed the meaning"
    assert verdicts["accepted"] > 0
    assert verdicts["unordered"] > 0 or base.workers == 1


# Random programs: synchronisation that no compiler would emit, and targets between 0 and all.


def random_tile(m: Model, rng: random.Random) -> Instruction:
    """An instruction with one input, with two, with three outputs, with earlier rows, or with nothing."""
    begin, end = rng.choice(((0, 2), (2, 4), (0, 4)))
    x, y, out = (m.handles[f"t{rng.randrange(4)}"] for _ in range(3))
    columns: dict[str, Any] = {
        "row_begin": 0,
        "row_end": 1,
        "column_begin": begin,
        "column_end": end,
    }
    kind = rng.random()
    if kind < 0.45:
        return Copy(x=x, out=out, x_row=0, x_column=begin, **columns)
    if kind < 0.6:
        weight = m.weight("w", 4, 4)
        return Matmul(
            x=x,
            residual=y,
            weight=weight,
            out=out,
            x_rows=1,
            tile=0,
            part=0,
            part_k=4,
            eps=0.0,
            **columns,
        )
    if kind < 0.75:
        first, last = rng.choice(((0, 4), (2, 6), (0, 6), (0, 2)))
        return QkvRope(
            x=x,
            q=out,
            k_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            v_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            weight=m.weight("qkv", 12, 4),
            rope=m.given("rope", 4, 2, dtype=F32),
            row_sequence=m.given("one", 1),
            row_position=m.given("one", 1),
            row_count=m.given("one", 1),
            block_table=m.given("blocks", 1, 2),
            row_begin=0,
            row_end=1,
            pair_begin=first,
            pair_end=last,
            eps=0.0,
        )
    if kind < 0.85:
        return Attention(
            q=x,
            out=out,
            k_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            v_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            k_new=y,
            v_new=y,
            row_sequence=m.given("one", 1),
            row_position=m.given("one", 1),
            row_count=m.given("one", 1),
            block_table=m.given("blocks", 1, 2),
            row_begin=0,
            row_end=1,
            head_begin=begin // 2,
            head_end=end // 2,
            split=0,
            num_splits=1,
            chunk=2,
            context=4,
            step_rows=1,
            scale=1.0,
        )
    return Noop()


def random_program(rng: random.Random) -> Program:
    """A few instructions on random regions with random waits; most are wrong."""
    m = Model(tagged=False)
    for i in range(4):
        if rng.random() < 0.5:
            m.tensor(f"t{i}", 1, 4, tagged=rng.random() < 0.5)
        else:
            m.state(f"t{i}", 1, 4)
    count, barriers = rng.randint(2, 7), rng.randint(1, 4)
    signals = [rng.randrange(barriers) if rng.random() < 0.8 else None for _ in range(count)]
    instructions: list[Instruction] = []
    for i in range(count):
        waits = []
        for barrier in rng.sample(range(barriers), min(barriers, rng.choice((0, 1, 1, 2, 2, 3)))):
            before = signals[:i].count(barrier)
            target = rng.choice((0, before, before, rng.randint(0, signals.count(barrier))))
            waits.append(Wait(barrier, target))
        instructions.append(random_tile(m, rng).with_sync(waits, signals[i]))
    dynamic = rng.random() < 0.4
    queues: list[list[int]] = [[] for _ in range(1 if dynamic else rng.randint(2, 3))]
    for i in range(count):
        rng.choice(queues).append(i)
    return Program.build(
        m.tensors,
        instructions,
        queues,
        barriers=[""] * barriers,
        dynamic=dynamic,
        workers=len(queues),
    )


def test_random_programs_are_accepted_exactly_when_no_schedule_matters() -> None:
    accepted = unordered = 0
    for seed in range(RANDOM_PROGRAMS):
        rng = random.Random(seed)
        program = random_program(rng)
        try:
            verify(program)
        except VerificationError as error:
            if error.rule != "form":
                assert_guilty(program, error)
            unordered += error.rule == "unordered"
            continue
        accepted += 1
        outcomes(program, rng, 8)
    assert accepted > 300
    assert unordered > 600


# Harmless changes of correct programs.


def fine_grained(case: int) -> Program:
    """The program with a barrier for every tile, so that nothing leans on the order of a queue."""
    network, workers, _, tagged, rows = CASES[case]
    model = Model(tagged, rows)
    if network(model) is not None:
        raise ValueError("a program of its own, not a network")
    tiles = [Operation(o.label, [t]) for o in model.operations for t in o.tiles]
    return build(model.tensors, tiles, max(workers, 2), False)


NETWORKS = [c for c in range(len(CASES)) if CASES[c][0] not in (chunks, compiled, compiled_dynamic)]
STATIC = [c for c in NETWORKS if not CASES[c][2]]


@pytest.mark.parametrize("case", STATIC, ids=[NAMES[c] for c in STATIC])
def test_swapping_independent_neighbours_of_a_queue_is_accepted(case: int) -> None:
    program = fine_grained(case)
    verify(program)
    accesses = Accesses(program.tensors)
    swaps = 0
    for worker, queue in enumerate(program.queues):
        for i in range(len(queue) - 1):
            one, two = (program.instructions[k] for k in queue[i : i + 2])
            if accesses.ordered(one, two, False):
                continue
            queues = [q.copy() for q in program.queues]
            queues[worker][[i, i + 1]] = queues[worker][[i + 1, i]]
            swapped = replace(program, queues=tuple(queues))
            if not hangs(swapped):  # the second may wait for the first through others
                verify(swapped)
                swaps += 1
    assert swaps or len(program) < 20


def hangs(program: Program) -> bool:
    try:
        Interpreter(program).run(1, None, workers=1)
    except Hang:
        return True
    return False


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_dropping_a_wait_that_another_implies_is_accepted(case: int) -> None:
    """A wait added for what a needed barrier already waits for can be taken away again, and kept."""
    program = base_program(case)
    for index, inst in enumerate(program.instructions):
        if not inst.waits or len(inst.waits) == MAX_WAITS:
            continue
        behind = inst.waits[0]
        signallers = [i for i in program.instructions if i.signal == behind.barrier]
        if behind.target != len(signallers):
            continue
        held = {w.barrier for w in inst.waits} | {inst.signal}
        for extra in (w for w in signallers[0].waits if w.barrier not in held):
            words = program.words.copy()
            words[index] = np.frombuffer(
                inst.with_sync([*inst.waits, extra], inst.signal).encode(), "<u4"
            )
            verify(replace(program, words=words))


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_renumbering_barriers_and_instructions_is_accepted(case: int) -> None:
    program = base_program(case)
    rng = np.random.default_rng(case)
    barriers = rng.permutation(len(program.barriers)).astype(np.uint32)
    numbers = rng.permutation(len(program))
    words = program.words.copy()
    for word in (1, *range(2, HEADER_WORDS, 2)):
        used = words[:, word] != NONE
        words[used, word] = barriers[words[used, word]]
    moved = np.empty_like(words)
    moved[numbers] = words
    queues = tuple(numbers[q].astype(np.int32) for q in program.queues)
    verify(replace(program, words=moved, queues=queues))


@pytest.mark.parametrize("case", STATIC, ids=[NAMES[c] for c in STATIC])
def test_merging_queues_in_topological_order_is_accepted(case: int) -> None:
    program = base_program(case)
    order = np.arange(len(program), dtype=np.int32)  # the order in which tiles were made
    verify(replace(program, queues=(order,), workers=1))
    if program.workers > 2:
        merged = np.sort(np.concatenate(program.queues[:2]))
        verify(replace(program, queues=(merged, *program.queues[2:]), workers=program.workers - 1))


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_splitting_a_wait_through_a_noop_is_accepted(case: int) -> None:
    program = base_program(case)
    for index, inst in enumerate(program.instructions):
        if not inst.waits:
            continue
        join = Noop(waits=inst.waits, signal=len(program.barriers))
        behind = inst.with_sync([Wait(len(program.barriers), 1)], inst.signal)
        words = np.concatenate([program.words, np.frombuffer(join.encode(), "<u4")[None]])
        words[index] = np.frombuffer(behind.encode(), "<u4")
        queues = [[int(e) for e in q] for q in program.queues]
        for queue in queues:
            if index in queue:
                queue.insert(queue.index(index), len(program))
        split = replace(
            program,
            words=words,
            queues=tuple(np.array(q, np.int32) for q in queues),
            barriers=(*program.barriers, "split"),
            labels=(*program.labels, "split"),
        )
        try:
            verify(split)
        except VerificationError as error:
            # In a dynamic queue two steps of the join may pass each other: then the wait is not the same.
            assert program.dynamic
            assert_guilty(split, error)


def test_the_analysis_does_not_depend_on_the_numbers_of_steps_tried() -> None:
    """What is accepted keeps its outcome when it runs for more steps than were analysed."""
    for case in range(len(CASES)):
        interpreter = Interpreter(base_program(case))
        expected = interpreter.run(7, None, workers=1).outcome
        assert interpreter.run(7, random.Random(case), workers=5).outcome == expected
