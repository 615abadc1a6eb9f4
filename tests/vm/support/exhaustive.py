"""Explores every execution of a tiny program, to check by brute force what withholding.py finds.

Each access of one place by one instruction is an event, and so is the arrival of one tagged word. As long as
every event finds the version of the sequential order, memory depends only on the set of events that have
happened. So a state is a set of events, stored as the bits of an integer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum, auto

from meaning import UNWRITTEN, Action, Execution, Meaning

from megavm.vm.program import Program


class Kind(Enum):
    EARLY = auto()  # a read of what earlier steps wrote
    READ = auto()
    ARRIVE = auto()  # a tagged word carries the tag of the step
    EXAMINE = auto()  # a read of such a word
    WRITE = auto()
    WORD = auto()  # a write of a tagged word
    SIGNAL = auto()  # on the own rank
    REACH = auto()  # the signal reaches another rank


ACCESSES = {
    Kind.EARLY: Action.EARLY,
    Kind.READ: Action.READ,
    Kind.EXAMINE: Action.POLL,
    Kind.WRITE: Action.WRITE,
    Kind.WORD: Action.WORD,
}
NOWHERE = -1


@dataclass(frozen=True)
class Event:
    execution: Execution
    kind: Kind
    place: int
    expected: int  # the version that the event must find
    bit: int


class TooLarge(Exception):
    """The program has more states than the limit."""


class Explorer:
    """The states that a program can be in."""

    def __init__(self, program: Program, steps: int) -> None:
        self.meaning = Meaning(program, steps)
        self.events: list[Event] = []
        self.bits: defaultdict[tuple[int, Kind], int] = defaultdict(int)  # of an execution
        self.arrivals: dict[tuple[int, int], int] = {}  # by execution and place
        self.writes: defaultdict[int, list[Event]] = defaultdict(list)  # of a place, in order
        self.signals: defaultdict[int, list[int]] = defaultdict(list)  # by counter
        for execution in self.meaning.order:
            for kind, action in ACCESSES.items():
                for part in execution.parts(action):
                    expected = execution.expected[part]
                    for place, version in zip(execution.accesses[part], expected, strict=True):
                        self._add(execution, kind, int(place), int(version))
            for place in execution.polls:
                self._add(execution, Kind.ARRIVE, int(place), UNWRITTEN)
            self._add(execution, Kind.SIGNAL, NOWHERE, UNWRITTEN)
            for counter in execution.counters[1:]:
                self._add(execution, Kind.REACH, NOWHERE, UNWRITTEN)
                self.signals[counter].append(self.events[-1].bit)

    def _add(self, execution: Execution, kind: Kind, place: int, expected: int) -> None:
        event = Event(execution, kind, place, expected, 1 << len(self.events))
        self.events.append(event)
        self.bits[execution.number, kind] |= event.bit
        if kind is Kind.ARRIVE:
            self.arrivals[execution.number, place] = event.bit
        elif kind in (Kind.WRITE, Kind.WORD):
            self.writes[place].append(event)
        elif kind is Kind.SIGNAL and execution.counters:
            self.signals[execution.counters[0]].append(event.bit)

    def is_good(self, limit: int) -> bool:
        """Whether no execution hangs, and all find the sequential versions only.

        Raises TooLarge when there are more than ``limit`` states.
        """
        if self.meaning.fault is not None:
            return False
        end = (1 << len(self.events)) - 1
        known, waiting = {0}, [0]
        while waiting:
            state = waiting.pop()
            possible = [e for e in self.events if not state & e.bit and self._can(state, e)]
            if not possible and state != end:
                return False
            for event in possible:
                checked = event.kind not in (Kind.ARRIVE, Kind.SIGNAL, Kind.REACH)
                if checked and self._version(state, event.place) != event.expected:
                    return False
                after = state | event.bit
                if after not in known:
                    known.add(after)
                    waiting.append(after)
            if len(known) > limit:
                raise TooLarge
        return True

    def _version(self, state: int, place: int) -> int:
        done = (e.execution.number for e in self.writes[place] if state & e.bit)
        return max(done, default=UNWRITTEN)

    def _done(self, state: int, execution: Execution, *kinds: Kind) -> bool:
        return all(not self.bits[execution.number, kind] & ~state for kind in kinds)

    def _can(self, state: int, event: Event) -> bool:
        """The rules of withholding.py, for one event."""
        execution = event.execution
        early = event.kind is Kind.EARLY
        if any(
            sum(bool(state & bit) for bit in self.signals[counter]) < count
            for counter, count in (execution.needs_before if early else execution.needs)
        ):
            return False
        if early:
            return True
        behind = execution.behind
        if behind is not None and not self._done(state, behind, Kind.SIGNAL):
            return False
        if event.kind is Kind.ARRIVE:
            writer = self._version(state, event.place)
            return writer != UNWRITTEN and self.meaning.order[writer].step == execution.step
        if event.kind is Kind.EXAMINE:
            return bool(state & self.arrivals[execution.number, event.place])
        plain = self._done(state, execution, Kind.EARLY, Kind.READ)
        awaited = self._done(state, execution, Kind.ARRIVE)
        examined = self._done(state, execution, Kind.EXAMINE)
        if event.kind is Kind.WRITE:
            return awaited and (plain or not execution.in_place)
        if event.kind is Kind.WORD:
            return plain and awaited and examined
        if event.kind in (Kind.SIGNAL, Kind.REACH):
            written = self._done(state, execution, Kind.WRITE, Kind.WORD)
            return plain and awaited and examined and written
        return True
