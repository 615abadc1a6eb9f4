"""Mutations of an encoded program."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from megavm.instructions import instruction_set
from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.program import Program
from megavm.vm.tensors import TensorKind


class Mutant:
    """A program in parts that can be changed."""

    def __init__(self, base: Program, rng: random.Random) -> None:
        self.base = base
        self.rng = rng
        self.words = base.words.copy()
        self.queues = [[int(i) for i in q] for q in base.queues]
        self.tensors = list(base.tensors)
        self.labels = list(base.labels)

    def program(self) -> Program:
        return replace(
            self.base,
            words=self.words,
            queues=tuple(np.array(q, np.int32) for q in self.queues),
            tensors=tuple(self.tensors),
            labels=tuple(self.labels),
        )

    def instruction(self) -> int:
        return self.rng.randrange(len(self.words))

    def signals(self, i: int, word: int) -> int:
        """How often the barrier in a word is signalled."""
        return int((self.words[:, 1] == self.words[i, word]).sum())

    def used_wait(self) -> tuple[int, int] | None:
        """(instruction, word) of a wait."""
        waits = np.argwhere(self.words[:, 2:HEADER_WORDS:2] != NONE)
        if not len(waits):
            return None
        i, k = self.rng.choice(waits.tolist())
        return i, 2 + 2 * k

    def drop_wait(self) -> None:
        if wait := self.used_wait():
            i, word = wait
            header = self.words[i, 2:HEADER_WORDS].tolist()
            del header[word - 2 : word]
            self.words[i, 2:HEADER_WORDS] = [*header, NONE, 0]

    def change_target(self) -> None:
        if wait := self.used_wait():
            i, word = wait
            most = self.signals(i, word)
            self.words[i, word + 1] = self.rng.randint(0, most + (self.rng.random() < 0.1))

    def zero_target(self) -> None:
        if wait := self.used_wait():
            self.words[wait[0], wait[1] + 1] = 0

    def change_barrier(self) -> None:
        if wait := self.used_wait():
            i, word = wait
            barrier = self.rng.randrange(len(self.base.barriers))
            self.words[i, word] = barrier
            full = self.signals(i, word)
            self.words[i, word + 1] = min(int(self.words[i, word + 1]), full)
            if self.rng.random() < 0.5:
                self.words[i, word + 1] = full

    def drop_signal(self) -> None:
        i = self.instruction()
        barrier = int(self.words[i, 1])
        self.words[i, 1] = NONE
        self.lower_targets(barrier)

    def redirect_signal(self) -> None:
        i = self.instruction()
        barrier = int(self.words[i, 1])
        self.words[i, 1] = self.rng.randrange(len(self.base.barriers))
        self.lower_targets(barrier)

    def lower_targets(self, barrier: int) -> None:
        """Half of the time let targets follow a signal that is gone, as a careless compiler would."""
        if self.rng.random() < 0.5:
            for word in range(2, HEADER_WORDS, 2):
                hit = (self.words[:, word] == barrier) & (self.words[:, word + 1] > 0)
                self.words[hit, word + 1] -= 1

    def swap_neighbours(self) -> None:
        queue = self.rng.choice(self.queues)
        if len(queue) > 1:
            i = self.rng.randrange(len(queue) - 1)
            queue[i], queue[i + 1] = queue[i + 1], queue[i]

    def swap_entries(self) -> None:
        one, two = self.rng.choice(self.queues), self.rng.choice(self.queues)
        if one and two:
            i, j = self.rng.randrange(len(one)), self.rng.randrange(len(two))
            one[i], two[j] = two[j], one[i]

    def move_entry(self) -> None:
        source, target = self.rng.choice(self.queues), self.rng.choice(self.queues)
        if source:
            entry = source.pop(self.rng.randrange(len(source)))
            target.insert(self.rng.randint(0, len(target)), entry)

    def fields(self, i: int) -> tuple[Any, ...]:
        cls = instruction_set().get(int(self.words[i, 0]))
        return cls.fields if cls else ()

    def words_of_kind(self, i: int, kind: str) -> list[int]:
        fields = self.fields(i)
        return [HEADER_WORDS + k for k, f in enumerate(fields) if f.kind.value == kind]

    def shift_tile(self) -> None:
        i = self.instruction()
        if words := self.words_of_kind(i, "integer"):
            word = self.rng.choice(words)
            value = int(self.words[i, word]) + self.rng.choice((-2, -1, 1, 2))
            self.words[i, word] = min(max(value, 0), NONE)

    def shift_both_ends(self) -> None:
        i = self.instruction()
        names = [f.name for f in self.fields(i)]
        pairs = [n for n in names if n.endswith("_begin")]
        if pairs:
            begin = HEADER_WORDS + names.index(self.rng.choice(pairs))
            by = self.rng.choice((-2, -1, 1, 2))
            for word in (begin, begin + 1):
                self.words[i, word] = max(int(self.words[i, word]) + by, 0)

    def change_handle(self) -> None:
        i = self.instruction()
        if words := self.words_of_kind(i, "tensor"):
            word = self.rng.choice(words)
            here = self.words[i, word]
            alike = [
                h
                for h, t in enumerate(self.tensors)
                if here != NONE and t.shape == self.tensors[here].shape and h != here
            ]
            choices = (
                alike if alike and self.rng.random() < 0.8 else [*range(len(self.tensors)), NONE]
            )
            self.words[i, word] = self.rng.choice(choices)

    def wild_field(self) -> None:
        i = self.instruction()
        word = self.rng.randrange(32)
        self.words[i, word] = self.rng.choice((0, 1, 2, 100, 1 << 16, 1 << 31, NONE - 1, NONE))

    def duplicate_entry(self) -> None:
        self.rng.choice(self.queues).append(self.instruction())

    def drop_entry(self) -> None:
        queue = self.rng.choice(self.queues)
        if queue:
            queue.pop(self.rng.randrange(len(queue)))

    def duplicate_instruction(self) -> None:
        i = self.instruction()
        self.words = np.concatenate([self.words, self.words[i : i + 1]])
        self.labels.append(self.labels[i])
        queue = self.rng.choice(self.queues)
        queue.insert(self.rng.randint(0, len(queue)), len(self.words) - 1)

    def drop_instruction(self) -> None:
        i = self.instruction()
        barrier = int(self.words[i, 1])
        self.words = np.delete(self.words, i, axis=0)
        del self.labels[i]
        self.queues = [[e - (e > i) for e in q if e != i] for q in self.queues]
        self.lower_targets(barrier)

    def change_opcode(self) -> None:
        self.words[self.instruction(), 0] = self.rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 77))

    def flip_tagged(self) -> None:
        handles = [h for h, t in enumerate(self.tensors) if t.kind is TensorKind.ACTIVATION]
        handle = self.rng.choice(handles)
        spec = self.tensors[handle]
        self.tensors[handle] = replace(spec, tagged=not spec.tagged)


TIMING_ONLY = (
    Mutant.drop_wait,
    Mutant.change_target,
    Mutant.zero_target,
    Mutant.change_barrier,
    Mutant.drop_signal,
    Mutant.redirect_signal,
    Mutant.swap_neighbours,
    Mutant.swap_entries,
    Mutant.move_entry,
)
OTHERS = (
    Mutant.shift_tile,
    Mutant.shift_both_ends,
    Mutant.change_handle,
    Mutant.wild_field,
    Mutant.duplicate_entry,
    Mutant.drop_entry,
    Mutant.duplicate_instruction,
    Mutant.drop_instruction,
    Mutant.change_opcode,
    Mutant.flip_tagged,
)
