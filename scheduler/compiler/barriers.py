"""Barriers: turn data dependencies into waits and signals.

Dependencies follow from the regions that instructions declare: read after write, write after read
and write after write on the same tensor. A dependency that others imply is dropped. The remaining
ones become counters: instructions of one operation that have the same set of readers share a
barrier, so a reader waits for exactly what it needs. If that takes more waits than a header holds,
barriers are merged; as a last resort, Noops join them.

Tagged tensors need no counter: reading the word is the wait. But a tag orders only its own word.
A reader that has seen the word knows that the writer had read its inputs (unless the writer reads
late, see isa.TagOrder) and that everything the writer waited for is complete. The tag says nothing
about the writer's untagged writes, and the reader's other reads may have been issued before the
word arrived. The number of live rows does not matter: see happens_before.hpp. If an instruction
writes early, the tags that it waits for order its signal but not its writes.

Programs run step after step without a join of all workers. To keep a step from overtaking the one
before, instructions that wait for nothing inside the step wait for the last instructions of the
step before (target 0). An instruction that reads rows of earlier steps waits for their writers in
the same way. Nothing waits for such a reader, because those rows are never written again
(isa.Region).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megavm.instructions.noop import Noop
from megavm.scheduler.compiler.lower import Tiles
from megavm.vm.alike import Ints, Words, accesses, tag_orders
from megavm.vm.config import HEADER_WORDS, MAX_WAITS
from megavm.vm.isa import TagOrder, TensorSpec, Wait, sync_words
from megavm.vm.program import encode

Bits = int  # a set of instructions: bit i stands for instruction i


@dataclass
class Synchronised:
    """Instructions with waits and signals, encoded, in topological order."""

    words: Words
    labels: list[str]
    operations: list[int]  # number of the operation of each instruction
    barriers: list[str]


@dataclass
class Needs:
    """The instructions that one instruction must come after, by reason."""

    reads: Bits = 0  # it reads what these wrote: they must be complete before it starts
    overwrites: Bits = 0  # it overwrites what these wrote
    replaces: Bits = 0  # it overwrites what these read
    tags: Bits = 0  # it reads tagged words that these wrote
    earlier: Bits = 0  # it reads what these wrote in earlier steps


def add_barriers(operations: Sequence[Tiles], tensors: Sequence[TensorSpec]) -> Synchronised:
    """Add the waits and signals that make any order of execution give the sequential result."""
    instructions = [i for tiles in operations for i in tiles.instructions]
    sizes = [len(tiles.instructions) for tiles in operations]
    words = encode(instructions)
    regions = _Accesses(words, tensors)
    needs = _dependencies(regions, sizes)
    orders = tag_orders(words, tensors)
    late = _bits(np.flatnonzero(orders == TagOrder.READS_LATE.value))
    early = (orders == TagOrder.WRITES_EARLY.value).tolist()
    waits = _reduce(needs, sizes, late, early)
    # Tags order an instruction behind the step before, except one that writes early: its writes
    # precede the tags, so it needs the closing wait.
    roots = [not (waits[i] or (n.tags and not early[i])) for i, n in enumerate(needs)]
    plain = _bits(regions.instruction[regions.write & ~regions.tagged])
    awaited = seen = 0
    for i, needed in enumerate(needs):
        awaited |= waits[i]
        seen |= needed.tags
    everybody = (1 << len(instructions)) - 1
    sinks = everybody & ~awaited & ~(seen & ~plain & ~late)
    return _Grouping(operations, waits, [n.earlier for n in needs], roots, sinks).result(words)


class _Accesses:
    """The regions that instructions declare on writable tensors, one region a row."""

    def __init__(self, words: Words, tensors: Sequence[TensorSpec]) -> None:
        rows = accesses(
            words,
            tensors,
            8,
            lambda _, inst: (
                (r.tensor, *r.rows, *r.columns, r.indexed, r.earlier, write)
                for write, regions in ((0, inst.reads(tensors)), (1, inst.writes(tensors)))
                for r in regions
                if tensors[r.tensor].writable
            ),
        )
        self.instruction, self.tensor = rows[:, 0], rows[:, 1]
        self.boxes = rows[:, 2:7]  # rows, columns, indexed
        self.earlier, self.write = rows[:, 7] != 0, rows[:, 8] != 0
        self.tagged = np.array([t.tagged for t in tensors], dtype=bool)[self.tensor]

    def table(self, chosen: Ints) -> _Table:
        """The regions ``chosen`` (row numbers), which must be of one tensor."""
        return _Table(self.boxes[chosen], self.instruction[chosen])


class _Table:
    """Regions of one tensor (rows, columns, indexed) and the instructions that accessed them."""

    def __init__(self, boxes: Ints | None = None, numbers: Ints | None = None) -> None:
        self.boxes = np.empty((0, 5), np.int64) if boxes is None else boxes
        self.numbers = np.empty(0, np.int64) if numbers is None else numbers

    def overlapping(self, others: _Table) -> Iterator[tuple[int, Bits]]:
        """For each access of ``others``: its instruction, and the instructions it overlaps here."""
        if not len(self.numbers):
            return
        order = self.numbers.argsort()
        numbers = self.numbers[order]
        top, bottom, left, right, indexed = self.boxes[order].T
        different: dict[tuple[int, ...], int] = {}
        which = [different.setdefault(tuple(b), len(different)) for b in others.boxes.tolist()]
        boxes = np.array(list(different), dtype=np.int64).reshape(-1, 5)
        first_row, last_row, begin, end, kind = boxes.T[:, :, None]
        inside = (top < last_row) & (first_row < bottom) & (left < end) & (begin < right)
        inside |= indexed != kind
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        first = int(numbers[0])
        flags = np.zeros((len(different), int(numbers[-1]) - first + 1), dtype=bool)
        flags[:, numbers[starts] - first] = np.logical_or.reduceat(inside, starts, axis=1)
        packed = np.packbits(flags, axis=1, bitorder="little")
        overlapped = [int.from_bytes(row.tobytes(), "little") << first for row in packed]
        for number, box in zip(others.numbers.tolist(), which, strict=True):
            yield number, overlapped[box]

    def update(self, new: _Table, cover: Ints) -> None:
        """Drop the regions that lie inside a region of ``cover``, then append ``new``."""
        top, bottom, left, right, indexed = self.boxes.T
        gone = np.zeros(len(top), dtype=bool)
        for first, last, begin, end, kind in cover:
            inside = (first <= top) & (bottom <= last) & (begin <= left) & (right <= end)
            gone |= inside & (indexed == kind)
        self.boxes = np.concatenate([self.boxes[~gone], new.boxes])
        self.numbers = np.concatenate([self.numbers[~gone], new.numbers])

    def filled(self) -> Ints:
        """The rectangle that the disjoint tiles of an operation fill, or the tiles themselves."""
        tiles = np.unique(self.boxes, axis=0)
        if not tiles.size:
            return tiles
        top, bottom, left, right, indexed = tiles.T
        box = (top.min(), bottom.max(), left.min(), right.max(), indexed[0])
        area = int(((bottom - top) * (right - left)).sum())
        if area == (box[1] - box[0]) * (box[3] - box[2]) and (indexed == indexed[0]).all():
            return np.array([box], dtype=np.int64)
        return tiles


def _dependencies(regions: _Accesses, sizes: Sequence[int]) -> list[Needs]:
    """The needs of each instruction; ``sizes``: number of instructions of each operation."""
    needs = [Needs() for _ in range(sum(sizes))]
    # By tensor: the writes and reads of its regions since these were last overwritten.
    writers: dict[int, _Table] = defaultdict(_Table)
    readers: dict[int, _Table] = defaultdict(_Table)
    ends = np.searchsorted(regions.instruction, np.cumsum(sizes))
    for begin, end in itertools.pairwise([0, *ends.tolist()]):
        now = begin + np.flatnonzero(~regions.earlier[begin:end])
        tensors = regions.tensor[now]
        for handle in np.unique(tensors).tolist():
            mine = now[tensors == handle]
            write = regions.write[mine]
            reads, writes = regions.table(mine[~write]), regions.table(mine[write])
            written, read = writers[handle], readers[handle]
            if regions.tagged[mine[0]]:
                for i, others in written.overlapping(reads):
                    needs[i].tags |= others
                reads = _Table()
            else:
                for i, others in written.overlapping(reads):
                    needs[i].reads |= others
                for i, others in written.overlapping(writes):
                    needs[i].overwrites |= others
                for i, others in read.overlapping(writes):
                    needs[i].replaces |= others
            cover = writes.filled()
            written.update(writes, cover)
            read.update(reads, cover)
    earlier = np.flatnonzero(regions.earlier)
    for handle in np.unique(regions.tensor[earlier]).tolist():
        mine = earlier[regions.tensor[earlier] == handle]
        for i, others in writers[handle].overlapping(regions.table(mine)):
            needs[i].earlier |= others
    return needs


def _reduce(
    needs: Sequence[Needs], sizes: Sequence[int], late: Bits, early: Sequence[bool]
) -> list[Bits]:
    """The instructions that each one has to wait for, without those that others imply.

    ``late``: the instructions that still read after they have stored tagged words. ``early[i]``:
    whether instruction i writes before the tagged words that it reads have arrived. ``sizes``:
    number of instructions of each operation. Sets are processed one operation at a time and the
    results are cached, because most instructions depend on the same operations.

    Internally, ``done[i]`` holds the other instructions that are complete when i has signalled, and
    ``read[i]`` those that have read their inputs by then. The two differ where a tag is the only
    link.
    """
    done: list[Bits] = []
    read: list[Bits] = []
    ends = list(itertools.accumulate(sizes))
    before = [(1 << end) - 1 for end in ends]  # all instructions before each end

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
        return tag_done, tag_read | tags & ~late

    waits: list[Bits] = []
    for needed, is_early in zip(needs, early, strict=True):
        tag_done, tag_read = through_tags(needed.tags)
        before_writes = (0, 0) if is_early else (tag_done, tag_read)
        # What an instruction reads is the same for most tiles of an operation (so it is cached),
        # and it usually implies the other needs.
        implied_done, implied_read = through_waits(needed.reads)
        complete = needed.reads | needed.overwrites & ~before_writes[0] & ~implied_done
        required = complete | needed.replaces & ~before_writes[1] & ~implied_read
        implied_done, implied_read = through_waits(required)
        kept = complete & ~implied_done | required & ~complete & ~implied_read
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


def _members(bits: Bits) -> list[int]:
    if not bits:
        return []
    first = (bits & -bits).bit_length() - 1
    if bits == 1 << first:
        return [first]
    bits >>= first
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    members: list[int] = (np.unpackbits(raw, bitorder="little").nonzero()[0] + first).tolist()
    return members


def _bits(numbers: Ints) -> Bits:
    if not len(numbers):
        return 0
    first = int(numbers.min())
    flags = np.zeros(int(numbers.max()) - first + 1, dtype=np.uint8)
    flags[numbers - first] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little") << first


class _Grouping:
    """Chooses the barriers that meet all needs, then writes the headers."""

    def __init__(
        self,
        operations: Sequence[Tiles],
        needs: Sequence[Bits],
        earlier: Sequence[Bits],
        roots: Sequence[bool],
        sinks: Bits,
    ) -> None:
        self.tiles = operations
        self.operation = [
            number for number, tiles in enumerate(operations) for _ in tiles.instructions
        ]
        self.needs = needs
        self.earlier = earlier
        self.roots = roots  # whether an instruction depends on nothing in its step
        self.sinks = sinks  # instructions whose completion nothing else in the step implies
        self.group = [-1] * len(self.operation)
        self.members = functools.cache(_members)
        self._choose_groups()

    def _choose_groups(self) -> None:
        """Give producers with the same readers one barrier; merge barriers that are too many."""
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
        crowded = list(kinds)
        merged = True
        while merged:
            crowded = [n for n in crowded if len(self._groups(n)) > MAX_WAITS]
            merged = False
            for needed in crowded:
                by_operation: dict[int, set[int]] = defaultdict(set)
                for i in self.members(needed):
                    by_operation[self.operation[i]].add(self.group[i])
                groups_of_one = max(by_operation.values(), key=len)
                if len(groups_of_one) > 1:
                    first = min(groups_of_one)
                    self.group = [first if g in groups_of_one else g for g in self.group]
                    merged = True
        self._join_sinks()

    def _join_sinks(self) -> None:
        """Merge the barriers of sinks until the closing wait has room for them.

        Nothing waits for sinks within the step, so a shared barrier that completes with the last of
        them costs nothing. Sinks that readers of earlier rows wait for in the next step are merged
        first and by themselves: those readers then need not wait for all other sinks.
        """
        awaited = functools.reduce(int.__or__, self.earlier, 0) & self.sinks
        for sinks in (awaited, self.sinks):
            groups = self._groups(sinks)
            if groups and len(self._groups(self.sinks)) > MAX_WAITS:
                self.group = [groups[0] if g in groups else g for g in self.group]

    def _groups(self, needed: Bits) -> list[int]:
        return sorted({self.group[i] for i in self.members(needed)})

    def result(self, words: Words) -> Synchronised:
        """Write all headers, and add Noops that join barriers where a header has too many waits."""
        words = np.concatenate([words, encode([Noop()])])
        noop = len(words) - 1
        chosen: list[int] = []
        headers: list[tuple[int, ...]] = []
        labels: list[str] = []
        operations: list[int] = []
        number = {g: n for n, g in enumerate(sorted({g for g in self.group if g >= 0}))}
        sizes = [0] * len(number)
        names = [""] * len(number)
        for i, g in enumerate(self.group):
            if g >= 0:
                sizes[number[g]] += 1
                label = self.tiles[self.operation[i]].label
                names[number[g]] = f"{label}.done{number[g]}"
        joined: dict[tuple[Wait, ...], Wait] = {}

        def emit(inst: int, waits: list[Wait], signal: int | None, operation: int) -> None:
            label = self.tiles[operation].label
            while len(waits) > MAX_WAITS:
                first, waits = tuple(waits[:MAX_WAITS]), waits[MAX_WAITS:]
                if first not in joined:
                    barrier = len(names)
                    names.append(f"{label}.join{barrier}")
                    joined[first] = Wait(barrier, 1)
                    emit(noop, list(first), barrier, operation)
                waits.append(joined[first])
            chosen.append(inst)
            headers.append(sync_words(waits, signal))
            labels.append(label)
            operations.append(operation)

        closing = [Wait(number[g], 0) for g in self._groups(self.sinks)]
        cache: dict[tuple[Bits, Bits], list[Wait]] = {}
        for i, needed in enumerate(zip(self.needs, self.earlier, strict=True)):
            if needed not in cache:
                now, before = ([number[g] for g in self._groups(n)] for n in needed)
                cache[needed] = [Wait(g, 0) for g in before if g not in now]
                cache[needed] += [Wait(g, sizes[g]) for g in now]
            waits = closing if self.roots[i] else cache[needed]
            g = self.group[i]
            emit(i, list(waits), None if g < 0 else number[g], self.operation[i])
        words = words[np.array(chosen, dtype=np.int64)]
        words[:, 1:HEADER_WORDS] = np.array(headers, np.uint32).reshape(-1, HEADER_WORDS - 1)
        return Synchronised(words, labels, operations, names)
