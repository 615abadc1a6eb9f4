"""Barriers: turn data dependencies into waits and signals.

Dependencies are found from the regions that instructions declare: read after write, write after
read and write after write on the same tensor. What another dependency already implies is dropped.
The rest becomes counters: the instructions of one operation that the same set of readers waits for
share a barrier, so a reader waits for just what it needs, unless that would take more waits than a
header holds; then barriers are merged, and as a last resort joined by Noops.

Tagged tensors need no counter: reading them is the wait. But a tag speaks for its word alone. Who
has seen the word knows that its writer had read its inputs, and what came before the writer; of the
writer's other, untagged writes it knows nothing, and its own other reads may have been issued
before the word came.

A program is run step after step without a join of all workers. So that no step overtakes the one
before, the instructions that wait for nothing inside the step wait for the last ones of the step
before (target 0).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megavm.instructions.noop import Noop
from megavm.scheduler.lower import Tiles
from megavm.vm.config import MAX_WAITS
from megavm.vm.isa import Instruction, Region, TensorSpec, Wait

Bits = int  # a set of instructions: bit i stands for instruction i


@dataclass
class Synchronised:
    """Instructions with waits and signals, in topological order."""

    instructions: list[Instruction]
    labels: list[str]
    operations: list[int]  # which operation each instruction belongs to
    barriers: list[str]


@dataclass
class Needs:
    """What one instruction must come after, by reason."""

    reads: Bits = 0  # it reads what these wrote: they must be complete before it starts
    overwrites: Bits = 0  # it overwrites what these wrote
    replaces: Bits = 0  # it overwrites what these read
    tags: Bits = 0  # it reads tagged words that these wrote


def add_barriers(operations: Sequence[Tiles], tensors: Sequence[TensorSpec]) -> Synchronised:
    """Add the waits and signals that make any order of execution give the sequential result."""
    instructions = [i for tiles in operations for i in tiles.instructions]
    needs = _dependencies(operations, tensors)
    waits = _reduce(needs)
    roots = _set(i for i, n in enumerate(needs) if not waits[i] | n.tags)
    plain = _set(
        i
        for i, inst in enumerate(instructions)
        if any(not tensors[r.tensor].tagged for r in inst.writes(tensors))
    )
    awaited = seen = 0
    for i, needed in enumerate(needs):
        awaited |= waits[i]
        seen |= needed.tags
    everybody = (1 << len(instructions)) - 1
    sinks = everybody & ~awaited & ~(seen & ~plain)
    return _Grouping(operations, waits, roots, sinks).result()


class _Table:
    """Regions of one tensor and the instructions that accessed them, as columns of numbers."""

    def __init__(self, entries: Sequence[tuple[Region, int]] = ()) -> None:
        rows = [(*r.rows, *r.columns, r.indexed, number) for r, number in entries]
        self.columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T

    def matching(self, region: Region) -> Bits:
        """The instructions whose regions overlap ``region``."""
        top, bottom, left, right, indexed, numbers = self.columns
        inside = (top < region.rows[1]) & (region.rows[0] < bottom)
        inside &= (left < region.columns[1]) & (region.columns[0] < right)
        return _bits(numbers[inside | (indexed != region.indexed)])

    def update(self, new: _Table, cover: _Table) -> None:
        """Append ``new``, after dropping what lies inside one of the regions of ``cover``."""
        top, bottom, left, right, indexed, _ = self.columns
        gone = np.zeros(len(top), dtype=bool)
        for first, last, begin, end, kind, _ in cover.columns.T:
            inside = (first <= top) & (bottom <= last) & (begin <= left) & (right <= end)
            gone |= inside & (indexed == kind)
        self.columns = np.concatenate([self.columns[:, ~gone], new.columns], axis=1)

    def filled(self) -> _Table:
        """The rectangle that an operation's disjoint tiles fill; the tiles if there is none."""
        tiles = np.unique(self.columns[:5], axis=1)
        if not tiles.size:
            return self
        top, bottom, left, right, indexed = tiles
        box = (top.min(), bottom.max(), left.min(), right.max(), indexed[0])
        area = int(((bottom - top) * (right - left)).sum())
        if area == (box[1] - box[0]) * (box[3] - box[2]) and (indexed == indexed[0]).all():
            single = _Table()
            single.columns = np.array([[*box, 0]], dtype=np.int64).T
            return single
        return self


class _Accesses:
    """Who wrote and read the regions of one tensor since they were last overwritten."""

    def __init__(self) -> None:
        self.writers = _Table()
        self.readers = _Table()


def _dependencies(operations: Sequence[Tiles], tensors: Sequence[TensorSpec]) -> list[Needs]:
    """What each instruction must come after, from the regions that all declare."""
    needs: list[Needs] = []
    accesses: dict[int, _Accesses] = defaultdict(_Accesses)
    for tiles in operations:
        reads: dict[int, list[tuple[Region, int]]] = defaultdict(list)
        writes: dict[int, list[tuple[Region, int]]] = defaultdict(list)
        writers = functools.cache(lambda r: accesses[r.tensor].writers.matching(r))
        readers = functools.cache(lambda r: accesses[r.tensor].readers.matching(r))
        for inst in tiles.instructions:
            number, needed = len(needs), Needs()
            for region in inst.reads(tensors):
                spec = tensors[region.tensor]
                if spec.tagged:
                    needed.tags |= writers(region)
                elif spec.writable:
                    needed.reads |= writers(region)
                    reads[region.tensor].append((region, number))
            for region in inst.writes(tensors):
                writes[region.tensor].append((region, number))
                if not tensors[region.tensor].tagged:
                    needed.overwrites |= writers(region)
                    needed.replaces |= readers(region)
            needs.append(needed)
        for handle in reads.keys() | writes.keys():
            known, written = accesses[handle], _Table(writes[handle])
            cover = written.filled()
            known.writers.update(written, cover)
            known.readers.update(_Table(reads[handle]), cover)
    return needs


