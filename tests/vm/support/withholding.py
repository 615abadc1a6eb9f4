"""Judges programs by running them while single actions are withheld as long as possible.

The verifier promises that no order of execution of an accepted program hangs, races, or gives other values
than the sequential meaning. This simulator does not know the verifier's proof. It knows what machines may do:

1. A worker runs its queue once per step, in order; an instruction begins when the one before has signalled.
   Entries of a dynamic queue are drawn in order, by any number of workers.
2. An instruction first waits for its header. From then on it may make its plain reads at any time. It waits
   until all tagged words that it declares to read carry the tag of the step. After that, its plain writes may
   become visible at any time. Its tagged words may become visible as soon as it has read all its inputs, even
   before its plain writes. It signals when all its writes are visible.
3. An instruction may make its *earlier* reads as soon as all signals of earlier steps to the barriers of its
   header have come, even while its worker still runs other instructions. An instruction whose ``tag_order`` is READS_LATE makes its tagged words
   visible before it has read everything, and reads tagged words once more until it signals. One whose order
   is WRITES_EARLY has no tagged results, and makes plain writes visible before its tagged words arrive.
4. An instruction that writes plainly where it also reads, as Sample does, is assumed to read all of that
   first. The simulator does not judge whether kernels do so for two operands that overlap.
5. Rows at or past the count of ``row_count`` are dead: instructions neither read nor write them, but wait for
   and tag the tagged words of dead rows like all others.
6. Every rank runs all queues, on its own tensors and counters. What a rank writes of a tensor with shares
   becomes visible on every rank at another time, and so does every tagged word. When all of that is visible
   on all ranks, the signal of a shared barrier reaches the counter of every rank at another time. The worker
   goes on when the signal has reached its own rank.

An instruction consists of *actions* (``Action``). Other instructions wait only for its tagged words and its
signal, never for a single plain read or plain write. So withholding all of its plain reads delays no more
than withholding one of them: all plain reads are one action, and so are all plain writes on one rank. Every
tagged word on a rank is an action of its own.

A *schedule* withholds some actions, runs everything else until nothing can go on, releases them, and so on.
One schedule for every action of the first steps finds every conflict of two accesses: if any execution makes
the second access before the first, then so does the one that withholds only the first, because everything that
can happen without it happens. More schedules withhold random sets. All schedules run side by side: arrays have
a column for each.

Memory holds *versions*, not values: the number of the execution that wrote a place last. Every read and every
write must find the version that it finds when instructions run one after the other.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from meaning import UNWRITTEN, Action, Execution, Finding, Mask, Meaning, action_of
from places import Ints

from megavm.vm.config import NONE
from megavm.vm.isa import TagOrder
from megavm.vm.program import Program

STEPS = 4
HELD_STEPS = 2  # only actions of the first steps are withheld; later steps may overtake them
ANY_NUMBER = 1 << 30  # so many workers that every entry of a dynamic queue is drawn at once

# (number of the execution, part of an action): columns that withhold it
Held = Mapping[tuple[int, int], Mask]


class Found(Exception):
    """A read or write found another version than it should have."""

    def __init__(
        self, column: int, execution: Execution, number: int, place: int, got: int
    ) -> None:
        super().__init__()
        self.column, self.execution, self.number = column, execution, number
        self.place, self.got = place, got


class Schedules:
    """Runs a program under many schedules, one in every column of the arrays."""

    def __init__(self, meaning: Meaning, workers: Ints, log: list[str] | None = None) -> None:
        self.meaning = meaning
        self.workers = workers
        self.log = log
        self.columns = columns = len(workers)
        counters = len(meaning.ranks) * len(meaning.program.barriers)
        self.counters = np.zeros((counters, columns), np.int32)
        self.versions = np.full((meaning.places.count, columns), UNWRITTEN, np.int32)
        self.tags = np.zeros((meaning.places.count, columns), np.int32)
        self.num_ended = np.zeros((len(meaning.ranks), columns), np.int32)
        self.everywhere, self.nowhere = np.ones(columns, np.bool_), np.zeros(columns, np.bool_)
        self.done = [self._not_begun(e) for e in meaning.order]
        self.ready = [self.nowhere if e.needs else self.everywhere for e in meaning.order]
        self.may_read_early = list(self.ready)

    def _not_begun(self, execution: Execution) -> dict[int, Mask]:
        """Which actions are done, by column. Actions that an instruction does not have count as done."""
        done = {
            number: self.nowhere if places.size else self.everywhere
            for number, places in execution.accesses.items()
        }
        done[Action.POLL] = self.nowhere if execution.polls.size else self.everywhere
        return done | dict.fromkeys(execution.signals, self.nowhere)

    def run(self, phases: Sequence[Held]) -> Mask:
        """Run until nothing can happen, withholding one set of actions after the other.

        Returns the columns in which all executions end. Raises Found.
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
                rest = [n for n in rest if not self._ended(n).all()]
        ended: Mask = self.num_ended.sum(axis=0) == len(self.done)
        return ended

    def _ended(self, number: int) -> Mask:
        """The columns in which an execution has signalled on all ranks."""
        own, *others = self.meaning.order[number].signals
        ended = self.done[number][own]
        for signal in others:
            ended = ended & self.done[number][signal]
        return ended

    def _advance(self, execution: Execution, held: Held) -> bool:
        """Do all that an execution can do, in every column. Returns whether it did anything."""
        number, done = execution.number, self.done[execution.number]
        early = self._satisfied(self.may_read_early, number, execution.needs_before)
        moved = self._act(execution, Action.EARLY, early, held)
        ready = self._satisfied(self.ready, number, execution.needs)
        if execution.behind is not None:
            begun = ready & self.done[execution.behind.number][Action.SIGNAL]
        elif self.meaning.dynamic:
            begun = ready & (execution.ticket < self.workers + self.num_ended[execution.rank])
        else:
            begun = ready
        begun = begun & ~self._ended(number)
        if not begun.any():
            return moved
        moved |= self._act(execution, Action.READ, begun, held)
        if not done[Action.POLL].all():
            there = (self.tags[execution.polls] == execution.step + 1).all(axis=0)
            moved |= self._act(execution, Action.POLL, begun & there, held)
        polled = begun & done[Action.POLL]
        moved |= self._act(execution, Action.AGAIN, polled, held)
        may_write = begun if execution.tag_order is TagOrder.WRITES_EARLY else polled
        if execution.in_place:
            may_write = may_write & done[Action.READ] & done[Action.EARLY]
        for write in execution.writes:
            moved |= self._act(execution, write, may_write, held)
        complete = polled & done[Action.READ] & done[Action.EARLY]
        may_tag = polled if execution.tag_order is TagOrder.READS_LATE else complete
        ending = complete & done[Action.AGAIN]
        for write in execution.writes:
            ending = ending & done[write]
        for word in execution.words:
            moved |= self._act(execution, word, may_tag, held)
            ending = ending & done[word]
        for signal in execution.signals:
            moved |= self._act(execution, signal, ending, held)
        return moved

    def _satisfied(self, known: list[Mask], number: int, needs: Sequence[tuple[int, int]]) -> Mask:
        """The columns in which counters have reached what an execution needs; ``known`` keeps them."""
        if not known[number].all():
            reached = [self.counters[counter] >= count for counter, count in needs]
            known[number] = np.logical_and.reduce(reached)
        return known[number]

    def _act(self, execution: Execution, number: int, can: Mask, held: Held) -> bool:
        """Do one part of an action in the columns where it is possible, not yet done and not withheld.

        Returns whether there are such columns.
        """
        done = self.done[execution.number]
        can = can > done[number]
        if (mask := held.get((execution.number, number))) is not None:
            can &= ~mask
        columns = can.nonzero()[0]
        if not columns.size:
            return False
        done[number] = done[number] | can
        if action_of(number) is Action.SIGNAL:
            self._signal(execution, number, columns)
        else:
            self._access(execution, number, columns)
        if self.log is not None:
            self.log.append(self._event(execution, number))
        return True

    def _signal(self, execution: Execution, number: int, columns: npt.NDArray[np.intp]) -> None:
        if number == Action.SIGNAL:
            self.num_ended[execution.rank, columns] += 1
        if execution.counters:
            self.counters[execution.counters[execution.signals.index(number)], columns] += 1

    def _access(self, execution: Execution, number: int, columns: npt.NDArray[np.intp]) -> None:
        places, expected = execution.accesses[number], execution.expected[number]
        at = places[:, None], columns
        found = self.versions[at]
        wrong = found != expected[:, None]
        if wrong.any():
            place, column = (int(i) for i in np.argwhere(wrong)[0])
            got = int(found[place, column])
            raise Found(int(columns[column]), execution, number, int(places[place]), got)
        action = action_of(number)
        if action in (Action.WRITE, Action.WORD):
            self.versions[at] = execution.number
        if action is Action.WORD:
            self.tags[at] = execution.step + 1

    def _event(self, execution: Execution, number: int) -> str:
        text, action = self.meaning.describe(execution), action_of(number)
        if action is Action.SIGNAL and not execution.counters:
            return f"{text} ends"
        if action is Action.SIGNAL:
            k, ranks = execution.signals.index(number), len(self.meaning.ranks)
            where = f" to rank {(execution.rank + k) % ranks}" if len(execution.signals) > 1 else ""
            return f"{text} signals{where}"
        places = execution.accesses[number]
        where = ", ".join(self.meaning.places.describe(int(p)) for p in places)
        return f"{text} {VERBS[action]} {where}"


