"""Small programs to judge: toy graphs that the compiler compiled, and random programs."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

from places import Places, whole_words

from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.rms_norm import RmsNorm
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.config import MAX_WAITS, NONE
from megavm.vm.isa import BF16, F32, I32, DType, Instruction, TensorKind, TensorSpec, Wait
from megavm.vm.program import Program

WEIGHT, INPUT, STATE, ACTIVATION = (
    TensorKind.WEIGHT,
    TensorKind.INPUT,
    TensorKind.STATE,
    TensorKind.ACTIVATION,
)

# ---- Toy graphs.


def mlp(rows: int, dtype: DType, counted: bool) -> Graph:
    """y = x + down(silu(gate(norm(x))) * up(norm(x)))"""
    row_count = TensorSpec("row_count", (1,), I32, INPUT)
    graph = Graph(rows, row_count if counted else None)
    x = graph.tensor("x", (rows, 8), F32, STATE)
    normed = graph.rms_norm("norm", x, graph.weight("gain", (8,), dtype), 1e-5)
    gate, up = (
        graph.linear(name, normed, graph.weight(f"{name}.w", (12, 8), dtype), dtype=dtype)
        for name in ("gate", "up")
    )
    wide = graph.silu_mul("gate_up", gate, up)
    down = graph.linear("down", wide, graph.weight("down.w", (8, 12), dtype), dtype=dtype)
    graph.output(graph.add("residual", down, x), "y")
    return graph


def llama(rows: int, layers: int, decode: bool) -> Graph:
    """A Llama of two heads of two elements."""
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=4,
        intermediate_size=6,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
    )
    return llama_graph(config, Limits(2, 8, 2, 2, 4, 4), Bucket(rows, rows, 8, decode), F32)


@functools.cache
def toy_programs() -> tuple[Program, ...]:
    """Compiled toy graphs, with both exchanges and with static and dynamic queues."""
    unit: dict[str, Any] = {"column_unit": 2, "min_chunk": 4}
    dynamic: dict[str, Any] = {**unit, "assignment": "dynamic"}
    tagged: dict[str, Any] = {**unit, "exchange": "tagged"}
    preferred: dict[str, Any] = {**unit, "exchange": "preferred"}
    return tuple(
        compile_graph(graph, CompileOptions(workers, **options))
        for graph, workers, options in (
            (mlp(2, F32, True), 2, unit),
            (mlp(2, F32, True), 3, tagged),
            (mlp(3, F32, False), 3, {**unit, "waves": 2}),
            (mlp(2, BF16, True), 4, tagged),
            (mlp(2, F32, True), 2, {**dynamic, "exchange": "tagged"}),
            (mlp(1, F32, False), 3, dynamic),
            (mlp(2, F32, True), 2, {**unit, "assignment": "round_robin"}),
            (llama(1, 1, True), 2, tagged),
            (llama(2, 1, True), 3, preferred),
            (llama(2, 1, False), 2, unit),
            (llama(1, 1, True), 3, {**dynamic, "exchange": "tagged"}),
            (llama(2, 1, True), 2, dynamic),
            (llama(1, 2, True), 2, tagged),
        )
    )


# ---- Random programs.


class Table:
    """Tensors of a random program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows = rng.randint(1, 3)
        self.specs: list[TensorSpec] = []
        self.handles: dict[str, int] = {}
        dtype = rng.choice((F32, F32, BF16))
        for i in range(rng.randint(2, 5)):
            kind = rng.choice((STATE, ACTIVATION, ACTIVATION))
            tagged = kind is ACTIVATION and rng.random() < 0.6
            self.add(f"t{i}", self.rows, 4, kind=kind, dtype=dtype, tagged=tagged)
        self.exchanged = list(self.handles.values())

    def add(
        self,
        name: str,
        *shape: int,
        kind: TensorKind = INPUT,
        dtype: DType = F32,
        tagged: bool = False,
    ) -> int:
        if name not in self.handles:
            self.handles[name] = len(self.specs)
            self.specs.append(TensorSpec(name, shape, dtype, kind, tagged))
        return self.handles[name]

    def some(self) -> int:
        return self.rng.choice(self.exchanged)

    def row_count(self) -> int:
        return self.add("row_count", 1, dtype=I32)

    def weight(self) -> int:
        return self.add("weight", 4, 4, kind=WEIGHT)


