"""Judges programs by running them while single actions are withheld as long as possible.

The verifier promises of a program that it accepts: no order of execution hangs, races, or gives other values
than the sequential meaning. This simulator knows nothing of its proof. It knows what machines may do:

1. A worker runs its queue once per step, in order; an instruction begins when the one before has signalled.
   Entries of a dynamic queue are drawn in order, by any number of workers.
2. An instruction first waits for its header. Its plain reads may be made at any time from then on. It waits
   until all tagged words that it declares to read carry the tag of the step. Then its plain writes may become
   visible, at any time. Its tagged words may as soon as all that it reads has been read, plain writes or not.
   It signals when all is visible.
3. *Earlier* reads may be made as soon as the header is satisfied, whatever the worker still runs.
4. Rows at or past the count of ``row_count`` are dead: neither read nor written, but tagged words of dead rows
   are awaited, and get their tags, as all others do.

What an instruction does falls into *actions* (``Action``). No other instruction waits for one of its plain
reads, or for one of its plain writes, but only for tagged words and the signal. So to withhold all of its plain
reads delays no more than to withhold one of them, and they are one action; its tagged words are one each.

A *schedule* withholds some actions, lets everything else go on until nothing can, releases them, and so on.
One schedule for every action of the first steps finds every conflict of two accesses: if any execution makes
the second of them before the first, then so does the one that withholds the first alone, as whatever can happen
without it does. More schedules withhold random sets. All of them run side by side: arrays have a column for each.

Memory holds *versions*, not values: the number of the execution that wrote a place last. Every read and every
write must find the version that it finds when instructions run one after the other.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from megavm.vm.config import NONE
from megavm.vm.isa import Instruction, Region, TensorKind, TensorSpec
from megavm.vm.program import Program

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
STEPS = 4
HELD_STEPS = 2  # actions of the first steps are withheld; the others show what goes by
UNWRITTEN = -1
ANY_NUMBER = 1 << 30  # of workers: every entry of a dynamic queue is drawn at once


class Action(IntEnum):
    """What an instruction does at once, as far as others can tell. ``WORD + k`` is its k-th tagged piece."""

    EARLY = 0  # reads of rows that earlier steps wrote
    READ = 1  # plain reads
    POLL = 2  # waiting for tagged words, and reading them
    WRITE = 3  # plain writes
    SIGNAL = 4
    WORD = 5


@dataclass(frozen=True)
class Finding:
    """What is wrong with a program: "hang", "race" or "unwritten", and an execution that shows it."""

    kind: str
    sentence: str
    schedule: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.kind}: {self.sentence}", *self.schedule])


# ---- Places: what instructions access.


class Grid:
    """The pieces into which the ends of regions cut a tensor, numbered from ``base``."""

    def __init__(self, base: int, rows: set[int], columns: set[int]) -> None:
        self.base = base
        self.rows, self.columns = sorted(rows), sorted(columns)
        self.width = len(self.columns) - 1
        self.size = (len(self.rows) - 1) * self.width

    def places(self, rows: tuple[int, int], columns: tuple[int, int]) -> list[int]:
        """The pieces of a rectangle whose sides are among the cuts."""
        top, bottom = (bisect_left(self.rows, r) for r in rows)
        left, right = (bisect_left(self.columns, c) for c in columns)
        first = self.base
        return [first + r * self.width + c for r in range(top, bottom) for c in range(left, right)]

    def columns_of(self, offset: int) -> tuple[int, int]:
        column = offset % self.width
        return self.columns[column], self.columns[column + 1]

    def describe(self, place: int) -> str:
        row = (place - self.base) // self.width
        rows, columns = self.rows[row : row + 2], self.columns_of(place - self.base)
        return f"rows [{rows[0]}, {rows[1]}) columns [{columns[0]}, {columns[1]})"


class Places:
    """Numbers for all places that instructions access.

    An indexed row may be any row of its tensor. So where a tensor is accessed both ways, every access that is not
    indexed also touches all indexed rows. What earlier reads mean are places of their own: one for every indexed
    row and step that writes it, and for what was there before the launch.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], regions: Sequence[Region], steps: int, cut: int | None
    ) -> None:
        self.tensors = tensors
        self.steps = steps
        self.count = 0
        self.plain: dict[int, Grid] = {}
        self.indexed: dict[int, Grid] = {}
        self.history: dict[int, int] = {}
        for handle in sorted({r.tensor for r in regions}):
            for indexed, grids in ((False, self.plain), (True, self.indexed)):
                mine = [r for r in regions if (r.tensor, r.indexed) == (handle, indexed)]
                if mine:
                    rows = {end for r in mine for end in r.rows}
                    if cut is not None and min(rows) < cut < max(rows):
                        rows.add(cut)
                    columns = {end for r in mine for end in r.columns}
                    if not indexed and handle in self.indexed:
                        columns |= set(self.indexed[handle].columns)
                    grids[handle] = Grid(self.count, rows, columns)
                    self.count += grids[handle].size
            if any(r.earlier for r in regions if r.tensor == handle):
                self.history[handle] = self.count
                self.count += (steps + 1) * self.indexed[handle].size

    def of(self, region: Region, step: int, write: bool) -> list[int]:
        """The places that an instruction accesses in a step."""
        handle = region.tensor
        if not region.indexed:
            places = self.plain[handle].places(region.rows, region.columns)
            if handle in self.indexed:
                places += self._indexed_under(region)
            return places
        grid = self.indexed[handle]
        now = grid.places(region.rows, region.columns)
        if region.earlier:
            return [p for s in range(-1, step) for p in self._written_in(s, now, handle)]
        if write and handle in self.history:
            return now + self._written_in(step, now, handle)
        return now

    def _written_in(self, step: int, places: Sequence[int], handle: int) -> list[int]:
        """The places that the indexed rows of a step are to later ones."""
        grid = self.indexed[handle]
        return [p - grid.base + self.history[handle] + (step + 1) * grid.size for p in places]

    def _indexed_under(self, region: Region) -> list[int]:
        """All indexed rows, of now and before, that a region that is not indexed may hit."""
        handle, grid = region.tensor, self.indexed[region.tensor]
        four_dimensions = len(self.tensors[handle].shape) == 4
        now = [
            grid.base + offset
            for offset in range(grid.size)
            if four_dimensions or overlap(grid.columns_of(offset), region.columns)
        ]
        if handle not in self.history:
            return now
        steps = range(-1, self.steps)
        return now + [p for s in steps for p in self._written_in(s, now, handle)]

    def describe(self, place: int) -> str:
        """``rows [0, 1) columns [0, 8) of x``"""
        for kind, grids in (("", self.plain), ("indexed ", self.indexed)):
            for handle, grid in grids.items():
                if grid.base <= place < grid.base + grid.size:
                    return f"{kind}{grid.describe(place)} of {self.tensors[handle].name}"
        for handle, base in self.history.items():
            grid = self.indexed[handle]
            step, offset = divmod(place - base, grid.size)
            if 0 <= step <= self.steps:
                where = grid.describe(grid.base + offset)
                return f"indexed {where} of {self.tensors[handle].name} of step {step - 1}"
        raise KeyError(place)


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def whole_words(tensors: Sequence[TensorSpec], region: Region) -> Region:
    """The region, or of a tagged tensor the words that it touches."""
    spec = tensors[region.tensor]
    if not spec.tagged:
        return region
    per_word = 4 // spec.dtype.size
    begin, end = region.columns
    columns = begin // per_word * per_word, -(-end // per_word) * per_word
    return Region(region.tensor, region.rows, columns)


