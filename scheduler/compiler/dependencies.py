"""Dependencies between the instructions of a step, from the regions that they declare.

Sets of the n instructions of a program are integers, with a bit for each. Bits n to 2 n - 1 stand
for the same instructions *on all ranks*; only tensors with shares make such dependencies.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megavm.vm.alike import Ints, Words, accesses
from megavm.vm.tensors import TensorSpec

Bits = int  # a set of instructions


@dataclass
class Needs:
    """The instructions that one instruction must come after, by reason."""

    reads: Bits = 0  # it reads what these wrote: they must be complete before it starts
    overwrites: Bits = 0  # it overwrites what these wrote
    replaces: Bits = 0  # it overwrites what these read
    tags: Bits = 0  # it reads tagged words that these wrote; of all ranks: words of all of them
    earlier: Bits = 0  # it reads what these wrote in earlier steps


class Accesses:
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
        self.count = len(words)
        self.instruction, self.tensor = rows[:, 0], rows[:, 1]
        self.boxes = rows[:, 2:7]  # rows, columns, indexed
        self.earlier, self.write = rows[:, 7] != 0, rows[:, 8] != 0
        self.tagged = np.array([t.tagged for t in tensors], dtype=bool)[self.tensor]
        self.shares = np.array([t.shares for t in tensors], dtype=np.int64)[self.tensor]
        self.rank = np.zeros(len(rows), np.int64)  # makes the access to this rank's tensor
        self._add_writes_of_other_ranks(tensors)

    def _add_writes_of_other_ranks(self, tensors: Sequence[TensorSpec]) -> None:
        """Add to every write of a tensor with shares those that the other ranks make."""
        sent = np.flatnonzero((self.shares > 1) & self.write)
        if not len(sent):
            return
        count = np.ones(len(self.tensor), np.int64)
        count[sent] = self.shares[sent]
        which = np.repeat(np.arange(len(count)), count)
        width = np.array([t.own_columns for t in tensors], np.int64)
        for name in ("instruction", "tensor", "boxes", "earlier", "write", "tagged", "shares"):
            setattr(self, name, getattr(self, name)[which])
        self.rank = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        self.boxes[:, 2:4] += (self.rank * width[self.tensor])[:, None]

    def table(self, chosen: Ints) -> _Table:
        """The regions ``chosen`` (row numbers), which must be of one tensor."""
        return _Table(self.boxes[chosen], self.instruction[chosen] + self.count * self.rank[chosen])


class _Table:
    """Regions of one tensor (rows, columns, indexed) and the instructions that accessed them.

    Instruction i of n has the number i + n * rank.
    """

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

    def below(self, number: int) -> _Table:
        """The regions that instructions below a number accessed."""
        chosen = self.numbers < number
        return _Table(self.boxes[chosen], self.numbers[chosen])

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


def find_needs(regions: Accesses, sizes: Sequence[int]) -> list[Needs]:
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
            ranks = int(regions.shares[mine[0]])
            if regions.tagged[mine[0]]:
                for i, others in written.overlapping(reads):
                    needs[i].tags |= _known(others, len(needs), ranks)
                reads = _Table()
            else:
                for i, others in written.overlapping(reads):
                    needs[i].reads |= _required(others, len(needs), ranks)
                # Ranks write different columns, so those of this rank stand for all.
                own = writes.below(len(needs))
                for i, others in written.below(len(needs)).overlapping(own):
                    needs[i].overwrites |= _required(others, len(needs), ranks)
                for i, others in read.overlapping(writes):
                    needs[i % len(needs)].replaces |= _required(others, len(needs), ranks)
            cover = writes.filled()
            written.update(writes, cover)
            read.update(reads, cover)
    earlier = np.flatnonzero(regions.earlier)
    for handle in np.unique(regions.tensor[earlier]).tolist():
        mine = earlier[regions.tensor[earlier] == handle]
        for i, others in writers[handle].overlapping(regions.table(mine)):
            needs[i].earlier |= others
    return needs


def _required(numbers: Bits, count: int, ranks: int) -> Bits:
    """The instructions to wait for. Those that access a tensor with shares are on all ranks."""
    if ranks == 1:
        return numbers
    all_bits = (1 << count) - 1
    return sum_of((numbers >> count * rank) & all_bits for rank in range(ranks)) << count


def _known(numbers: Bits, count: int, ranks: int) -> Bits:
    """The instructions whose words have arrived from all ranks."""
    if ranks == 1:
        return numbers
    known = (1 << count) - 1
    for rank in range(ranks):
        known &= numbers >> count * rank
    return known | known << count


def sum_of(sets: Iterable[Bits]) -> Bits:
    """The union of sets."""
    return functools.reduce(int.__or__, sets, 0)


def members_of(bits: Bits) -> list[int]:
    if not bits:
        return []
    first = (bits & -bits).bit_length() - 1
    if bits == 1 << first:
        return [first]
    bits >>= first
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    members: list[int] = (np.unpackbits(raw, bitorder="little").nonzero()[0] + first).tolist()
    return members


def bits_of(numbers: Ints) -> Bits:
    if not len(numbers):
        return 0
    first = int(numbers.min())
    flags = np.zeros(int(numbers.max()) - first + 1, dtype=np.uint8)
    flags[numbers - first] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little") << first
