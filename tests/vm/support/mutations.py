"""Changes of programs: errors that a compiler might make, and valid alternatives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.instructions.noop import Noop
from megavm.vm.config import HEADER_WORDS, MAX_WAITS, NONE
from megavm.vm.isa import Wait
from megavm.vm.operands import FieldKind
from megavm.vm.program import Program, with_header
from megavm.vm.tensors import TensorKind

MOST_INSTRUCTIONS = 48
Waits = list[tuple[int, int]]


class Draft:
    """A program whose parts can be changed."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        self.rng = rng
        self.tensors = list(program.tensors)
        self.words = [row.copy() for row in program.words]
        self.queues = [[int(i) for i in queue] for queue in program.queues]
        self.barriers = len(program.barriers)
        self.dynamic = program.dynamic
        self.ranks = program.ranks
        self.shared_barriers = program.shared_barriers
        self.workers = program.workers
        self.labels = list(program.labels)

    def program(self) -> Program:
        return Program(
            tensors=tuple(self.tensors),
            words=np.array(self.words, np.uint32).reshape(len(self.words), -1),
            queues=tuple(np.array(queue, np.int32) for queue in self.queues),
            dynamic=self.dynamic,
            workers=self.workers,
            barriers=tuple(f"b{i}" for i in range(self.barriers)),
            labels=tuple(self.labels),
            ranks=self.ranks,
            shared_barriers=self.shared_barriers,
        )

    # Choices.

    def instruction(self) -> int:
        return self.rng.randrange(len(self.words))

    def waits(self, i: int) -> Waits:
        header = [int(w) for w in self.words[i][2:HEADER_WORDS]]
        return [(b, t) for b, t in zip(header[::2], header[1::2], strict=True) if b != NONE]

    def signal(self, i: int) -> int | None:
        barrier = int(self.words[i][1])
        return None if barrier == NONE else barrier

    def header(self, i: int, waits: Waits, signal: int | None) -> None:
        unique = dict(reversed(waits))
        self.words[i] = with_header(self.words[i], list(unique.items())[:MAX_WAITS], signal)

    def signals(self, barrier: int) -> int:
        """How often one step signals a barrier of a rank."""
        ranks = self.ranks if barrier < self.shared_barriers else 1
        return ranks * sum(int(row[1]) == barrier for row in self.words)

    def waiting(self) -> tuple[int, Waits, int] | None:
        """An instruction that waits, its waits, and which of them to change."""
        candidates = [i for i in range(len(self.words)) if self.waits(i)]
        if not candidates:
            return None
        i = self.rng.choice(candidates)
        waits = self.waits(i)
        return i, waits, self.rng.randrange(len(waits))

    def target(self, barrier: int) -> int:
        full = self.signals(barrier)
        return self.rng.choice((0, full, full, self.rng.randint(0, full)))

    def follow(self, barrier: int, before: int) -> None:
        """Update the waits for all signals of a barrier to its new number of signals, most of the time."""
        after = self.signals(barrier)
        if self.rng.random() < 0.2:
            return
        for i in range(len(self.words)):
            waits = self.waits(i)
            if (barrier, before) in waits and before:
                waits[waits.index((barrier, before))] = (barrier, after)
                self.header(i, waits, self.signal(i))

    def field(self, i: int, name: str) -> int | None:
        """The word of an operand."""
        fields = instruction_set()[int(self.words[i][0])].fields
        names = [f.name for f in fields]
        return HEADER_WORDS + names.index(name) if name in names else None

    def tensor_words(self, i: int) -> list[int]:
        fields = instruction_set()[int(self.words[i][0])].fields
        return [HEADER_WORDS + k for k, f in enumerate(fields) if f.kind is FieldKind.TENSOR]

    def append(self, words: npt.NDArray[np.uint32], queue: list[int], at: int) -> None:
        """Insert a new instruction into a queue."""
        queue.insert(at, len(self.words))
        self.words.append(words)
        self.labels.append("")

    def place(self, i: int) -> tuple[list[int], int]:
        queue = next(q for q in self.queues if i in q)
        return queue, queue.index(i)

    # Waits and signals.

    def drop_wait(self) -> None:
        if found := self.waiting():
            i, waits, k = found
            del waits[k]
            self.header(i, waits, self.signal(i))

    def add_wait(self) -> None:
        if self.barriers:
            i, barrier = self.instruction(), self.rng.randrange(self.barriers)
            waits = [w for w in self.waits(i) if w[0] != barrier]
            self.header(i, [(barrier, self.target(barrier)), *waits], self.signal(i))

    def change_target(self) -> None:
        if found := self.waiting():
            i, waits, k = found
            barrier, target = waits[k]
            full = self.signals(barrier)
            choices = {0, full, target - 1, target + 1, self.rng.randint(0, full)} - {target, -1}
            waits[k] = barrier, self.rng.choice(sorted(choices))
            self.header(i, waits, self.signal(i))

    def change_barrier(self) -> None:
        if found := self.waiting():
            i, waits, k = found
            barrier = self.rng.randrange(self.barriers)
            waits[k] = barrier, self.target(barrier)
            self.header(i, waits, self.signal(i))

    def swap_waits(self) -> None:
        if (one := self.waiting()) and (two := self.waiting()) and one[0] != two[0]:
            one[1][one[2]], two[1][two[2]] = two[1][two[2]], one[1][one[2]]
            for i, waits, _ in (one, two):
                self.header(i, waits, self.signal(i))

    def drop_signal(self) -> None:
        i = self.instruction()
        barrier = self.signal(i)
        if barrier is not None:
            before = self.signals(barrier)
            self.header(i, self.waits(i), None)
            self.follow(barrier, before)

    def move_signal(self) -> None:
        """An instruction signals another barrier, or a new one."""
        i, barrier = self.instruction(), self.rng.randint(0, self.barriers)
        self.barriers = max(self.barriers, barrier + 1)
        touched = {b: self.signals(b) for b in (self.signal(i), barrier) if b is not None}
        self.header(i, self.waits(i), barrier)
        for b, before in touched.items():
            self.follow(b, before)

    def merge_barriers(self) -> None:
        if self.barriers < 2:
            return
        one, two = self.rng.sample(range(self.barriers), 2)
        full = self.signals(one), self.signals(two)
        for i in range(len(self.words)):
            waits = [
                (one, sum(full) if t and t == full[b == two] else t) if b in (one, two) else (b, t)
                for b, t in self.waits(i)
            ]
            signal = self.signal(i)
            self.header(i, waits, one if signal == two else signal)

    def split_barrier(self) -> None:
        """Move some signals to a new barrier. Instructions that waited for all signals wait for both."""
        if not self.barriers:
            return
        barrier, new = self.rng.randrange(self.barriers), self.barriers
        full = self.signals(barrier)
        moved = 0
        for i in range(len(self.words)):
            if self.signal(i) == barrier and self.rng.random() < 0.5:
                self.header(i, self.waits(i), new)
                moved += 1
        self.barriers += 1
        for i in range(len(self.words)):
            waits = dict(self.waits(i))
            target = waits.get(barrier)
            if target in (0, full):
                waits |= {barrier: full - moved if target else 0, new: moved if target else 0}
                self.header(i, list(waits.items()), self.signal(i))

    def join(self) -> None:
        """A new Noop, in any queue, waits in place of an instruction."""
        if found := self.waiting():
            i, waits, _ = found
            queue, at = self.place(i)
            if self.rng.random() < 0.5:
                queue = self.rng.choice(self.queues)
                at = self.rng.randint(0, len(queue))
            noop = Noop(waits=[Wait(*w) for w in waits], signal=self.barriers)
            self.append(np.frombuffer(noop.encode(), "<u4").astype(np.uint32), queue, at)
            kept = self.rng.sample(waits, self.rng.randint(0, min(len(waits), MAX_WAITS - 1)))
            self.header(i, [(self.barriers, 1), *kept], self.signal(i))
            self.barriers += 1

    # Ranks.

    def move_boundary(self) -> None:
        """One barrier more or less is shared."""
        count = self.shared_barriers + self.rng.choice((-1, -1, 1))
        if 0 <= count <= self.barriers:
            barrier = min(count, self.shared_barriers)
            before = self.signals(barrier)
            self.shared_barriers = count
            self.follow(barrier, before)

    def exchange_barriers(self) -> None:
        """A shared barrier and one of the own rank trade places."""
        if 0 < self.shared_barriers < self.barriers:
            one = self.rng.randrange(self.shared_barriers)
            two = self.rng.randrange(self.shared_barriers, self.barriers)
            before = {one: self.signals(one), two: self.signals(two)}
            other = {one: two, two: one}
            for i in range(len(self.words)):
                waits = [(other.get(b, b), t) for b, t in self.waits(i)]
                signal = self.signal(i)
                self.header(i, waits, None if signal is None else other.get(signal, signal))
            for barrier in (one, two):
                self.follow(barrier, before[other[barrier]])

    def count_one_rank(self) -> None:
        """A wait for the signals of all ranks counts those of one, or one rank less."""
        shared = [
            (i, k)
            for i in range(len(self.words))
            for k, (barrier, target) in enumerate(self.waits(i))
            if barrier < self.shared_barriers and target
        ]
        if shared:
            i, k = self.rng.choice(shared)
            waits = self.waits(i)
            barrier, target = waits[k]
            one = -(-target // self.ranks)
            waits[k] = barrier, self.rng.choice((one, target - one))
            self.header(i, waits, self.signal(i))

    def flip_shares(self) -> None:
        """Ranks gather a tensor that each had for itself, or do not gather it; rarely of valid form."""
        handles = [h for h, t in enumerate(self.tensors) if t.kind is TensorKind.ACTIVATION]
        if handles:
            handle = self.rng.choice(handles)
            spec = self.tensors[handle]
            shares = 1 if spec.shares > 1 else self.ranks
            if spec.columns % shares == 0 and spec.columns // shares * spec.dtype.size % 4 == 0:
                self.tensors[handle] = replace(spec, shares=shares)

    def change_only(self) -> None:
        """A copy reaches another rank, or all ranks."""
        words = [(i, word) for i in range(len(self.words)) if (word := self.field(i, "only"))]
        if words:
            i, word = self.rng.choice(words)
            self.words[i][word] = self.rng.choice([NONE, *range(self.ranks)])

    # Queues.

    def swap_neighbours(self) -> None:
        queue = self.rng.choice(self.queues)
        if len(queue) > 1:
            k = self.rng.randrange(len(queue) - 1)
            queue[k : k + 2] = queue[k + 1], queue[k]

    def swap_entries(self) -> None:
        one, two = self.rng.choice(self.queues), self.rng.choice(self.queues)
        if one and two:
            k, m = self.rng.randrange(len(one)), self.rng.randrange(len(two))
            one[k], two[m] = two[m], one[k]

    def move_entry(self) -> None:
        source, target = self.rng.choice(self.queues), self.rng.choice(self.queues)
        if source:
            entry = source.pop(self.rng.randrange(len(source)))
            target.insert(self.rng.randint(0, len(target)), entry)

    def split_queue(self) -> None:
        """Move some entries to a new worker, in the same order."""
        if not self.dynamic:
            queue = self.rng.choice(self.queues)
            moved = [entry for entry in queue if self.rng.random() < 0.5]
            queue[:] = [entry for entry in queue if entry not in moved]
            self.queues.append(moved)
            self.workers += 1

    def merge_queues(self) -> None:
        if not self.dynamic and len(self.queues) > 1:
            one, two = self.rng.sample(self.queues, 2)
            self.queues.remove(two)
            merged = one + two if self.rng.random() < 0.3 else sorted(one + two)
            one[:] = merged
            self.workers -= 1

    def other_queues(self) -> None:
        """Turn static queues into a dynamic one, or a dynamic queue into static ones."""
        if self.dynamic:
            workers = self.rng.randint(1, 4)
            queues: list[list[int]] = [[] for _ in range(workers)]
            for entry in self.queues[0]:
                self.rng.choice(queues).append(entry)
            self.queues, self.workers, self.dynamic = queues, workers, False
        else:
            self.queues, self.dynamic = [sorted(e for q in self.queues for e in q)], True

    # Tiles and tensors.

    def change_tile(self) -> None:
        """Move one end, or both ends, of the rows or columns."""
        i = self.instruction()
        names = ("row", "column", "pair", "head")
        ends = [(self.field(i, f"{n}_begin"), self.field(i, f"{n}_end")) for n in names]
        known = [(b, e) for b, e in ends if b is not None and e is not None]
        if known:
            pair = self.rng.choice(known)
            by = self.rng.choice((-2, -1, 1, 2))
            for word in self.rng.choice((pair, pair[:1], pair[1:])):
                self.words[i][word] = max(int(self.words[i][word]) + by, 0)
            x_rows, row_end = self.field(i, "x_rows"), self.field(i, "row_end")
            if x_rows is not None and row_end is not None:
                self.words[i][x_rows] = self.words[i][row_end]

    def change_source(self) -> None:
        i = self.instruction()
        words = [w for n in ("x_row", "x_column") if (w := self.field(i, n)) is not None]
        if words:
            word = self.rng.choice(words)
            self.words[i][word] = max(int(self.words[i][word]) + self.rng.choice((-2, -1, 1, 2)), 0)

    def split_tile(self) -> None:
        """Split an instruction into two that do its work."""
        i = self.instruction()
        name = self.rng.choice(("row", "column"))
        begin, end = self.field(i, f"{name}_begin"), self.field(i, f"{name}_end")
        if begin is None or end is None or len(self.words) >= MOST_INSTRUCTIONS:
            return
        low, high = int(self.words[i][begin]), int(self.words[i][end])
        middle = (low + high) // 2
        if not low < middle < high:
            return
        second = self.words[i].copy()
        self.words[i][end] = second[begin] = middle
        source = self.field(i, "x_row" if name == "row" else "x_column")
        if source is not None:
            second[source] += middle - low
        x_rows = self.field(i, "x_rows")
        if x_rows is not None and name == "row":
            self.words[i][x_rows] = middle
        barrier = self.signal(i)
        before = 0 if barrier is None else self.signals(barrier)
        queue, at = self.place(i)
        if self.rng.random() < 0.4:
            queue = self.rng.choice(self.queues)
            at = self.rng.randint(0, len(queue))
        self.append(second, queue, at)
        if barrier is not None:
            self.follow(barrier, before)

    def drop_instruction(self) -> None:
        i = self.instruction()
        if len(self.words) < 3:
            return
        barrier = self.signal(i)
        before = 0 if barrier is None else self.signals(barrier)
        del self.words[i], self.labels[i]
        self.queues = [[e - (e > i) for e in q if e != i] for q in self.queues]
        if barrier is not None:
            self.follow(barrier, before)

    def change_tensor(self) -> None:
        """Replace a tensor by another of the same shape."""
        i = self.instruction()
        words = [w for w in self.tensor_words(i) if int(self.words[i][w]) < len(self.tensors)]
        if words:
            word = self.rng.choice(words)
            spec = self.tensors[int(self.words[i][word])]
            alike = [h for h, t in enumerate(self.tensors) if t.shape == spec.shape]
            self.words[i][word] = self.rng.choice(alike)

    def change_row_count(self) -> None:
        word = self.field(i := self.instruction(), "row_count")
        counts = [h for h, t in enumerate(self.tensors) if t.name.endswith("row_count")]
        if word is not None and counts:
            here = int(self.words[i][word])
            self.words[i][word] = NONE if here != NONE else self.rng.choice(counts)

    def flip_tagged(self) -> None:
        handles = [h for h, t in enumerate(self.tensors) if t.kind is TensorKind.ACTIVATION]
        if handles:
            handle = self.rng.choice(handles)
            spec = self.tensors[handle]
            self.tensors[handle] = replace(spec, tagged=not spec.tagged)

    def flip_kind(self) -> None:
        handles = [
            h for h, t in enumerate(self.tensors) if t.writable and not t.tagged and t.shares == 1
        ]
        if handles:
            handle = self.rng.choice(handles)
            spec = self.tensors[handle]
            other = TensorKind.ACTIVATION if spec.kind is TensorKind.STATE else TensorKind.STATE
            self.tensors[handle] = replace(spec, kind=other)


SYNCHRONISATION: tuple[Callable[[Draft], None], ...] = (
    Draft.drop_wait,
    Draft.drop_wait,
    Draft.add_wait,
    Draft.change_target,
    Draft.change_barrier,
    Draft.swap_waits,
    Draft.drop_signal,
    Draft.move_signal,
    Draft.merge_barriers,
    Draft.split_barrier,
    Draft.join,
    Draft.swap_neighbours,
    Draft.swap_entries,
    Draft.move_entry,
    Draft.split_queue,
    Draft.merge_queues,
    Draft.other_queues,
)
WORK: tuple[Callable[[Draft], None], ...] = (
    Draft.change_tile,
    Draft.change_source,
    Draft.split_tile,
    Draft.drop_instruction,
    Draft.change_tensor,
    Draft.change_row_count,
    Draft.flip_tagged,
    Draft.flip_tagged,
    Draft.flip_kind,
)


RANKS: tuple[Callable[[Draft], None], ...] = (
    Draft.move_boundary,
    Draft.move_boundary,
    Draft.exchange_barriers,
    Draft.count_one_rank,
    Draft.flip_shares,
    Draft.change_only,
)


def mutate(program: Program, rng: random.Random) -> Program | None:
    """The program with one change, seldom with more; None if no Program can be built from it."""
    draft = Draft(program, rng)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        kinds = SYNCHRONISATION if rng.random() < 0.65 else WORK
        if program.ranks > 1 and rng.random() < 0.25:
            kinds = RANKS
        rng.choice(kinds)(draft)
    try:
        return draft.program()
    except ValueError:
        return None