def _reduce(needs: Sequence[Needs]) -> list[Bits]:
    """The instructions that each one has to wait for, without those that others imply.

    ``done[i]``: what is complete when i has signalled, i aside; ``read[i]``: what has read its
    inputs by then. They differ where a tag is the only link.
    """
    done: list[Bits] = []
    read: list[Bits] = []

    @functools.cache
    def through_waits(waits: Bits) -> tuple[Bits, Bits]:
        members = _members(waits)
        return _union(done, members), _union(read, members)

    @functools.cache
    def through_tags(tags: Bits) -> tuple[Bits, Bits]:
        members = _members(tags)
        return _union(done, members), _union(read, members) | tags

    waits: list[Bits] = []
    for needed in needs:
        tag_done, tag_read = through_tags(needed.tags)
        complete = needed.reads | needed.overwrites & ~tag_done
        wanted = complete | needed.replaces & ~tag_read
        implied_done, implied_read = through_waits(wanted)
        kept = complete & ~implied_done | wanted & ~complete & ~implied_read
        waits.append(kept)
        wait_done, wait_read = through_waits(kept)
        done.append(tag_done | wait_done | kept)
        read.append(tag_read | wait_read | kept)
    return waits


def _union(sets: Sequence[Bits], members: Sequence[int]) -> Bits:
    result = 0
    for i in members:
        result |= sets[i]
    return result


def _set(numbers: Iterable[int]) -> Bits:
    return _bits(np.fromiter(numbers, dtype=np.int64))


def _members(bits: Bits) -> list[int]:
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    members: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
    return members


def _bits(numbers: npt.NDArray[np.int64]) -> Bits:
    if not len(numbers):
        return 0
    flags = np.zeros(int(numbers.max()) + 1, dtype=np.uint8)
    flags[numbers] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


class _Grouping:
    """Chooses barriers for the needs, then writes the headers."""

    def __init__(
        self, operations: Sequence[Tiles], needs: Sequence[Bits], roots: Bits, sinks: Bits
    ) -> None:
        self.tiles = operations
        self.instructions = [i for tiles in operations for i in tiles.instructions]
        self.operation = [
            number for number, tiles in enumerate(operations) for _ in tiles.instructions
        ]
        self.needs = needs
        self.roots = roots  # depend on nothing in their step
        self.sinks = sinks  # nothing in the step tells that they are complete
        self.group = [-1] * len(self.instructions)
        self._choose_groups()

    def _choose_groups(self) -> None:
        """Producers with the same readers share a barrier; merged where there are too many."""
        readers: dict[int, list[int]] = defaultdict(list)
        kinds: dict[Bits, int] = {}
        for needed in (*self.needs, self.sinks):
            if needed and needed not in kinds:
                kinds[needed] = len(kinds)
                for i in _members(needed):
                    readers[i].append(kinds[needed])
        groups: dict[tuple[int, tuple[int, ...]], int] = {}
        for i in sorted(readers):
            key = (self.operation[i], tuple(readers[i]))
            self.group[i] = groups.setdefault(key, len(groups))
        while True:
            crowded = [n for n in kinds if len(self._groups(n)) > MAX_WAITS]
            merged = False
            for needed in crowded:
                by_operation: dict[int, set[int]] = defaultdict(set)
                for i in _members(needed):
                    by_operation[self.operation[i]].add(self.group[i])
                found = max(by_operation.values(), key=len)
                if len(found) > 1:
                    first = min(found)
                    self.group = [first if g in found else g for g in self.group]
                    merged = True
            if not merged:
                break

    def _groups(self, needed: Bits) -> list[int]:
        return sorted({self.group[i] for i in _members(needed)})

    def result(self) -> Synchronised:
        """Headers for everybody, and the Noops that join more barriers than a header holds."""
        out = Synchronised([], [], [], [])
        number = {g: n for n, g in enumerate(sorted({g for g in self.group if g >= 0}))}
        sizes = [0] * len(number)
        names = [""] * len(number)
        for i, g in enumerate(self.group):
            if g >= 0:
                sizes[number[g]] += 1
                label = self.tiles[self.operation[i]].label
                names[number[g]] = f"{label}.done{number[g]}"
        out.barriers = names
        joined: dict[tuple[Wait, ...], Wait] = {}

        def emit(inst: Instruction, waits: list[Wait], signal: int | None, operation: int) -> None:
            label = self.tiles[operation].label
            while len(waits) > MAX_WAITS:
                some, waits = tuple(waits[:MAX_WAITS]), waits[MAX_WAITS:]
                if some not in joined:
                    barrier = len(out.barriers)
                    out.barriers.append(f"{label}.join{barrier}")
                    joined[some] = Wait(barrier, 1)
                    emit(Noop(), list(some), barrier, operation)
                waits.append(joined[some])
            out.instructions.append(inst.with_sync(waits, signal))
            out.labels.append(label)
            out.operations.append(operation)

        closing = [Wait(number[g], 0) for g in self._groups(self.sinks)]
        cache: dict[Bits, list[Wait]] = {}
        for i, inst in enumerate(self.instructions):
            needed = self.needs[i]
            if needed not in cache:
                groups = [number[g] for g in self._groups(needed)]
                cache[needed] = [Wait(g, sizes[g]) for g in groups]
            waits = closing if self.roots >> i & 1 else cache[needed]
            g = self.group[i]
            emit(inst, list(waits), None if g < 0 else number[g], self.operation[i])
        return out