def live_part(inst: Instruction, region: Region, live: int | None) -> Region | None:
    """The live rows of a region, if ``live`` rows of those that the instruction counts are."""
    row_count = vars(inst).get("row_count", NONE)
    mine = (vars(inst).get("row_begin"), vars(inst).get("row_end"))
    if live is None or row_count == NONE or region.rows != mine:
        return region
    begin, end = region.rows[0], min(region.rows[1], live)
    if begin >= end:
        return None
    return Region(region.tensor, (begin, end), region.columns, region.indexed, region.earlier)


# ---- The sequential meaning.


@dataclass
class Execution:
    """One instruction in one step, and the versions that it must find."""

    index: int
    step: int
    needs: list[tuple[int, int]]
    signal: int | None
    behind: Execution | None  # the one before it in a static queue
    ticket: int  # in a dynamic queue
    accesses: dict[int, Ints]  # by action
    polls: Ints  # tagged words that it waits for; of those it reads the live ones
    number: int = -1  # in the sequential order
    expected: dict[int, Ints] = field(default_factory=dict)
    in_place: bool = False  # it writes plainly what it reads


class Meaning:
    """What a program does when instructions run one after the other, step by step.

    ``fault`` is what goes wrong even then.
    """

    def __init__(self, program: Program, steps: int = STEPS, live: int | None = None) -> None:
        self.program = program
        self.steps = steps
        self.live = live
        self.dynamic = program.dynamic
        self.fault: Finding | None = None
        tensors = program.tensors
        self.regions = [
            [
                (whole_words(tensors, region), write)
                for regions, write in ((inst.reads(tensors), False), (inst.writes(tensors), True))
                for region in regions
                if tensors[region.tensor].writable
            ]
            for inst in program.instructions
        ]
        flat = [region for some in self.regions for region, _ in some]
        self.places = Places(tensors, flat, steps, live)
        self.activations = self._activations()
        queues = [[int(i) for i in queue] for queue in program.queues]
        self.order: list[Execution] = []
        pending: list[list[Execution]] = []
        for queue in queues:
            made: list[Execution] = []
            for step in range(steps):
                for index in queue:
                    behind = made[-1] if made and not self.dynamic else None
                    made.append(self._execution(index, step, behind, len(made)))
            pending.append(made)
        self._drop_reads_of_constants(pending)
        self._run(pending, [len(queue) for queue in queues])

    def _activations(self) -> Mask:
        mask = np.zeros(self.places.count, np.bool_)
        for handle, grid in self.places.plain.items():
            mixed = handle in self.places.indexed
            if self.program.tensors[handle].kind is TensorKind.ACTIVATION and not mixed:
                mask[grid.base : grid.base + grid.size] = True
        return mask

    def _execution(self, index: int, step: int, behind: Execution | None, ticket: int) -> Execution:
        inst, tensors = self.program.instructions[index], self.program.tensors
        found: dict[int, list[int]] = {a: [] for a in Action}
        polls: list[int] = []
        for region, write in self.regions[index]:
            if tensors[region.tensor].tagged:
                places = self.places.of(region, step, write)
                if write:
                    found[Action.WORD] += places
                    continue
                polls += places
            action = Action.WRITE if write else Action.READ
            if region.earlier:
                action = Action.EARLY
            elif tensors[region.tensor].tagged:
                action = Action.POLL
            part = live_part(inst, region, self.live)
            if part is not None:
                found[action] += self.places.of(part, step, write)
        accesses = {a: np.unique(np.array(p, np.int32)) for a, p in found.items()}
        return Execution(
            index,
            step,
            [
                (w.barrier, step * int(self.program.signals[w.barrier]) + w.target)
                for w in inst.waits
            ],
            inst.signal,
            behind,
            ticket,
            accesses,
            np.unique(np.array(polls, np.int32)),
            in_place=bool({*found[Action.WRITE]} & {*found[Action.READ], *found[Action.EARLY]}),
        )

    def _drop_reads_of_constants(self, pending: list[list[Execution]]) -> None:
        """Reads of places that nothing writes always find the same."""
        written = self.activations.copy()
        for execution in (e for made in pending for e in made):
            written[execution.accesses[Action.WRITE]] = True
            written[execution.accesses[Action.WORD]] = True
        for execution in (e for made in pending for e in made):
            for action in (Action.READ, Action.EARLY):
                places = execution.accesses[action]
                execution.accesses[action] = places[written[places]]

    def _run(self, pending: list[list[Execution]], lengths: list[int]) -> None:
        """Run what can run, step by step, and note what every execution finds."""
        counters = [0] * len(self.program.barriers)
        versions = np.full(self.places.count, UNWRITTEN, np.int32)
        tags = np.zeros(self.places.count, np.int32)
        at = [0] * len(pending)
        for step in range(self.steps):
            moved = True
            while moved:
                moved = False
                for queue, made in enumerate(pending):
                    while at[queue] < (step + 1) * lengths[queue]:
                        execution = made[at[queue]]
                        if any(counters[b] < n for b, n in execution.needs):
                            break
                        if (tags[execution.polls] != step + 1).any():
                            break
                        self._execute(execution, versions, tags)
                        if execution.signal is not None:
                            counters[execution.signal] += 1
                        at[queue] += 1
                        moved = True
            stuck = [q for q, n in enumerate(lengths) if at[q] < (step + 1) * n]
            if stuck:
                blocked = "; ".join(self.describe(pending[q][at[q]]) for q in stuck)
                sentence = f"one after the other, nothing can run but what waits: {blocked}"
                self.fault = self.fault or Finding("hang", sentence)
                return

    def _execute(self, execution: Execution, versions: Ints, tags: Ints) -> None:
        execution.number = len(self.order)
        self.order.append(execution)
        execution.expected = {a: versions[p] for a, p in execution.accesses.items()}
        reads = execution.accesses[Action.READ]
        unwritten = reads[(versions[reads] == UNWRITTEN) & self.activations[reads]]
        if unwritten.size and self.live is None and self.fault is None:
            where = self.places.describe(int(unwritten[0]))
            sentence = f"{self.describe(execution)} reads {where} before anything is written there"
            self.fault = Finding("unwritten", sentence)
        for action in (Action.WRITE, Action.WORD):
            versions[execution.accesses[action]] = execution.number
        tags[execution.accesses[Action.WORD]] = execution.step + 1

    def describe(self, execution: Execution) -> str:
        """``instruction 3 (copy) of step 1``"""
        name = self.program.instructions[execution.index].name()
        return f"instruction {execution.index} ({name}) of step {execution.step}"

    def version(self, number: int) -> str:
        return "nothing" if number == UNWRITTEN else self.describe(self.order[number])


