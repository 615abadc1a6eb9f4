"""The sequential meaning of a program: what every read and write finds when instructions run one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from places import Ints, Places, live_part, numbers, share_of, whole_words

from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.program import Program
from megavm.vm.tensors import Region, TensorKind, TensorSpec

Mask = npt.NDArray[np.bool_]
UNWRITTEN = -1


class Action(IntEnum):
    """What others see of an instruction.

    Some actions have parts, which others see one by one: every tagged piece is a part of WORD. The part of
    the own rank of WRITE or SIGNAL is number 0, and the part of rank (own + k) % ranks is number k.
    """

    EARLY = 0  # reads of rows that earlier steps wrote
    READ = 1  # plain reads
    POLL = 2  # waiting for tagged words, and reading them
    WRITE = 3  # plain writes
    AGAIN = 4  # reading tagged words once more, in instructions that read late
    SIGNAL = 5
    WORD = 6


def part(action: Action, k: int) -> int:
    """The number of the k-th part of an action; that of part 0 is the action's own."""
    return action + k * len(Action)


def action_of(number: int) -> Action:
    """The action that a part belongs to."""
    return Action(number % len(Action))


@dataclass(frozen=True)
class Finding:
    """What is wrong with a program: "hang", "race" or "unwritten", and an execution that shows it."""

    kind: str
    sentence: str
    schedule: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.kind}: {self.sentence}", *self.schedule])


@dataclass
class Execution:
    """One instruction of a rank in one step, and the versions that it must find."""

    index: int
    step: int
    rank: int
    needs: list[tuple[int, int]]  # counters, and what they must have reached
    needs_before: list[tuple[int, int]]  # the same for earlier reads: signals of earlier steps only
    counters: list[int]  # that it adds to, in the order of the parts of SIGNAL
    behind: Execution | None  # the previous execution of its static queue
    ticket: int  # its number in a dynamic queue
    accesses: dict[int, Ints]  # places, by part of an action
    polls: Ints  # tagged words that it waits for; it reads only those of live rows
    number: int = -1  # in the sequential order
    expected: dict[int, Ints] = field(default_factory=dict)
    in_place: bool = False  # it writes plainly what it reads
    tag_order: TagOrder = TagOrder.KEPT

    def __post_init__(self) -> None:
        self.writes = self.parts(Action.WRITE)
        self.words = self.parts(Action.WORD)
        self.signals = [part(Action.SIGNAL, k) for k in range(max(len(self.counters), 1))]

    def parts(self, action: Action) -> list[int]:
        """The parts of an action that accesses places."""
        return [number for number in self.accesses if action_of(number) is action]


Regions = list[list[Region]]  # of every instruction


def writable_regions(
    tensors: Sequence[TensorSpec], instructions: Sequence[Instruction]
) -> tuple[Regions, Regions]:
    """What instructions read and write of tensors that are writable, in whole words where tagged.

    Columns that are written count from the beginning of the share.
    """

    def writable(regions: Iterable[Region]) -> list[Region]:
        return [whole_words(tensors, r) for r in regions if tensors[r.tensor].writable]

    return (
        [writable(inst.reads(tensors)) for inst in instructions],
        [writable(inst.writes(tensors)) for inst in instructions],
    )