VERBS = {
    Action.EARLY: "reads earlier",
    Action.READ: "reads",
    Action.POLL: "has its tagged words:",
    Action.WRITE: "writes",
    Action.AGAIN: "reads again",
    Action.WORD: "writes tagged",
}


def each_action(order: Sequence[Execution], steps: int) -> Iterator[tuple[int, int]]:
    """The actions of the first ``steps`` steps, except signals."""
    for execution in order:
        if execution.step < steps:
            for number in (Action.EARLY, Action.READ, *execution.writes, Action.AGAIN):
                if execution.accesses[number].size:
                    yield execution.number, number
            if execution.polls.size:
                yield execution.number, Action.POLL
            for word in execution.words:
                yield execution.number, word


def judge(
    program: Program,
    *,
    live: int | None = None,
    queue_order: bool = True,
    tag_orders: npt.NDArray[np.int64] | None = None,
    steps: int = STEPS,
    seed: int = 0,
    random_schedules: int = 32,
) -> Finding | None:
    """What is wrong with a program of valid form when ``live`` rows are live (None: all); None: nothing.

    Without ``queue_order`` static queues give no order: a worker begins instructions before others end.
    ``tag_orders``: how instructions order their tagged words; see ``Meaning``.
    """
    meaning = Meaning(program, steps, live, queue_order, tag_orders)
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
        *((e.number, signal) for e in meaning.order for signal in e.signals),
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
    """Run the schedule of one column again and describe what happens."""
    alone = [
        {action: mask[[column]] for action, mask in held.items() if mask[column]} for held in phases
    ]
    log: list[str] = []
    schedules = Schedules(meaning, workers[[column]], log)
    try:
        schedules.run(alone)
    except Found as found:
        wanted = found.execution.expected[found.number]
        places = found.execution.accesses[found.number]
        expected = int(wanted[places == found.place][0])
        writes = action_of(found.number) in (Action.WRITE, Action.WORD)
        verb = "writes" if writes else "reads"
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


def live_counts(program: Program) -> list[int]:
    """Numbers of live rows to try if instructions count them: 0, 1, half of the rows, all but one."""
    counting = [i for i in program.instructions if vars(i).get("row_count", NONE) != NONE]
    most = max((int(vars(i).get("row_end", 1)) for i in counting), default=0)
    return sorted({n for n in (0, 1, most // 2, most - 1) if n < most})


def judge_all(program: Program, *, steps: int = STEPS, seed: int = 0) -> Finding | None:
    """``judge`` with all rows live and, if instructions count them, with the numbers of ``live_counts``."""
    for live in (None, *live_counts(program)):
        finding = judge(program, live=live, steps=steps, seed=seed)
        if finding is not None:
            return finding
    return None