# ---- Schedules.

Held = Mapping[tuple[int, int], Mask]  # by number of the execution and action: in which columns


class Found(Exception):
    """A read or write found another version than it should have."""

    def __init__(
        self, column: int, execution: Execution, action: int, place: int, got: int
    ) -> None:
        super().__init__()
        self.column, self.execution, self.action = column, execution, action
        self.place, self.got = place, got


class Schedules:
    """Runs a program under many schedules, one in every column of the arrays."""

    def __init__(self, meaning: Meaning, workers: Ints, log: list[str] | None = None) -> None:
        self.meaning = meaning
        self.workers = workers
        self.log = log
        self.columns = columns = len(workers)
        self.counters = np.zeros((len(meaning.program.barriers), columns), np.int32)
        self.versions = np.full((meaning.places.count, columns), UNWRITTEN, np.int32)
        self.tags = np.zeros((meaning.places.count, columns), np.int32)
        self.num_ended = np.zeros(columns, np.int32)
        self.everywhere, self.nowhere = np.ones(columns, np.bool_), np.zeros(columns, np.bool_)
        self.done = [self._not_begun(e) for e in meaning.order]
        self.ready = [self.nowhere if e.needs else self.everywhere for e in meaning.order]

    def _not_begun(self, execution: Execution) -> dict[int, Mask]:
        """Which actions are done, by column; of actions that an instruction does not have, all."""
        done = {
            a: np.zeros(self.columns, np.bool_) if execution.accesses[a].size else self.everywhere
            for a in (Action.EARLY, Action.READ, Action.WRITE)
        }
        done[Action.POLL] = self.nowhere if execution.polls.size else self.everywhere
        done[Action.SIGNAL] = self.nowhere
        return done | {Action.WORD + k: self.nowhere for k in range(execution.accesses[5].size)}

    def run(self, phases: Sequence[Held]) -> Mask:
        """Run until nothing can happen, with one set of actions withheld after the other.

        Returns the columns that come to their end. Raises Found.
        """
        rest = list(range(len(self.done)))
        for number, held in enumerate((*phases, {})):
            if self.log is not None and number:
                self.log.append("(released)")
            moved = True
            while moved:
                moved = False
                for n in rest:
                    moved |= self._advance(self.meaning.order[n], held)
                rest = [n for n in rest if not self.done[n][Action.SIGNAL].all()]
        ended: Mask = self.num_ended == len(self.done)
        return ended

    def _advance(self, execution: Execution, held: Held) -> bool:
        """Do what an execution can do, in every column. Whether anything was done."""
        number, done = execution.number, self.done[execution.number]
        if not (ready := self.ready[number]).all():
            for barrier, count in execution.needs:
                reached = self.counters[barrier] >= count
                ready = reached if ready is self.ready[number] else ready & reached
            self.ready[number] = ready
        moved = self._act(execution, Action.EARLY, ready, held)
        if execution.behind is not None:
            begun = ready & self.done[execution.behind.number][Action.SIGNAL]
        elif self.meaning.dynamic:
            begun = ready & (execution.ticket < self.workers + self.num_ended)
        else:
            begun = ready
        begun = begun & ~done[Action.SIGNAL]
        if not begun.any():
            return moved
        moved |= self._act(execution, Action.READ, begun, held)
        if not done[Action.POLL].all():
            there = (self.tags[execution.polls] == execution.step + 1).all(axis=0)
            moved |= self._act(execution, Action.POLL, begun & there, held)
        begun = begun & done[Action.POLL]
        complete = begun & done[Action.READ] & done[Action.EARLY]
        moved |= self._act(execution, Action.WRITE, complete if execution.in_place else begun, held)
        ending = complete & done[Action.WRITE]
        for k in range(execution.accesses[Action.WORD].size):
            moved |= self._act(execution, Action.WORD + k, complete, held)
            ending = ending & done[Action.WORD + k]
        return moved | self._act(execution, Action.SIGNAL, ending, held)

    def _act(self, execution: Execution, action: int, can: Mask, held: Held) -> bool:
        """Do one action in the columns where it can be done and is neither done nor withheld."""
        done = self.done[execution.number]
        can = can & ~done[action]
        if not can.any():
            return False
        if (mask := held.get((execution.number, action))) is not None:
            can &= ~mask
        columns = np.flatnonzero(can)
        if not columns.size:
            return False
        done[action] = done[action] | can
        if action == Action.SIGNAL:
            self.num_ended[columns] += 1
            if execution.signal is not None:
                self.counters[execution.signal, columns] += 1
        else:
            self._access(execution, action, columns)
        if self.log is not None:
            self.log.append(self._event(execution, action))
        return True

    def _access(self, execution: Execution, action: int, columns: npt.NDArray[np.intp]) -> None:
        word = action >= Action.WORD
        places, expected = (
            by_action[min(action, Action.WORD)]
            for by_action in (execution.accesses, execution.expected)
        )
        if word:
            k = action - Action.WORD
            places, expected = places[k : k + 1], expected[k : k + 1]
        at = np.ix_(places, columns)
        found = self.versions[at]
        wrong = found != expected[:, None]
        if wrong.any():
            place, column = (int(i) for i in np.argwhere(wrong)[0])
            got = int(found[place, column])
            raise Found(int(columns[column]), execution, action, int(places[place]), got)
        if word or action == Action.WRITE:
            self.versions[at] = execution.number
        if word:
            self.tags[at] = execution.step + 1

    def _event(self, execution: Execution, action: int) -> str:
        text = self.meaning.describe(execution)
        if action == Action.SIGNAL:
            return f"{text} signals" if execution.signal is not None else f"{text} ends"
        verbs = {0: "reads earlier", 1: "reads", 2: "has its tagged words:", 3: "writes"}
        places = execution.accesses[min(action, Action.WORD)]
        if action >= Action.WORD:
            places = places[action - Action.WORD :][:1]
        where = ", ".join(self.meaning.places.describe(int(p)) for p in places)
        return f"{text} {verbs.get(action, 'writes tagged')} {where}"


