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
the same way, unless it waits for more signals of the same barrier: it may read those rows as soon
as the signals of earlier steps to the barriers of its own header have come. Nothing waits for such
a reader, because those rows are never written again (tensors.Region).

All ranks of a program have the same barriers. If an instruction must wait for another on all ranks,
the two share a barrier that every signal reaches on all ranks.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megavm.instructions.noop import Noop
from megavm.scheduler.compiler.dependencies import (
    Accesses,
    Bits,
    Needs,
    bits_of,
    find_needs,
    members_of,
    sum_of,
)
from megavm.scheduler.compiler.lower import Tiles
from megavm.vm.alike import Words, tag_orders
from megavm.vm.config import HEADER_WORDS, MAX_WAITS
from megavm.vm.isa import TagOrder, Wait, sync_words
from megavm.vm.program import encode
from megavm.vm.tensors import TensorSpec


@dataclass
class Synchronised:
    """Instructions with waits and signals, encoded, in topological order."""

    words: Words
    labels: list[str]
    operations: list[int]  # number of the operation of each instruction
    barriers: list[str]
    shared_barriers: int  # the first ones: every signal reaches all ranks


def add_barriers(
    operations: Sequence[Tiles],
    tensors: Sequence[TensorSpec],
    ranks: int = 1,
    *,
    closing: bool = False,
) -> Synchronised:
    """Add the waits and signals that make any order of execution give the sequential result.

    ``closing``: a step waits for the ends of the step before on all ranks, not only on its own.
    """
    instructions = [i for tiles in operations for i in tiles.instructions]
    sizes = [len(tiles.instructions) for tiles in operations]
    words = encode(instructions)
    regions = Accesses(words, tensors)
    needs = find_needs(regions, sizes)
    orders = tag_orders(words, tensors)
    late = bits_of(np.flatnonzero(orders == TagOrder.READS_LATE.value))
    early = (orders == TagOrder.WRITES_EARLY.value).tolist()
    waits = _reduce(needs, sizes, late, early)
    # Tags order an instruction behind the step before, except one that writes early: its writes
    # precede the tags, so it needs the closing wait.
    roots = [not (waits[i] or (n.tags and not early[i])) for i, n in enumerate(needs)]
    plain = bits_of(regions.instruction[regions.write & ~regions.tagged])
    count = len(instructions)
    all_bits = (1 << count) - 1
    shared = sum_of(waits) >> count
    waits = [(waited | waited >> count) & all_bits for waited in waits]
    seen = sum_of(needed.tags for needed in needs)
    sinks = all_bits & ~sum_of(waits) & ~(seen & ~plain & ~late)
    counters = _Counters(operations, waits, [n.earlier for n in needs], roots, sinks)
    return counters.result(words, shared | (sinks if closing else 0), ranks)


