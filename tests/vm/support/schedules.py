"""An interpreter of abstract instructions that runs a program under any schedule."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from modelled_operations import overlap

from megavm.vm.config import HEADER_WORDS
from megavm.vm.program import Program
from megavm.vm.tensors import Region, TensorKind, TensorSpec
from megavm.vm.verify import Access


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

    def _wait(self, index: int, step: int, earlier: bool = False) -> Generator[bool | None]:
        for barrier, target in self.program.code[index].waits:
            needed = step * self.program.signals[barrier] + (0 if earlier else target)
            while self.counters[barrier] < needed:
                yield False
        yield True

    def _read_ahead(self, index: int, step: int, k: int) -> Generator[bool | None]:
        """Read earlier rows as soon as the signals of earlier steps have come that its waits count,
        whatever else the worker does."""
        yield from self._wait(index, step, earlier=True)
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


def hangs(program: Program) -> bool:
    try:
        Interpreter(program).run(1, None, workers=1)
    except Hang:
        return True
    return False