def each_action(order: Sequence[Execution], steps: int) -> Iterator[tuple[int, int]]:
    """The actions, but for signals, of the first steps."""
    for execution in order:
        if execution.step < steps:
            for action in (Action.EARLY, Action.READ, Action.WRITE):
                if execution.accesses[action].size:
                    yield execution.number, action
            if execution.polls.size:
                yield execution.number, Action.POLL
            for k in range(execution.accesses[Action.WORD].size):
                yield execution.number, Action.WORD + k


def judge(
    program: Program,
    *,
    live: int | None = None,
    steps: int = STEPS,
    seed: int = 0,
    random_schedules: int = 32,
) -> Finding | None:
    """What is wrong with a program of valid form, of whose rows ``live`` are live (None: all)."""
    meaning = Meaning(program, steps, live)
    if meaning.fault is not None:
        return meaning.fault
    rng = random.Random(seed)
    actions = list(each_action(meaning.order, HELD_STEPS))
    columns = len(actions) + random_schedules
    phases: list[dict[tuple[int, int], Mask]] = [
        defaultdict(lambda: np.zeros(columns, np.bool_)) for _ in range(2)
    ]
    for column, action in enumerate(actions):
        phases[0][action][column] = True
    every = [
        *each_action(meaning.order, steps),
        *((e.number, Action.SIGNAL) for e in meaning.order),
    ]
    workers = np.full(columns, ANY_NUMBER, np.int32)
    for column in range(len(actions), columns):
        for held in phases:
            share = rng.choice((0.01, 0.05, 0.2, 0.5))
            for action in rng.sample(every, round(share * len(every))):
                held[action][column] = True
        if rng.random() < 0.5:
            workers[column] = rng.randint(1, 1 + len(program))
    schedules = Schedules(meaning, workers)
    try:
        hangs = ~schedules.run(phases)
    except Found as found:
        return replay(meaning, phases, workers, found.column)
    if hangs.any():
        return replay(meaning, phases, workers, int(np.flatnonzero(hangs)[0]))
    return None


