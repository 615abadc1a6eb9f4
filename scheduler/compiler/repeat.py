"""Repeated sections: compile a few layers, and repeat their instructions for all others.

The layers of a model are the same operations on other weights. If the operations of a step are a
head, n alike *sections* and a tail, ``shorten`` leaves out all but KEPT sections, and ``extend``
puts their instructions back: those of the third section, on the tensors and barriers of each
section that was left out. The cost of lowering and of finding barriers then does not grow with the
number of layers.

``extend`` refuses unless the second and the third section came out alike and wait for nothing
further away than their neighbours: what holds from one section to the next then holds for all. The
verifier checks the whole program, as it does any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.instructions.noop import Noop
from megavm.scheduler.compiler.barriers import Synchronised
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.storage import Storage
from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.operands import FieldKind
from megavm.vm.tensors import TensorKind

KEPT = 4  # sections that are compiled: the first three and the last
_COPIED = 2  # the section whose instructions stand for those left out
# Words of a header (isa.py).
_SIGNAL = 1
_AWAITED = slice(2, HEADER_WORDS, 2)
_TARGETS = slice(3, HEADER_WORDS, 2)
_NAMES = [_SIGNAL, *range(2, HEADER_WORDS, 2)]  # words that name barriers


Words = npt.NDArray[np.uint32]


class Irregular(Exception):
    """Sections that are alike as operations did not become alike instructions."""


@dataclass(frozen=True)
class Repetition:
    """``count`` sections of ``period`` operations each, the first of which begins at ``begin``."""

    begin: int
    period: int
    count: int

    @property
    def left_out(self) -> int:
        """Number of operations that ``shorten`` leaves out."""
        return (self.count - KEPT) * self.period

    def source(self, operation: int) -> int:
        """The number, in the shortened list, of the operation whose instructions it gets."""
        section, place = divmod(operation - self.begin, self.period)
        if section <= _COPIED:
            return operation
        if section < self.count - 1:
            return self.begin + _COPIED * self.period + place
        return operation - self.left_out

    def section(self, operation: int) -> int:
        """The section of an operation of the shortened list; -1 in the head, KEPT in the tail."""
        return max(-1, min((operation - self.begin) // self.period, KEPT))


def find_repetition(operations: Sequence[Operation], storage: Storage) -> Repetition | None:
    """The longest repetition of more than KEPT sections."""
    forms: dict[object, int] = {}
    form = [forms.setdefault(_form(o, storage), len(forms)) for o in operations]
    longest = None
    for period in range(1, len(form) // (KEPT + 1) + 1):
        run = 0
        for i in range(len(form) - period):
            run = run + 1 if form[i] == form[i + period] else 0
            candidate = Repetition(i + 1 - run, period, run // period + 1)
            if candidate.count > KEPT and (
                longest is None or candidate.left_out > longest.left_out
            ):
                longest = candidate
    if longest is None or not _is_consistent(operations, storage, longest):
        return None
    return longest


def shorten(operations: Sequence[Operation], repetition: Repetition) -> list[Operation]:
    """The operations without those left out.

    The tail reads the results of the last section kept, and writes the other rows of them if a
    section ends between two halves of an operation.
    """
    begin, period, left_out = repetition.begin, repetition.period, repetition.left_out
    end = begin + repetition.count * period
    stand_in: dict[Value, Value] = {}
    for i in range(begin + max(KEPT * period, left_out), end):
        mine, theirs = _operands(operations[i]), _operands(operations[i - left_out])
        stand_in.update((value, theirs[name]) for name, value in mine.items())

    def replaced(values: Mapping[str, Value]) -> dict[str, Value]:
        return {name: stand_in.get(value, value) for name, value in values.items()}

    tail = [
        dataclasses.replace(o, inputs=replaced(o.inputs), outputs=replaced(o.outputs))
        for o in operations[end:]
    ]
    return [*operations[: begin + KEPT * period], *tail]


def extend(
    short: Synchronised,
    kept: Sequence[Operation],
    operations: Sequence[Operation],
    storage: Storage,
    repetition: Repetition,
    ranks: int,
) -> Synchronised:
    """The instructions of all ``operations``, from those of ``kept``, which ``shorten`` returned.

    Raises Irregular if what a section waits for or signals depends on its place.
    """
    extension = _Extension(short, kept, operations, storage, repetition)
    extension.check()
    return extension.result(ranks)


def _form(operation: Operation, storage: Storage) -> object:
    """The facts that alike operations share: all but names and the tensors of a layer."""

    def form_of(value: Value) -> object:
        handle = storage.handle(value)
        spec = storage.tensors[handle]
        own = spec.kind is not TensorKind.ACTIVATION or spec.tagged
        parts = tuple(part.rows for part in spec.parts)
        return (
            *(value.rows, value.columns, value.capacity, value.dtype, value.shares),
            *(spec.shape, spec.dtype, spec.kind, spec.tagged, spec.shares, parts),
            None if own else handle,
        )

    return (
        operation.kind,
        tuple((name, form_of(value)) for name, value in operation.inputs.items()),
        tuple((name, form_of(value)) for name, value in operation.outputs.items()),
        tuple(operation.attributes.items()),
        operation.rows,
    )


def _operands(operation: Operation) -> dict[str, Value]:
    return {**operation.inputs, **operation.outputs}


def _is_consistent(
    operations: Sequence[Operation], storage: Storage, repetition: Repetition
) -> bool:
    """Whether each section is the next one with its tensors renamed, two never to one."""
    period = repetition.period
    for section in range(repetition.count - 1):
        begin = repetition.begin + section * period
        renamed: dict[int, int] = {}
        for i in range(begin, begin + period):
            for old, new in _pairs(operations[i], operations[i + period], storage):
                if renamed.setdefault(old, new) != new:
                    return False
        if len(set(renamed.values())) != len(renamed):
            return False
    return True


def _pairs(source: Operation, target: Operation, storage: Storage) -> Iterator[tuple[int, int]]:
    """The tensors of ``source``, each with the one that ``target`` has in its place."""
    theirs = _operands(target)
    for name, value in _operands(source).items():
        yield storage.handle(value), storage.handle(theirs[name])


class _Extension:
    """From the shortened program to the whole one.

    ``source`` and ``kept`` are numbers of operations in the shortened list. Barriers have the
    numbers of the shortened program, until ``_number`` gives them those of the whole.
    """

    def __init__(
        self,
        short: Synchronised,
        kept: Sequence[Operation],
        operations: Sequence[Operation],
        storage: Storage,
        repetition: Repetition,
    ) -> None:
        self.short = short
        self.kept = kept
        self.operations = operations
        self.storage = storage
        self.repetition = repetition
        rows = np.searchsorted(short.operations, np.arange(len(kept) + 1)).tolist()
        self.rows = [slice(begin, end) for begin, end in itertools.pairwise(rows)]
        self.handles = _handle_words(short.words)
        self.named = [self._barriers_of(rows) for rows in self.rows]
        signals = short.words[:, _SIGNAL]
        self.joins = set(signals[short.words[:, 0] == Noop.opcode].tolist())
        # The operations of the first and the last instruction that signal each barrier.
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for operation, signal in zip(short.operations, signals.tolist(), strict=True):
            self.first.setdefault(signal, operation)
            self.last[signal] = operation
        # The barriers of each operation, and the place of each among them.
        self.own: dict[int, list[int]] = defaultdict(list)
        for barrier in range(len(short.barriers)):
            self.own[self._home(barrier)].append(barrier)
        self.place = {b: place for own in self.own.values() for place, b in enumerate(own)}
        self.places: dict[tuple[str, int, int], int] = {}  # numbers of ``_relative``

    def _barriers_of(self, rows: slice) -> list[int]:
        """The barriers that instructions wait for or signal."""
        named = set(self.short.words[rows, _NAMES].ravel().tolist())
        return sorted(named - {NONE})

    def _home(self, barrier: int) -> int:
        """The operation whose instructions signal a barrier; -1 if there are several."""
        first = self.first[barrier]
        return first if first == self.last[barrier] else -1

    def check(self) -> None:
        """Raises Irregular unless the copied section is like the one before."""
        repetition = self.repetition
        begin = repetition.begin + (_COPIED - 1) * repetition.period
        for operation in range(begin, begin + repetition.period):
            if not self._is_alike(operation, operation + repetition.period):
                raise Irregular(f"{self.kept[operation].label} does not repeat")
        for operation, named in enumerate(self.named):
            section = repetition.section(operation)
            # Farther away, operations lie elsewhere in the whole than they do here.
            reach = {-1: _COPIED + 1, KEPT: KEPT - _COPIED}.get(section, 1)
            for barrier in named:
                home = self._home(barrier)
                if self._is_repeated(home) and abs(repetition.section(home) - section) > reach:
                    label, name = self.kept[operation].label, self.short.barriers[barrier]
                    raise Irregular(f"{label} waits for {name}")

    def _is_repeated(self, home: int) -> bool:
        """Whether a barrier of this home has copies in the sections that were left out."""
        return home >= 0 and 0 <= self.repetition.section(home) < KEPT

    def _is_alike(self, operation: int, following: int) -> bool:
        """Whether two operations have the same instructions, but for the section they belong to."""
        mine = self._renamed(operation, self.kept[following])
        theirs = self.short.words[self.rows[following]].copy()
        if mine.shape != theirs.shape:
            return False
        for words, number in ((mine, operation), (theirs, following)):
            words[:, _NAMES] = self._relative(number)
            words[:, _TARGETS] = words[:, _TARGETS] != 0
        return bool((mine == theirs).all())

    def _relative(self, operation: int) -> Words:
        """The barriers that instructions name, as numbers that say how far away they are."""
        known: dict[int, tuple[str, int, int]] = {NONE: ("none", 0, 0)}
        for barrier in self.named[operation]:
            home = self._home(barrier)
            if self._is_repeated(home):
                known[barrier] = ("distance", home - operation, self.place[barrier])
            else:
                known[barrier] = ("place", home, self.place[barrier])
        return _replaced(
            self.short.words[self.rows[operation], _NAMES],
            {
                barrier: self.places.setdefault(key, len(self.places))
                for barrier, key in known.items()
            },
        )

    def _renamed(self, source: int, target: Operation) -> Words:
        """The words of a kept operation on the tensors of ``target``."""
        words = self.short.words[self.rows[source]].copy()
        renamed: dict[int, int] = {}
        for old, new in _pairs(self.kept[source], target, self.storage):
            if renamed.setdefault(old, new) != new:
                raise Irregular(f"{target.label} has different tensors in the same place")
        table = np.arange(len(self.storage.tensors), dtype=np.uint32)
        table[list(renamed)] = list(renamed.values())
        chosen = self.handles[self.rows[source]]
        words[chosen] = table[words[chosen]]
        return words

    def result(self, ranks: int) -> Synchronised:
        """All instructions, with barriers numbered as barriers.py would."""
        sources = [self.repetition.source(i) for i in range(len(self.operations))]
        number, names, shared = self._number(sources)
        parts: list[Words] = []
        labels: list[str] = []
        operations: list[int] = []
        for i, source in enumerate(sources):
            words = self._renamed(source, self.operations[i])
            moved = {NONE: NONE}
            for barrier in self.named[source]:
                home = self._home(barrier)
                if self._is_repeated(home):
                    home += i - source
                else:
                    home = self._at_the_end(home)
                own = self.own[sources[home] if home >= 0 else -1]
                moved[barrier] = number[home, own[self.place[barrier]]]
            words[:, _NAMES] = _replaced(words[:, _NAMES], moved)
            parts.append(words)
            labels += [self.operations[i].label] * len(words)
            operations += [i] * len(words)
        words = np.concatenate(parts)
        signals = words[:, _SIGNAL]
        counts = np.bincount(signals[signals != NONE], minlength=len(names))
        counts[:shared] *= ranks
        # A wait within the step is for all signals of the step (barriers.py).
        awaited, targets = words[:, _AWAITED], words[:, _TARGETS]
        targets[targets != 0] = counts[awaited[targets != 0]]
        return Synchronised(words, labels, operations, names, shared)

    def _at_the_end(self, operation: int) -> int:
        """The number in the whole of a kept operation outside of the copied sections."""
        behind = self.repetition.section(operation) > _COPIED
        return operation + self.repetition.left_out if behind else operation

    def _number(self, sources: Sequence[int]) -> tuple[dict[tuple[int, int], int], list[str], int]:
        """The numbers of the whole's barriers by operation (-1: several) and barrier of its source.

        Also returns their names, and how many of them all ranks share.
        """
        # (which of the three kinds, operation, barrier, home)
        order = [
            (self._kind(barrier), operation, barrier, operation)
            for operation, source in enumerate(sources)
            for barrier in self.own[source]
        ]
        order += [
            (self._kind(barrier), self._at_the_end(self.first[barrier]), barrier, -1)
            for barrier in self.own[-1]
        ]
        number: dict[tuple[int, int], int] = {}
        names: list[str] = []
        for kind, operation, barrier, home in sorted(order):
            number[home, barrier] = len(names)
            last = operation if home >= 0 else self._at_the_end(self.last[barrier])
            what = "join" if kind == 2 else "done"
            names.append(f"{self.operations[last].label}.{what}{len(names)}")
        return number, names, sum(kind == 0 for kind, *_ in order)

    def _kind(self, barrier: int) -> int:
        """First come the barriers that all ranks share, last those that Noops signal."""
        if barrier < self.short.shared_barriers:
            return 0
        return 2 if barrier in self.joins else 1


def _replaced(words: Words, table: Mapping[int, int]) -> Words:
    replaced = [table[word] for word in words.ravel().tolist()]
    return np.array(replaced, np.uint32).reshape(words.shape)


def _handle_words(words: Words) -> npt.NDArray[np.bool_]:
    """Marks the words that are handles of tensors: bool of the shape of ``words``."""
    chosen = np.zeros(words.shape, np.bool_)
    for opcode, cls in instruction_set().items():
        is_handle = np.zeros(words.shape[1], np.bool_)
        for k, field in enumerate(cls.fields):
            is_handle[HEADER_WORDS + k] = field.kind is FieldKind.TENSOR
        chosen[words[:, 0] == opcode] = is_handle
    chosen &= words != NONE
    return chosen
