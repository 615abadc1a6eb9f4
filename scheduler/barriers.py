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
before (target 0). Who reads rows of earlier steps waits for their writers in the same way; nothing
waits for such a reader, since what it reads is never written again (isa.Region).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    earlier: Bits = 0  # it reads what these wrote in earlier steps


def add_barriers(operations: Sequence[Tiles], tensors: Sequence[TensorSpec]) -> Synchronised:
    """Add the waits and signals that make any order of execution give the sequential result."""
    instructions = [i for tiles in operations for i in tiles.instructions]
    needs = _dependencies(operations, tensors)
    waits = _reduce(needs, [len(tiles.instructions) for tiles in operations])
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
    return _Grouping(operations, waits, [n.earlier for n in needs], roots, sinks).result()


class _Table:
    """Regions of one tensor and the instructions that accessed them, as columns of numbers."""

    def __init__(self, entries: Sequence[tuple[Region, int]] = ()) -> None:
        rows = [(*r.rows, *r.columns, r.indexed, number) for r, number in entries]
        self.columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T

    def matching(self, regions: Sequence[Region]) -> list[Bits]:
        """For each of ``regions`` the instructions whose regions overlap it."""
        if not self.columns.size:
            return [0] * len(regions)
        top, bottom, left, right, indexed, numbers = self.columns[:, self.columns[5].argsort()]
        wanted = np.array([(*r.rows, *r.columns, r.indexed) for r in regions], dtype=np.int64)
        first_row, last_row, begin, end, kind = wanted.T[:, :, None]
        inside = (top < last_row) & (first_row < bottom) & (left < end) & (begin < right)
        inside |= indexed != kind
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        first = int(numbers[0])
        flags = np.zeros((len(regions), int(numbers[-1]) - first + 1), dtype=bool)
        flags[:, numbers[starts] - first] = np.logical_or.reduceat(inside, starts, axis=1)
        packed = np.packbits(flags, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") << first for row in packed]

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
    earlier: list[tuple[Needs, Region]] = []
    for tiles in operations:
        reads: dict[int, list[tuple[Region, int]]] = defaultdict(list)
        writes: dict[int, list[tuple[Region, int]]] = defaultdict(list)
        declared = [
            (
                [r for r in inst.reads(tensors) if tensors[r.tensor].writable],
                list(inst.writes(tensors)),
            )
            for inst in tiles.instructions
        ]
        read = {r for some, _ in declared for r in some if not r.earlier}
        written = {r for _, some in declared for r in some if not tensors[r.tensor].tagged}
        writers = _lookup({t: a.writers for t, a in accesses.items()}, read | written)
        readers = _lookup({t: a.readers for t, a in accesses.items()}, written)
        for all_read, all_written in declared:
            number, needed = len(needs), Needs()
            for region in all_read:
                if region.earlier:
                    earlier.append((needed, region))
                elif tensors[region.tensor].tagged:
                    needed.tags |= writers[region]
                else:
                    needed.reads |= writers[region]
                    reads[region.tensor].append((region, number))
            for region in all_written:
                writes[region.tensor].append((region, number))
                if not tensors[region.tensor].tagged:
                    needed.overwrites |= writers[region]
                    needed.replaces |= readers[region]
            needs.append(needed)
        for handle in reads.keys() | writes.keys():
            known, new = accesses[handle], _Table(writes[handle])
            cover = new.filled()
            known.writers.update(new, cover)
            known.readers.update(_Table(reads[handle]), cover)
    writers = _lookup({t: a.writers for t, a in accesses.items()}, {r for _, r in earlier})
    for needed, region in earlier:
        needed.earlier |= writers[region]
    return needs


def _lookup(tables: Mapping[int, _Table], regions: Iterable[Region]) -> dict[Region, Bits]:
    """The instructions that accessed each of ``regions``, by tables of their tensors."""
    by_tensor: dict[int, list[Region]] = defaultdict(list)
    for region in regions:
        by_tensor[region.tensor].append(region)
    found: dict[Region, Bits] = {}
    for handle, some in by_tensor.items():
        table = tables.get(handle)
        found.update(zip(some, table.matching(some) if table else [0] * len(some), strict=True))
    return found


def _reduce(needs: Sequence[Needs], sizes: Sequence[int]) -> list[Bits]:
    """The instructions that each one has to wait for, without those that others imply.

    ``done[i]``: what is complete when i has signalled, i aside; ``read[i]``: what has read its
    inputs by then. They differ where a tag is the only link. Sets are taken apart by operation (of
    ``sizes`` instructions): most instructions depend on the same parts.
    """
    done: list[Bits] = []
    read: list[Bits] = []
    ends = list(itertools.accumulate(sizes))
    before = [(1 << end) - 1 for end in ends]  # the sets of all instructions up to there

    @functools.cache
    def through_part(part: Bits) -> tuple[Bits, Bits]:
        members = _members(part)
        return _union(done, members), _union(read, members)

    @functools.cache
    def through_waits(waits: Bits) -> tuple[Bits, Bits]:
        all_done = all_read = 0
        while waits:
            part = waits & before[bisect.bisect_right(ends, (waits & -waits).bit_length() - 1)]
            waits ^= part
            part_done, part_read = through_part(part)
            all_done |= part_done
            all_read |= part_read
        return all_done, all_read

    def through_tags(tags: Bits) -> tuple[Bits, Bits]:
        tag_done, tag_read = through_waits(tags)
        return tag_done, tag_read | tags

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
    if not bits:
        return []
    first = (bits & -bits).bit_length() - 1
    bits >>= first
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    members: list[int] = (np.unpackbits(raw, bitorder="little").nonzero()[0] + first).tolist()
    return members


def _bits(numbers: npt.NDArray[np.int64]) -> Bits:
    if not len(numbers):
        return 0
    first = int(numbers.min())
    flags = np.zeros(int(numbers.max()) - first + 1, dtype=np.uint8)
    flags[numbers - first] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little") << first


class _Grouping:
    """Chooses barriers for the needs, then writes the headers."""

    def __init__(
        self,
        operations: Sequence[Tiles],
        needs: Sequence[Bits],
        earlier: Sequence[Bits],
        roots: Bits,
        sinks: Bits,
    ) -> None:
        self.tiles = operations
        self.instructions = [i for tiles in operations for i in tiles.instructions]
        self.operation = [
            number for number, tiles in enumerate(operations) for _ in tiles.instructions
        ]
        self.needs = needs
        self.earlier = earlier
        self.roots = roots  # depend on nothing in their step
        self.sinks = sinks  # nothing in the step tells that they are complete
        self.group = [-1] * len(self.instructions)
        self.members = functools.cache(_members)
        self._choose_groups()

    def _choose_groups(self) -> None:
        """Producers with the same readers share a barrier; merged where there are too many."""
        readers: dict[int, list[int]] = defaultdict(list)
        kinds: dict[Bits, int] = {}
        for needed in (*self.needs, *self.earlier, self.sinks):
            if needed and needed not in kinds:
                kinds[needed] = len(kinds)
                for i in self.members(needed):
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
                for i in self.members(needed):
                    by_operation[self.operation[i]].add(self.group[i])
                found = max(by_operation.values(), key=len)
                if len(found) > 1:
                    first = min(found)
                    self.group = [first if g in found else g for g in self.group]
                    merged = True
            if not merged:
                break
        self._join_sinks()

    def _join_sinks(self) -> None:
        """Let sinks of several operations share barriers until the closing wait has room for them.

        Nobody waits for them within the step, so that those done early are known late costs
        nothing. Still, first those that the next step's readers of earlier rows wait for share one:
        they need not wait for the very end.
        """
        awaited = functools.reduce(int.__or__, self.earlier, 0) & self.sinks
        for some in (awaited, self.sinks):
            found = self._groups(some)
            if found and len(self._groups(self.sinks)) > MAX_WAITS:
                self.group = [found[0] if g in found else g for g in self.group]

    def _groups(self, needed: Bits) -> list[int]:
        return sorted({self.group[i] for i in self.members(needed)})

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
        cache: dict[tuple[Bits, Bits], list[Wait]] = {}
        for i, inst in enumerate(self.instructions):
            needed = self.needs[i], self.earlier[i]
            if needed not in cache:
                now, before = ([number[g] for g in self._groups(n)] for n in needed)
                cache[needed] = [Wait(g, 0) for g in before if g not in now]
                cache[needed] += [Wait(g, sizes[g]) for g in now]
            waits = closing if self.roots >> i & 1 else cache[needed]
            g = self.group[i]
            emit(inst, list(waits), None if g < 0 else number[g], self.operation[i])
        return out