def replay(meaning: Meaning, phases: Sequence[Held], workers: Ints, column: int) -> Finding:
    """Run the schedule of one column again and tell what happens."""
    alone = [
        {action: mask[[column]] for action, mask in held.items() if mask[column]} for held in phases
    ]
    log: list[str] = []
    schedules = Schedules(meaning, workers[[column]], log)
    try:
        schedules.run(alone)
    except Found as found:
        wanted = found.execution.expected[min(found.action, Action.WORD)]
        places = found.execution.accesses[min(found.action, Action.WORD)]
        expected = int(wanted[places == found.place][0])
        verb = "writes" if found.action >= Action.WRITE else "reads"
        sentence = (
            f"{meaning.describe(found.execution)} {verb} {meaning.places.describe(found.place)} "
            f"after {meaning.version(found.got)}, expected {meaning.version(expected)}"
        )
        return Finding("race", sentence, tuple(log))
    blocked = [
        meaning.describe(e)
        for e in meaning.order
        if not schedules.done[e.number][Action.SIGNAL].all()
    ]
    return Finding("hang", f"these never end: {', '.join(blocked[:8])}", tuple(log))


def judge_all(program: Program, *, steps: int = STEPS, seed: int = 0) -> Finding | None:
    """``judge`` with all rows live, and if instructions count rows, with some, one and none."""
    counting = [i for i in program.instructions if vars(i).get("row_count", NONE) != NONE]
    most = max((int(vars(i).get("row_end", 1)) for i in counting), default=0)
    for live in (None, *sorted({0, 1, most // 2, most - 1} - {-1}) * bool(counting)):
        finding = judge(program, live=live, steps=steps, seed=seed)
        if finding is not None:
            return finding
    return None