def random_tile(t: Table) -> Instruction:
    """An instruction on random rows and columns of random tensors."""
    rng = t.rng
    begin, end = rng.choice(((0, 2), (2, 4), (0, 4), (0, 4)))
    top = rng.randrange(t.rows)
    bottom = rng.randint(top + 1, t.rows)
    rows: dict[str, Any] = {"row_begin": top, "row_end": bottom}
    columns: dict[str, Any] = {"column_begin": begin, "column_end": end}
    counted = t.row_count() if rng.random() < 0.5 else NONE
    kind = rng.random()
    if kind < 0.4:
        x_row = top if rng.random() < 0.7 else rng.randint(0, t.rows - (bottom - top))
        x_column = begin if rng.random() < 0.8 else rng.choice((0, 4 - (end - begin)))
        return Copy(x=t.some(), out=t.some(), x_row=x_row, x_column=x_column, **rows, **columns)
    if kind < 0.6:
        gain = t.add("gain", 4, kind=WEIGHT)
        x, out = t.some(), t.some()
        return RmsNorm(x=x, gain=gain, out=out, row_count=counted, eps=1.0, **rows)
    if kind < 0.75:
        return Matmul(
            x=t.some(),
            weight=t.weight(),
            residual=t.some() if rng.random() < 0.6 else NONE,
            out=t.some(),
            row_count=counted,
            x_rows=bottom,
            tile=0,
            part=0,
            part_k=4,
            eps=0.0,
            **rows,
            **columns,
        )
    if kind < 0.92:
        return random_cache_tile(t, rows, (begin, end))
    return Noop()


def random_cache_tile(t: Table, rows: dict[str, Any], columns: tuple[int, int]) -> Instruction:
    """An instruction that writes keys and values, or attends to them and perhaps to the newest."""
    rng = t.rng
    place: dict[str, Any] = {
        name: t.add(name, t.rows, dtype=I32) for name in ("row_sequence", "row_position")
    }
    place |= {
        "row_count": t.row_count(),
        "block_table": t.add("blocks", t.rows, 2, dtype=I32),
        "k_cache": t.add("keys", 4, 2, 2, 2, kind=STATE),
        "v_cache": t.add("values", 4, 2, 2, 2, kind=STATE),
    }
    newest: dict[str, Any] = {"k_new": t.some(), "v_new": t.some()} if rng.random() < 0.6 else {}
    if rng.random() < 0.5:
        first, last = rng.choice(((0, 4), (2, 6), (0, 6), (2, 4)))
        rope = t.add("rope", 4, 2)
        return QkvRope(
            x=t.some(),
            weight=t.add("qkv_weight", 12, 4, kind=WEIGHT),
            q=t.some(),
            rope=rope,
            pair_begin=first,
            pair_end=last,
            eps=0.0,
            **place,
            **newest,
            **rows,
        )
    return Attention(
        q=t.some(),
        out=t.some(),
        head_begin=columns[0] // 2,
        head_end=columns[1] // 2,
        split=0,
        num_splits=1,
        chunk=2,
        context=4,
        step_rows=t.rows,
        scale=1.0,
        **place,
        **newest,
        **rows,
    )


Accesses = tuple[set[int], set[int], set[int]]  # places read, written, and read as tagged words


def accesses_of(tensors: Sequence[TensorSpec], tiles: Sequence[Instruction]) -> list[Accesses]:
    """The places in writable tensors that each tile accesses."""
    regions = [
        [
            (whole_words(tensors, region), write)
            for some, write in ((tile.reads(tensors), False), (tile.writes(tensors), True))
            for region in some
            if tensors[region.tensor].writable
        ]
        for tile in tiles
    ]
    places = Places(tensors, [r for some in regions for r, _ in some], 1, None)
    found = []
    for some in regions:
        sets: Accesses = (set(), set(), set())
        for region, write in some:
            mine = places.of(region, 1 if region.earlier else 0, write)
            sets[write].update(mine)
            if tensors[region.tensor].tagged and not write:
                sets[2].update(mine)
        found.append(sets)
    return found


