"""Barriers: turn data dependencies into waits and signals.

Dependencies are found from the regions that instructions declare: read after write, write after read and
write after write on the same tensor. What another dependency already implies is dropped. The rest becomes
counters: the instructions of one operation that the same set of readers waits for share a barrier, so a
reader waits for just what it needs, unless that would take more waits than a header holds; then barriers
are merged, and as a last resort joined by Noops. Tagged tensors need no counter: reading them is the wait.

A program is run step after step without a join of all workers. So that no step overtakes the one before,
the instructions that wait for nothing inside the step wait for the last ones of the step before
(target 0).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def add_barriers(
    operations: Sequence[Tiles], tensors: Sequence[TensorSpec]
) -> Synchronised:
    """Add the waits and signals that make any order of execution give the sequential result."""
    needs, tagged_needs = _dependencies(operations, tensors)
    needs = _prune(needs, tagged_needs)
    return _Grouping(operations, needs, _roots_and_sinks(needs, tagged_needs)).result()


class _Accesses:
    """Who wrote and read the regions of one tensor since they were last overwritten."""

    def __init__(self) -> None:
        self.writers: list[tuple[Region, int]] = []
        self.readers: list[tuple[Region, int]] = []


def _overlap(a: Region, b: Region) -> bool:
    if a.indexed != b.indexed:
        return True
    return (
        a.rows[0] < b.rows[1]
        and b.rows[0] < a.rows[1]
        and a.columns[0] < b.columns[1]
        and b.columns[0] < a.columns[1]
    )


def _contains(outer: Region, inner: Region) -> bool:
    return (
        outer.indexed == inner.indexed
        and outer.rows[0] <= inner.rows[0]
        and inner.rows[1] <= outer.rows[1]
        and outer.columns[0] <= inner.columns[0]
        and inner.columns[1] <= outer.columns[1]
    )


def _dependencies(
    operations: Sequence[Tiles], tensors: Sequence[TensorSpec]
) -> tuple[list[Bits], list[Bits]]:
    """For each instruction those it must come after: by barrier, and by tag."""
    needs: list[Bits] = []
    tagged_needs: list[Bits] = []
    accesses: dict[int, _Accesses] = defaultdict(_Accesses)
    number = 0
    for tiles in operations:
        fresh: dict[int, _Accesses] = defaultdict(_Accesses)
        found: dict[tuple[Region, bool], Bits] = {}
        for inst in tiles.instructions:
            needed = tagged = 0
            for region in inst.reads(tensors):
                spec = tensors[region.tensor]
                if not spec.writable:
                    continue
                before = _matching(accesses[region.tensor].writers, region, found, False)
                if spec.tagged:
                    tagged |= before
                else:
                    needed |= before
                    fresh[region.tensor].readers.append((region, number))
            for region in inst.writes(tensors):
                fresh[region.tensor].writers.append((region, number))
                if not tensors[region.tensor].tagged:
                    known = accesses[region.tensor]
                    needed |= _matching([*known.writers, *known.readers], region, found, True)
            needs.append(needed)
            tagged_needs.append(tagged)
            number += 1
        for handle, new in fresh.items():
            _advance(accesses[handle], new)
    return needs, tagged_needs


def _matching(
    entries: Iterable[tuple[Region, int]],
    region: Region,
    found: dict[tuple[Region, bool], Bits],
    write: bool,
) -> Bits:
    """Instructions among ``entries`` whose regions overlap ``region``; remembered per operation."""
    key = (region, write)
    if key not in found:
        bits = 0
        for other, number in entries:
            if _overlap(other, region):
                bits |= 1 << number
        found[key] = bits
    return found[key]


def _advance(old: _Accesses, new: _Accesses) -> None:
    """Take an operation's accesses into account: what it overwrote as a whole is no longer of interest."""
    if new.writers:
        cover = _bounding_boxes(new.writers)
        old.writers = [e for e in old.writers if not any(_contains(c, e[0]) for c in cover)]
        old.readers = [e for e in old.readers if not any(_contains(c, e[0]) for c in cover)]
    old.writers += new.writers
    old.readers += new.readers


def _bounding_boxes(entries: Sequence[tuple[Region, int]]) -> list[Region]:
    """The rectangle that an operation's disjoint tiles fill, if they fill one; else the tiles."""
    regions = [r for r, _ in entries]
    box = Region(
        regions[0].tensor,
        (min(r.rows[0] for r in regions), max(r.rows[1] for r in regions)),
        (min(r.columns[0] for r in regions), max(r.columns[1] for r in regions)),
        regions[0].indexed,
    )
    filled = sum(r.elements for r in set(regions)) == box.elements
    alike = all(r.indexed == box.indexed for r in regions)
    return [box] if filled and alike else regions


def _prune(needs: Sequence[Bits], tagged_needs: Sequence[Bits]) -> list[Bits]:
    """Drop from each instruction what another of its predecessors comes after anyway."""
    ancestors: list[Bits] = []
    known: dict[Bits, Bits] = {}
    pruned = []
    for needed, tagged in zip(needs, tagged_needs, strict=True):
        direct = needed | tagged
        if direct not in known:
            reached = 0
            for i in _members(direct):
                reached |= ancestors[i]
            known[direct] = reached
        ancestors.append(direct | known[direct])
        pruned.append(needed & ~known[direct] & ~tagged)
    return pruned


def _members(bits: Bits) -> list[int]:
    result = []
    while bits:
        low = bits & -bits
        result.append(low.bit_length() - 1)
        bits ^= low
    return result


def _roots_and_sinks(needs: Sequence[Bits], tagged_needs: Sequence[Bits]) -> tuple[Bits, Bits]:
    """Instructions that depend on nothing in their step, and those that nothing depends on."""
    roots = waited = 0
    for i, (needed, tagged) in enumerate(zip(needs, tagged_needs, strict=True)):
        waited |= needed | tagged
        if not needed | tagged:
            roots |= 1 << i
    return roots, (1 << len(needs)) - 1 & ~waited


class _Grouping:
    """Chooses barriers for the needs, then writes the headers."""

    def __init__(
        self, operations: Sequence[Tiles], needs: Sequence[Bits], ends: tuple[Bits, Bits]
    ) -> None:
        self.tiles = operations
        self.instructions = [i for tiles in operations for i in tiles.instructions]
        self.operation = [
            number for number, tiles in enumerate(operations) for _ in tiles.instructions
        ]
        self.needs = needs
        self.roots, self.sinks = ends
        self.group = [-1] * len(self.instructions)
        self._choose_groups()

    def _choose_groups(self) -> None:
        """Producers with the same readers share a barrier; merge an operation's when there are too many."""
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
                operation, found = max(by_operation.items(), key=lambda e: len(e[1]))
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