class Meaning:
    """What a program does when the instructions of all ranks run one after the other, step by step.

    ``fault`` is what goes wrong even in this order. Without ``queue_order`` the executions of a worker do not
    wait for one another when schedules are tried. ``tag_orders`` are the TagOrders of the instructions, as
    numbers; by default all are KEPT.
    """

    def __init__(
        self,
        program: Program,
        steps: int,
        live: int | None = None,
        queue_order: bool = True,
        tag_orders: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.program = program
        self.tag_orders = [TagOrder.KEPT] * len(program)
        if tag_orders is not None:
            self.tag_orders = [TagOrder(number) for number in tag_orders.tolist()]
        self.steps = steps
        self.live = live
        self.dynamic = program.dynamic
        self.fault: Finding | None = None
        self.ranks = range(program.ranks)
        self.reads, self.writes = writable_regions(program.tensors, program.instructions)
        flat = [region for some in self.reads for region in some]
        flat += [
            share_of(program.tensors, region, rank)
            for some in self.writes
            for region in some
            for rank in self.ranks
        ]
        self.places = Places(program.tensors, flat, steps, live, program.ranks)
        self.activations = self._activations()
        queues = [(rank, queue.tolist()) for rank in self.ranks for queue in program.queues]
        self.order: list[Execution] = []
        pending: list[list[Execution]] = []
        for rank, queue in queues:
            made: list[Execution] = []
            for step in range(steps):
                for index in queue:
                    follows = made and queue_order and not self.dynamic
                    behind = made[-1] if follows else None
                    made.append(self._execution(index, step, rank, behind, len(made)))
            pending.append(made)
        self._drop_reads_of_constants(pending)
        self._run(pending, [len(queue) for _, queue in queues])

    def _activations(self) -> Mask:
        mask = np.zeros(self.places.of_rank, np.bool_)
        for handle, grid in self.places.plain.items():
            mixed = handle in self.places.indexed
            if self.program.tensors[handle].kind is TensorKind.ACTIVATION and not mixed:
                mask[grid.base : grid.base + grid.size] = True
        return np.tile(mask, len(self.ranks))

    def counter(self, barrier: int, rank: int) -> int:
        """The counter of a barrier on a rank."""
        return rank * len(self.program.barriers) + barrier

    def _execution(
        self, index: int, step: int, rank: int, behind: Execution | None, ticket: int
    ) -> Execution:
        inst = self.program.instructions[index]
        found, polls = self._read(index, step, rank)
        written, words = self._written(index, step, rank)
        accesses = {int(action): numbers(places) for action, places in found.items()}
        accesses |= {part(Action.WRITE, k): numbers(some) for k, some in enumerate(written)}
        accesses |= {part(Action.WORD, k): word[None] for k, word in enumerate(numbers(words))}
        before = [
            (self.counter(w.barrier, rank), step * int(self.program.signals[w.barrier]))
            for w in inst.waits
        ]
        return Execution(
            index,
            step,
            rank,
            [(counter, n + w.target) for (counter, n), w in zip(before, inst.waits, strict=True)],
            before,
            self._counters(inst.signal, rank),
            behind,
            ticket,
            accesses,
            numbers(polls),
            in_place=bool({*written[0]} & {*found[Action.READ], *found[Action.EARLY]}),
            tag_order=self.tag_orders[index],
        )

    def _read(self, index: int, step: int, rank: int) -> tuple[dict[Action, list[int]], list[int]]:
        """The places that an instruction reads, by action, and the words that it waits for."""
        inst, tensors = self.program.instructions[index], self.program.tensors
        found: dict[Action, list[int]] = {
            a: [] for a in (Action.EARLY, Action.READ, Action.POLL, Action.AGAIN)
        }
        polls: list[int] = []
        for region in self.reads[index]:
            tagged = tensors[region.tensor].tagged
            action = Action.POLL if tagged else Action.READ
            if region.earlier:
                action = Action.EARLY
            if tagged:
                polls += self.places.of(region, step, False, rank)
            live = live_part(inst, region, self.live)
            if live is not None:
                found[action] += self.places.of(live, step, False, rank)
        if self.tag_orders[index] is TagOrder.READS_LATE:
            found[Action.AGAIN] = found[Action.POLL]
        return found, polls

    def _written(self, index: int, step: int, rank: int) -> tuple[list[list[int]], list[int]]:
        """The places that an instruction writes plainly, by part of WRITE, and the words that it tags."""
        inst, tensors = self.program.instructions[index], self.program.tensors
        written: list[list[int]] = [[] for _ in self.ranks]
        words: list[int] = []
        for region in self.writes[index]:
            spec, share = tensors[region.tensor], share_of(tensors, region, rank)
            live = live_part(inst, share, self.live)
            for k in self.ranks if spec.shares > 1 else [0]:
                other = (rank + k) % len(self.ranks)
                if region.only not in (None, other):
                    continue
                if spec.tagged:
                    words += self.places.of(share, step, True, other)
                elif live is not None:
                    written[k] += self.places.of(live, step, True, other)
        return written, words

    def _counters(self, signal: int | None, rank: int) -> list[int]:
        """The counters that a signal of a rank reaches, its own first."""
        if signal is None:
            return []
        reached = self.ranks if signal < self.program.shared_barriers else [0]
        return [self.counter(signal, (rank + k) % len(self.ranks)) for k in reached]

    def _drop_reads_of_constants(self, pending: list[list[Execution]]) -> None:
        """Drop reads of places that no instruction writes: they always find the same version."""
        written = self.activations.copy()
        for execution in (e for made in pending for e in made):
            for number in (*execution.writes, *execution.words):
                written[execution.accesses[number]] = True
        for execution in (e for made in pending for e in made):
            for action in (Action.READ, Action.EARLY):
                places = execution.accesses[action]
                execution.accesses[action] = places[written[places]]

    def _run(self, pending: list[list[Execution]], lengths: list[int]) -> None:
        """Run the executions that can run, step by step, and record the versions that each finds."""
        counters = [0] * (len(self.ranks) * len(self.program.barriers))
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
                        for counter in execution.counters:
                            counters[counter] += 1
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
        for number in (*execution.writes, *execution.words):
            versions[execution.accesses[number]] = execution.number
        for number in execution.words:
            tags[execution.accesses[number]] = execution.step + 1

    def describe(self, execution: Execution) -> str:
        """``instruction 3 (copy) of step 1``, with the rank if there are several"""
        name = self.program.instructions[execution.index].name()
        rank = f" on rank {execution.rank}" if len(self.ranks) > 1 else ""
        return f"instruction {execution.index} ({name}) of step {execution.step}{rank}"

    def version(self, number: int) -> str:
        return "nothing" if number == UNWRITTEN else self.describe(self.order[number])