def random_tiles(t: Table, count: int) -> list[Instruction]:
    """Random tiles; most read what earlier tiles wrote."""
    tiles: list[Instruction] = []
    while len(tiles) < count:
        tile = random_tile(t)
        if any(tile.check(t.specs)):
            continue
        for _ in range(12):
            *before, (reads, writes, words) = accesses_of(t.specs, [*tiles, tile])
            written = set().union(*(w for _, w, _ in before))
            activations = [r for r in tile.reads(t.specs) if t.specs[r.tensor].kind is ACTIVATION]
            again = any(t.specs[r.tensor].tagged for r in tile.writes(t.specs)) and writes & written
            if (not activations or reads & written) and words <= written and not again:
                break
            tile = random_tile(t)
            while any(tile.check(t.specs)):
                tile = random_tile(t)
        tiles.append(tile)
    return tiles


def random_program(rng: random.Random, most: int = 7) -> Program:
    """A program of two or more tiles, most of which wait for the tiles they conflict with."""
    t = Table(rng)
    tiles = random_tiles(t, rng.randint(2, most))
    dynamic = rng.random() < 0.35
    queues = [0] * len(tiles) if dynamic else [rng.randrange(rng.randint(1, 4)) for _ in tiles]
    barrier_of: list[int] = []
    for i in range(len(tiles)):
        shared = i > 0 and rng.random() < 0.25
        barrier_of.append(barrier_of[-1] if shared else max(barrier_of, default=-1) + 1)
    waits = needed_waits(accesses_of(t.specs, tiles), barrier_of, queues, dynamic, rng)
    return assemble(t.specs, tiles, waits, barrier_of, queues, dynamic, rng)


Waits = list[dict[int, int]]  # for every tile: barrier to target


def needed_waits(
    accesses: Sequence[Accesses],
    barrier_of: Sequence[int],
    queues: Sequence[int],
    dynamic: bool,
    rng: random.Random,
) -> Waits:
    """Waits for the conflicts of each tile with this step and the one before. A few are left out."""
    forget = rng.choice((0.0, 0.0, 0.05, 0.2))
    by_queue = not dynamic and rng.random() < 0.6  # lean on the order of queues
    waits: Waits = [{} for _ in accesses]
    for i, (reads, writes, words) in enumerate(accesses):
        for j, (other_reads, other_writes, _) in enumerate(accesses):
            same_queue = by_queue and queues[i] == queues[j]
            flow = bool(reads & other_writes - words)
            conflict = flow or bool(writes & (other_reads | other_writes))
            if same_queue or rng.random() < forget:
                continue
            if j < i and conflict:
                waits[i][barrier_of[j]] = barrier_of[: i + 1].count(barrier_of[j])
                if barrier_of[j] == barrier_of[i]:
                    waits[i][barrier_of[j]] -= 1
            elif conflict or reads & other_writes:
                waits[i].setdefault(barrier_of[j], 0)
    return waits


def assemble(
    tensors: Sequence[TensorSpec],
    tiles: Sequence[Instruction],
    waits: Waits,
    barrier_of: Sequence[int],
    queue_of: Sequence[int],
    dynamic: bool,
    rng: random.Random,
) -> Program:
    """Number barriers and instructions. A Noop joins waits when a header cannot hold them all."""
    barriers = max(barrier_of) + 1
    instructions: list[Instruction] = []
    used = sorted(set(queue_of))
    queues: list[list[int]] = [[] for _ in used]
    for i, tile in enumerate(tiles):
        queue = queues[used.index(queue_of[i])]
        mine = [Wait(b, target) for b, target in waits[i].items()]
        rng.shuffle(mine)
        while len(mine) > MAX_WAITS:
            queue.append(len(instructions))
            instructions.append(Noop(waits=mine[:MAX_WAITS], signal=barriers))
            mine = [*mine[MAX_WAITS:], Wait(barriers, 1)]
            barriers += 1
        queue.append(len(instructions))
        instructions.append(tile.with_sync(mine, barrier_of[i]))
    workers = rng.randint(1, 4) if dynamic else len(queues)
    return build(tensors, instructions, queues, barriers, dynamic, workers)


def build(
    tensors: Sequence[TensorSpec],
    instructions: Sequence[Instruction],
    queues: Iterable[Sequence[int]],
    barriers: int,
    dynamic: bool,
    workers: int,
) -> Program:
    names = [f"b{i}" for i in range(barriers)]
    return Program.build(
        tensors, instructions, list(queues), barriers=names, dynamic=dynamic, workers=workers
    )
