"""Random small programs of one or more ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meaning import writable_regions
from places import Places, share_of

from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.reduce import Reduce
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.config import MAX_WAITS, NONE
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, DType, TensorKind, TensorSpec

WEIGHT, INPUT, STATE, ACTIVATION = (
    TensorKind.WEIGHT,
    TensorKind.INPUT,
    TensorKind.STATE,
    TensorKind.ACTIVATION,
)


class Table:
    """Tensors of a random program: rows of 4 columns, and of as many for each rank."""

    def __init__(self, rng: random.Random, ranks: int) -> None:
        self.rng = rng
        self.ranks = ranks
        self.rows = rng.randint(1, 3)
        self.specs: list[TensorSpec] = []
        self.handles: dict[str, int] = {}
        dtype = rng.choice((F32, F32, BF16))
        for i in range(rng.randint(2, 5)):
            kind = rng.choice((STATE, ACTIVATION, ACTIVATION))
            tagged = kind is ACTIVATION and rng.random() < 0.6
            self.add(f"t{i}", self.rows, 4, kind=kind, dtype=dtype, tagged=tagged)
        self.exchanged = list(self.handles.values())
        self.gathered: list[int] = []  # each rank writes 4 of their columns
        self.wide: list[int] = []  # as many columns, of one rank
        if ranks > 1:
            for i in range(rng.randint(1, 3)):
                shape = f"all{i}", self.rows, 4 * ranks
                tagged = rng.random() < 0.4
                self.gathered.append(
                    self.add(*shape, kind=ACTIVATION, dtype=dtype, tagged=tagged, shares=ranks)
                )
            self.wide.append(self.add("wide", self.rows, 4 * ranks, kind=STATE, dtype=dtype))

    def add(
        self,
        name: str,
        *shape: int,
        kind: TensorKind = INPUT,
        dtype: DType = F32,
        tagged: bool = False,
        shares: int = 1,
    ) -> int:
        if name not in self.handles:
            self.handles[name] = len(self.specs)
            self.specs.append(TensorSpec(name, shape, dtype, kind, tagged, shares=shares))
        return self.handles[name]

    def any_exchanged(self) -> int:
        return self.rng.choice(self.exchanged)

    def target(self, x: int = NONE) -> int:
        """A tensor with 4 columns for an instruction to write, on its rank or on all; not ``x``."""
        gathered = [handle for handle in self.gathered if handle != x]
        if gathered and self.rng.random() < 0.6:
            return self.rng.choice(gathered)
        return self.any_exchanged()

    def any_rank(self, out: int) -> int:
        """NONE; if ranks gather ``out``, perhaps the one rank that a copy to it reaches."""
        spec = self.specs[out]
        if spec.shares == 1 or spec.tagged or self.rng.random() < 0.5:
            return NONE
        return self.rng.randrange(spec.shares)

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
    if t.ranks > 1 and rng.random() < 0.5:
        return random_wide_tile(t, rows, (begin, end), counted)
    kind = rng.random()
    if kind < 0.4:
        x_row = top if rng.random() < 0.7 else rng.randint(0, t.rows - (bottom - top))
        x_column = begin if rng.random() < 0.8 else rng.choice((0, 4 - (end - begin)))
        columns |= {"x": t.any_exchanged(), "out": t.target(), "x_row": x_row}
        return Copy(x_column=x_column, only=t.any_rank(columns["out"]), **rows, **columns)
    if kind < 0.6:
        gain = t.add("gain", 4, kind=WEIGHT)
        x, out = t.any_exchanged(), t.any_exchanged()
        return RmsNorm(x=x, gain=gain, out=out, row_count=counted, eps=1.0, **rows)
    if kind < 0.75:
        return Matmul(
            x=t.any_exchanged(),
            weight=t.weight(),
            residual=t.any_exchanged() if rng.random() < 0.6 else NONE,
            out=t.target(),
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


def random_wide_tile(
    t: Table, rows: dict[str, Any], columns: tuple[int, int], counted: int
) -> Instruction:
    """An instruction that reads columns of all ranks."""
    rng, width = t.rng, columns[1] - columns[0]
    tile: dict[str, Any] = {**rows, "column_begin": columns[0], "column_end": columns[1]}
    x, kind = rng.choice(t.gathered), rng.random()
    if kind < 0.4:
        x_column = rng.randrange(0, 4 * t.ranks - width + 1, 2)
        out = t.target(x)
        tile |= {"x_row": rows["row_begin"], "x_column": x_column, "only": t.any_rank(out)}
        return Copy(x=x, out=out, **tile)
    if kind < 0.6:
        tile |= {"column_begin": 0, "column_end": 4 * t.ranks}
        return Copy(x=x, out=t.wide[0], x_row=rows["row_begin"], x_column=0, **tile)
    if kind < 0.8 and t.specs[x].dtype is F32:
        residual = t.any_exchanged() if rng.random() < 0.4 else NONE
        return Reduce(parts=x, residual=residual, out=t.target(x), row_count=counted, **tile)
    return Matmul(
        x=x,
        weight=t.add("wide_weight", 4, 4 * t.ranks, kind=WEIGHT),
        out=t.target(x),
        row_count=counted,
        x_rows=rows["row_end"],
        tile=0,
        part=0,
        part_k=4 * t.ranks,
        eps=0.0,
        **tile,
    )


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
    newest: dict[str, Any] = (
        {"k_new": t.any_exchanged(), "v_new": t.any_exchanged()} if rng.random() < 0.6 else {}
    )
    if rng.random() < 0.5:
        first, last = rng.choice(((0, 4), (2, 6), (0, 6), (2, 4)))
        rope = t.add("rope", 4, 2)
        return QkvRope(
            x=t.any_exchanged(),
            weight=t.add("qkv_weight", 12, 4, kind=WEIGHT),
            q=t.any_exchanged(),
            rope=rope,
            pair_begin=first,
            pair_end=last,
            eps=0.0,
            **place,
            **newest,
            **rows,
        )
    return Attention(
        q=t.any_exchanged(),
        out=t.target(),
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


@dataclass(frozen=True)
class Accesses:
    """The places that a tile of one rank accesses, on all ranks."""

    reads: set[int]
    writes: set[int]
    words: set[int]  # those of ``reads`` that are tagged words
    gathered: set[int]  # those of tensors that ranks gather

    def conflict(self, other: Accesses) -> bool:
        """Whether something other than tagged words must order this tile after another."""
        flow = self.reads & other.writes - self.words
        return bool(flow or self.writes & (other.reads | other.writes))


def accesses_of(t: Table, tiles: Sequence[Instruction]) -> list[list[Accesses]]:
    """What each tile accesses of writable tensors, on each rank that runs it."""
    all_reads, all_writes = writable_regions(t.specs, tiles)
    ranks = range(t.ranks)
    shares = [[[share_of(t.specs, w, r) for w in some] for some in all_writes] for r in ranks]
    regions = [w for rank in shares for some in rank for w in some]
    regions += [region for some in all_reads for region in some]
    places = Places(t.specs, regions, 1, None, t.ranks)
    found = []
    for i, reads in enumerate(all_reads):
        found.append([Accesses(set(), set(), set(), set()) for _ in ranks])
        for rank, mine in enumerate(found[-1]):
            for region in reads:
                some = places.of(region, int(region.earlier), False, rank)
                mine.reads.update(some)
                if t.specs[region.tensor].tagged:
                    mine.words.update(some)
                if t.specs[region.tensor].shares > 1:
                    mine.gathered.update(some)
            for region in shares[rank][i]:
                reached = ranks if t.specs[region.tensor].shares > 1 else [rank]
                for other in reached if region.only is None else [region.only]:
                    mine.writes.update(places.of(region, 0, True, other))
    return found


def random_tiles(t: Table, count: int) -> list[Instruction]:
    """Random tiles; most read what earlier tiles wrote."""
    tiles: list[Instruction] = []
    while len(tiles) < count:
        tile = random_tile(t)
        if any(tile.check(t.specs)):
            continue
        for _ in range(12):
            *before, mine = accesses_of(t, [*tiles, tile])
            written = set[int]().union(*(a.writes for ranks in before for a in ranks))
            activations = [r for r in tile.reads(t.specs) if t.specs[r.tensor].kind is ACTIVATION]
            tags = any(t.specs[r.tensor].tagged for r in tile.writes(t.specs))
            if all(
                (not activations or a.reads & written)
                and a.words | a.gathered <= written
                and not (tags and a.writes & written)
                for a in mine
            ):
                break
            tile = random_tile(t)
            while any(tile.check(t.specs)):
                tile = random_tile(t)
        tiles.append(tile)
    return tiles


def random_program(rng: random.Random, most: int = 7, ranks: int = 1) -> Program:
    """A program of two or more tiles. Most tiles wait for those they conflict with."""
    t = Table(rng, ranks)
    tiles = random_tiles(t, rng.randint(2, most))
    dynamic = rng.random() < 0.35
    queues = [0] * len(tiles) if dynamic else [rng.randrange(rng.randint(1, 4)) for _ in tiles]
    barrier_of: list[int] = []
    for i in range(len(tiles)):
        same = i > 0 and rng.random() < 0.25
        barrier_of.append(barrier_of[-1] if same else max(barrier_of, default=-1) + 1)
    accesses = accesses_of(t, tiles)
    shared_barriers = {
        barrier_of[j]
        for i, j in itertools.product(range(len(tiles)), repeat=2)
        if ranks > 1 and (rng.random() < 0.01 or order_of(accesses[i], accesses[j])[1])
    }
    if ranks > 1 and shared_barriers and rng.random() < 0.1:
        shared_barriers.pop()
    waits = needed_waits(accesses, barrier_of, shared_barriers, queues, dynamic, rng)
    return assemble(t, tiles, waits, barrier_of, shared_barriers, queues, dynamic)


Waits = list[dict[int, int]]  # for every tile: barrier to target


def order_of(mine: Sequence[Accesses], theirs: Sequence[Accesses]) -> tuple[bool, bool]:
    """Whether a tile must follow another, in this step or the next, on its own rank and on others."""
    own = across = False
    for a, b in itertools.product(range(len(mine)), repeat=2):
        must = mine[a].conflict(theirs[b]) or bool(mine[a].reads & theirs[b].writes)
        own, across = own or (must and a == b), across or (must and a != b)
    return own, across


def needed_waits(
    accesses: Sequence[Sequence[Accesses]],
    barrier_of: Sequence[int],
    shared_barriers: set[int],
    queues: Sequence[int],
    dynamic: bool,
    rng: random.Random,
) -> Waits:
    """Waits for the conflicts of each tile with this step and the one before. A few are left out."""
    forget = rng.choice((0.0, 0.0, 0.05, 0.2))
    by_queue = not dynamic and rng.random() < 0.6  # lean on the order of queues
    waits: Waits = [{} for _ in accesses]
    for i, mine in enumerate(accesses):
        for j, theirs in enumerate(accesses):
            barrier = barrier_of[j]
            own, across = order_of(mine, theirs)
            in_order = by_queue and queues[i] == queues[j] and not across
            if in_order or rng.random() < forget:
                continue
            if j < i and any(a.conflict(b) for a in mine for b in theirs):
                before = barrier_of[: i + 1].count(barrier) - (barrier == barrier_of[i])
                waits[i][barrier] = before * (len(mine) if barrier in shared_barriers else 1)
            elif own or across:
                waits[i].setdefault(barrier, 0)
    return waits


def assemble(
    t: Table,
    tiles: Sequence[Instruction],
    waits: Waits,
    barrier_of: Sequence[int],
    shared_barriers: set[int],
    queue_of: Sequence[int],
    dynamic: bool,
) -> Program:
    """Number barriers and instructions. A Noop joins waits when a header cannot hold them all."""
    barriers = max(barrier_of) + 1
    number_of = {
        old: new
        for new, old in enumerate(sorted(range(barriers), key=lambda b: b not in shared_barriers))
    }
    instructions: list[Instruction] = []
    used = sorted(set(queue_of))
    queues: list[list[int]] = [[] for _ in used]
    for i, tile in enumerate(tiles):
        queue = queues[used.index(queue_of[i])]
        mine = [Wait(number_of[b], target) for b, target in waits[i].items()]
        t.rng.shuffle(mine)
        while len(mine) > MAX_WAITS:
            queue.append(len(instructions))
            instructions.append(Noop(waits=mine[:MAX_WAITS], signal=barriers))
            mine = [*mine[MAX_WAITS:], Wait(barriers, 1)]
            barriers += 1
        queue.append(len(instructions))
        instructions.append(tile.with_sync(mine, number_of[barrier_of[i]]))
    return Program.build(
        t.specs,
        instructions,
        queues,
        barriers=[f"b{i}" for i in range(barriers)],
        dynamic=dynamic,
        workers=t.rng.randint(1, 4) if dynamic else len(queues),
        ranks=t.ranks,
        shared_barriers=len(shared_barriers),
    )
