"""The sequential meaning of a program: what every read and write finds when instructions run one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from places import Ints, Places, live_part, numbers, whole_words

from megavm.vm.isa import TagOrder, TensorKind
from megavm.vm.program import Program

Mask = npt.NDArray[np.bool_]
UNWRITTEN = -1


class Action(IntEnum):
    """A part of an instruction that others see as one action. ``WORD + k`` is its k-th tagged piece."""

    EARLY = 0  # reads of rows that earlier steps wrote
    READ = 1  # plain reads
    POLL = 2  # waiting for tagged words, and reading them
    WRITE = 3  # plain writes
    AGAIN = 4  # reading tagged words once more, in instructions that read late
    SIGNAL = 5
    WORD = 6


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
    """One instruction in one step, and the versions that it must find."""

    index: int
    step: int
    needs: list[tuple[int, int]]
    signal: int | None
    behind: Execution | None  # the previous execution of its static queue
    ticket: int  # its number in a dynamic queue
    accesses: dict[int, Ints]  # by action
    polls: Ints  # tagged words that it waits for; it reads only those of live rows
    number: int = -1  # in the sequential order
    expected: dict[int, Ints] = field(default_factory=dict)
    in_place: bool = False  # it writes plainly what it reads
    tag_order: TagOrder = TagOrder.KEPT


class Meaning:
    """What a program does when instructions run one after the other, step by step.

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
                    follows = made and queue_order and not self.dynamic
                    behind = made[-1] if follows else None
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
        tag_order = self.tag_orders[index]
        if tag_order is TagOrder.READS_LATE:
            found[Action.AGAIN] = found[Action.POLL]
        accesses = {a: numbers(p) for a, p in found.items()}
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
            numbers(polls),
            in_place=bool({*found[Action.WRITE]} & {*found[Action.READ], *found[Action.EARLY]}),
            tag_order=tag_order,
        )

    def _drop_reads_of_constants(self, pending: list[list[Execution]]) -> None:
        """Drop reads of places that no instruction writes: they always find the same version."""
        written = self.activations.copy()
        for execution in (e for made in pending for e in made):
            written[execution.accesses[Action.WRITE]] = True
            written[execution.accesses[Action.WORD]] = True
        for execution in (e for made in pending for e in made):
            for action in (Action.READ, Action.EARLY):
                places = execution.accesses[action]
                execution.accesses[action] = places[written[places]]

    def _run(self, pending: list[list[Execution]], lengths: list[int]) -> None:
        """Run the executions that can run, step by step, and record the versions that each finds."""
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