def _reduce(
    needs: Sequence[Needs], sizes: Sequence[int], late: Bits, early: Sequence[bool]
) -> list[Bits]:
    """The instructions that each one has to wait for, without those that others imply.

    Sets have 2 n bits (dependencies.py); an instruction on all ranks implies the one on its own.
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
    count = len(needs)
    all_bits = (1 << count) - 1
    ends = list(itertools.accumulate(sizes))
    before = [(1 << end) - 1 for end in ends]  # all instructions before each end

    @functools.cache
    def through_operation(waits: Bits) -> tuple[Bits, Bits]:
        members = members_of(waits)
        return _union(done, members), _union(read, members)

    @functools.cache
    def through_own(waits: Bits) -> tuple[Bits, Bits]:
        all_done = all_read = 0
        while waits:
            end = before[bisect.bisect_right(ends, (waits & -waits).bit_length() - 1)]
            done_by_one, read_by_one = through_operation(waits & end)
            waits &= ~end
            all_done |= done_by_one
            all_read |= read_by_one
        return all_done, all_read

    @functools.cache
    def through_waits(waits: Bits) -> tuple[Bits, Bits]:
        own_done, own_read = through_own(waits & all_bits)
        if not waits >> count:
            return own_done, own_read
        # An operation that is complete on the own rank of each of these is complete on all ranks.
        done_there, read_there = (
            known | (known & all_bits) << count for known in through_own(waits >> count)
        )
        return own_done | done_there, own_read | read_there

    def through_tags(tags: Bits) -> tuple[Bits, Bits]:
        tag_done, tag_read = through_waits(tags)
        return tag_done, tag_read | tags & ~(late | late << count)

    waits: list[Bits] = []
    for needed, is_early in zip(needs, early, strict=True):
        tag_done, tag_read = through_tags(needed.tags)
        before_writes = (0, 0) if is_early else (tag_done, tag_read)
        # The reads are the same for most tiles of an operation (so the result is cached), and they
        # usually imply the other needs.
        implied_done, implied_read = through_waits(needed.reads)
        complete = needed.reads | needed.overwrites & ~before_writes[0] & ~implied_done
        required = complete | needed.replaces & ~before_writes[1] & ~implied_read
        implied_done, implied_read = through_waits(required)
        kept = complete & ~implied_done | required & ~complete & ~implied_read
        kept &= ~(kept >> count)
        waits.append(kept)
        wait_done, wait_read = through_waits(kept)
        kept |= kept >> count
        done.append(tag_done | wait_done | kept)
        read.append(tag_read | wait_read | kept)
    return waits


def _union(sets: Sequence[Bits], members: Sequence[int]) -> Bits:
    result = 0
    for i in members:
        result |= sets[i]
    return result


class _Counters:
    """Chooses the barrier that each producer signals, then writes the headers."""

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
        # The number of the counter that each instruction signals; -1: none.
        self.counter = [-1] * len(self.operation)
        self.members = functools.cache(members_of)
        self._choose_counters()

    def _choose_counters(self) -> None:
        """Give producers with the same readers one barrier; merge barriers that are too many."""
        readers: dict[int, list[int]] = defaultdict(list)
        kinds: dict[Bits, int] = {}
        for needed in (*self.needs, *self.earlier, self.sinks):
            if needed and needed not in kinds:
                kinds[needed] = len(kinds)
                for i in self.members(needed):
                    readers[i].append(kinds[needed])
        counters: dict[tuple[int, tuple[int, ...]], int] = {}
        for i in sorted(readers):
            key = (self.operation[i], tuple(readers[i]))
            self.counter[i] = counters.setdefault(key, len(counters))
        begin = [0, *itertools.accumulate(len(tiles.instructions) for tiles in self.tiles)]
        # What readers of earlier rows wait for stays in their header, beside a join of the rest.
        room = dict.fromkeys(kinds, MAX_WAITS) | dict.fromkeys(self.earlier, MAX_WAITS - 1)
        crowded = list(kinds)
        merged = True
        while merged:
            crowded = [n for n in crowded if len(self._counters(n)) > room[n]]
            merged = False
            for needed in crowded:
                by_operation: dict[int, set[int]] = defaultdict(set)
                for i in self.members(needed):
                    by_operation[self.operation[i]].add(self.counter[i])
                operation, of_operation = max(by_operation.items(), key=lambda item: len(item[1]))
                if len(of_operation) > 1:
                    first = min(of_operation)
                    # A barrier has instructions of one operation only.
                    for i in range(begin[operation], begin[operation + 1]):
                        if self.counter[i] in of_operation:
                            self.counter[i] = first
                    merged = True
        self._join_sinks()

    def _join_sinks(self) -> None:
        """Merge the barriers of sinks until the closing wait has room for them.

        Nothing waits for sinks within the step, so a shared barrier that completes with the last of
        them costs nothing. Where a sink has the barrier of an instruction that is waited for, it
        keeps that: others may come after those that wait. Sinks that readers of earlier rows wait
        for in the next step are merged first and by themselves: those readers then need not wait
        for all other sinks.
        """
        awaited = sum_of(self.earlier) & self.sinks
        in_step = set(self._counters(sum_of(self.needs)))
        for sinks in (awaited, self.sinks):
            counters = [c for c in self._counters(sinks) if c not in in_step]
            if counters and len(self._counters(self.sinks)) > MAX_WAITS:
                self.counter = [
                    counters[0] if counter in counters else counter for counter in self.counter
                ]

    def _counters(self, needed: Bits) -> list[int]:
        return sorted({self.counter[i] for i in self.members(needed)})

    def result(self, words: Words, shared: Bits, ranks: int) -> Synchronised:
        """Write all headers, and add Noops that join barriers where a header has too many waits.

        A barrier is shared by all ranks if one of the instructions ``shared`` signals it.
        """
        words = np.concatenate([words, encode([Noop()])])
        noop = len(words) - 1
        chosen: list[int] = []
        headers: list[tuple[int, ...]] = []
        labels: list[str] = []
        operations: list[int] = []
        meeting = {self.counter[i] for i in self.members(shared)} - {-1}
        others = {counter for counter in self.counter if counter >= 0} - meeting
        number = {counter: n for n, counter in enumerate([*sorted(meeting), *sorted(others)])}
        sizes = [0] * len(number)
        names = [""] * len(number)
        for i, counter in enumerate(self.counter):
            if counter >= 0:
                sizes[number[counter]] += ranks if counter in meeting else 1
                label = self.tiles[self.operation[i]].label
                names[number[counter]] = f"{label}.done{number[counter]}"
        joined: dict[tuple[Wait, ...], Wait] = {}

        def emit(
            inst: int,
            waits: Sequence[Wait],
            signal: int | None,
            operation: int,
            own: Sequence[Wait] = (),
        ) -> None:
            """``own``: waits that stay in the header, as long as there is room for a join."""
            label = self.tiles[operation].label
            waits, own = [*own[MAX_WAITS - 1 :], *waits], own[: MAX_WAITS - 1]
            while len(waits) + len(own) > MAX_WAITS:
                first, waits = tuple(waits[:MAX_WAITS]), waits[MAX_WAITS:]
                if first not in joined:
                    barrier = len(names)
                    names.append(f"{label}.join{barrier}")
                    joined[first] = Wait(barrier, 1)
                    emit(noop, first, barrier, operation)
                waits = [*waits, joined[first]]
            waits = [*own, *waits]
            chosen.append(inst)
            headers.append(sync_words(waits, signal))
            labels.append(label)
            operations.append(operation)

        closing = [Wait(number[counter], 0) for counter in self._counters(self.sinks)]
        cache: dict[tuple[Bits, Bits], tuple[list[Wait], list[Wait]]] = {}
        for i, needed in enumerate(zip(self.needs, self.earlier, strict=True)):
            if needed not in cache:
                now, before = ([number[counter] for counter in self._counters(n)] for n in needed)
                own = [Wait(c, sizes[c] if c in now else 0) for c in before]
                cache[needed] = [Wait(c, sizes[c]) for c in now if c not in before], own
            waits, own = (closing, []) if self.roots[i] else cache[needed]
            counter = self.counter[i]
            signal = None if counter < 0 else number[counter]
            emit(i, waits, signal, self.operation[i], own)
        words = words[np.array(chosen, dtype=np.int64)]
        words[:, 1:HEADER_WORDS] = np.array(headers, np.uint32).reshape(-1, HEADER_WORDS - 1)
        return Synchronised(words, labels, operations, names, len(meeting))
