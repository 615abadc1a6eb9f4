"""ReferenceMachine: what every instruction means, in torch, one instruction at a time.

It is the living definition of the instruction set: slow, sequential, and checked at every access.
"""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megavm.vm.config import NONE
from megavm.vm.coverage import first_uncovered
from megavm.vm.isa import Instruction
from megavm.vm.machine import Executable, MachineFault, WorkerState, memory_on_cpu, require_ranks
from megavm.vm.memory import Memory, tagged_values
from megavm.vm.program import Program
from megavm.vm.tensors import Region, TensorSpec
from megavm.vm.verify import verify as verify_program

Rows = tuple[int, int]


class View:
    """Memory as one instruction of one step sees it: handles instead of names, accesses checked.

    ``step`` is the number of the step within its launch, ``epoch`` the tag of the step. ``ranks`` are the
    memories of all ranks; the instruction runs on ``rank``. ``reads`` and ``writes``: what it declares. Other
    accesses raise MachineFault: verifier and scheduler know nothing of them. Of indexed tensors, and of those
    taken with ``raw``, only the tensor is compared.
    """

    def __init__(
        self,
        ranks: tuple[Memory, ...],
        rank: int,
        tensors: tuple[TensorSpec, ...],
        step: int,
        epoch: int,
        reads: Sequence[Region],
        writes: Sequence[Region],
    ) -> None:
        self.memory = ranks[rank]
        self.tensors = tensors
        self.step = step
        self.epoch = epoch
        self.rank = rank
        self._ranks = ranks
        self._reads, self._writes = reads, writes

    def _require(self, verb: str, declared: Sequence[Region], access: Region) -> None:
        """Raise MachineFault when an access is not within the declared regions."""
        (top, bottom), (left, right) = access.rows, access.columns
        own = [region for region in declared if region.tensor == access.tensor]
        if any(region.indexed for region in own):
            return
        missing = first_uncovered(own, access.rows, access.columns)
        if missing is not None:
            raise MachineFault(
                f"it {verb} rows [{top}, {bottom}) columns [{left}, {right}) of"
                f" {self.tensors[access.tensor].name}, but does not declare row {missing[0]} column"
                f" {missing[1]}"
            )

    def raw(self, handle: int) -> torch.Tensor:
        """The tensor in its own shape and dtype; writes go to memory (not for tagged tensors)."""
        spec = self.tensors[handle]
        if spec.tagged:
            raise ValueError(f"tensor {spec.name} is tagged: use read and write")
        if all(region.tensor != handle for region in (*self._reads, *self._writes)):
            raise MachineFault(f"it uses {spec.name}, but declares no access to it")
        return self.memory.storage(spec.name)

    def read(self, handle: int, rows: Rows, columns: Rows | None = None) -> torch.Tensor:
        """Values of a rectangle as float32 [rows, columns].

        Raises MachineFault when a tagged word was not written in this step, or the instruction does not
        declare to read the rectangle.
        """
        spec = self.tensors[handle]
        begin, end = columns or (0, spec.columns)
        self._require("reads", self._reads, Region(handle, rows, (begin, end)))
        if not spec.tagged:
            parts, first = [], 0
            for part in self.memory.stored_parts(spec.name):
                inside = slice(max(rows[0] - first, 0), max(rows[1] - first, 0))
                parts.append(part.reshape(len(part), -1)[inside, begin:end])
                first += len(part)
            return torch.cat(parts).float()
        self.check_tags(Region(handle, rows, (begin, end)))
        storage = self.memory.storage(spec.name)
        values = tagged_values(storage, spec.dtype)
        return values[rows[0] : rows[1], begin:end].float()

    def write(
        self,
        handle: int,
        rows: Rows,
        columns: Rows | None,
        values: torch.Tensor,
        only: int | None = None,
    ) -> None:
        """Round ``values`` [rows, columns] to the tensor's type and store them, with the step's tag.

        Columns of a tensor with shares are those of the rank's share; all ranks get the values, or
        ``only`` one. Raises MachineFault when the instruction does not declare to write the rectangle.
        """
        spec = self.tensors[handle]
        begin, end = columns or (0, spec.own_columns)
        self._require("writes", self._writes, Region(handle, rows, (begin, end)))
        begin, end = (self.share_begin(handle) + c for c in (begin, end))
        for memory in self._written(spec, only):
            self._store(memory, spec, rows, (begin, end), values)

    def share_begin(self, handle: int) -> int:
        """The first column of the rank's share of a tensor; 0 if it has no shares."""
        return self.tensors[handle].share_begin(self.rank)

    def _written(self, spec: TensorSpec, only: int | None = None) -> tuple[Memory, ...]:
        """The memories that a write reaches (Region.only)."""
        if only is not None:
            return (self._ranks[only],)
        return self._ranks if spec.shares > 1 else (self.memory,)

    def _store(
        self, memory: Memory, spec: TensorSpec, rows: Rows, columns: Rows, values: torch.Tensor
    ) -> None:
        begin, end = columns
        storage = memory.storage(spec.name)
        if not spec.tagged:
            storage.view(spec.rows, -1)[rows[0] : rows[1], begin:end] = values
            return
        words = storage.view(torch.int32)
        halves = tagged_values(words, spec.dtype)
        halves[rows[0] : rows[1], begin:end] = values
        first, last = (begin * spec.dtype.size) // 4, -(-end * spec.dtype.size // 4)
        words[rows[0] : rows[1], first:last, 0] = halves.view(torch.int32)[
            rows[0] : rows[1], first:last
        ]
        words[rows[0] : rows[1], first:last, 1] = self.epoch

    def check_tags(self, region: Region) -> None:
        """Raise MachineFault when a word of a tagged tensor was not written in this step."""
        if bool((self._tags(self.memory, region) != self.epoch).any()):
            raise MachineFault(
                f"rows {region.rows} columns {region.columns} of tagged tensor "
                f"{self.tensors[region.tensor].name} are read before they are written in epoch "
                f"{self.epoch}"
            )

    def tag(self, region: Region) -> None:
        """Give every word of a region of a tagged tensor that is written the step's tag."""
        begin, end = (self.share_begin(region.tensor) + c for c in region.columns)
        written = Region(region.tensor, region.rows, (begin, end))
        for memory in self._written(self.tensors[region.tensor]):
            self._tags(memory, written)[:] = self.epoch

    def _tags(self, memory: Memory, region: Region) -> torch.Tensor:
        spec = self.tensors[region.tensor]
        per_word = 4 // spec.dtype.size
        begin, end = region.columns
        rows = memory.storage(spec.name)[slice(*region.rows)]
        return rows[:, begin // per_word : -(-end // per_word), 1]

    def scalar(self, handle: int) -> int:
        """The one element of an integer tensor."""
        return int(self.raw(handle).reshape(-1)[0])

    def live(self, row_count: int, begin: int, end: int) -> Rows:
        """The rows of [begin, end) that are live; all of them when ``row_count`` is NONE."""
        if row_count == NONE:
            return begin, end
        return begin, max(begin, min(end, self.scalar(row_count)))

    def position(self, row_position: int, row: int) -> int:
        """Position of a row in its sequence in this step."""
        return int(self.raw(row_position)[row]) + self.step


@functools.cache
def meaning(name: str) -> Callable[[Any, View], None]:
    """``execute`` of instructions/<name>/reference.py."""
    module = importlib.import_module(f"megavm.instructions.{name}.reference")
    function: Callable[[Any, View], None] = module.execute
    return function


def sequential_order(program: Program) -> Iterator[tuple[int, int]]:
    """Rank and number of the instructions of one step, in an order that respects queues, waits and tags.

    Assumes a verified program, and that waits for earlier steps are satisfied.
    """
    if program.dynamic and program.ranks == 1:
        yield from ((0, int(i)) for i in program.queues[0])
        return
    tensors, ranks = program.tensors, range(program.ranks)
    counts = [[0] * len(program.barriers) for _ in ranks]
    queues = [(rank, queue) for rank in ranks for queue in program.queues]
    heads = [0] * len(queues)
    # The regions of the tagged tensors of each rank that are not written yet.
    pending: dict[tuple[int, int], set[Region]] = defaultdict(set)

    def written(rank: int, inst: Instruction) -> Iterator[tuple[int, Region]]:
        for region in inst.writes(tensors):
            spec = tensors[region.tensor]
            if not spec.tagged:
                continue
            begin = spec.share_begin(rank)
            columns = begin + region.columns[0], begin + region.columns[1]
            for other in ranks if spec.shares > 1 else (rank,):
                yield other, replace(region, columns=columns)

    def is_complete(rank: int, region: Region) -> bool:
        return not any(map(region.may_overlap, pending.get((rank, region.tensor), ())))

    for rank in ranks:
        for inst in program.instructions:
            for other, region in written(rank, inst):
                pending[other, region.tensor].add(region)
    remaining = program.ranks * len(program)
    while remaining:
        before = remaining
        for number, (rank, queue) in enumerate(queues):
            while heads[number] < len(queue):
                index = int(queue[heads[number]])
                inst = program.instructions[index]
                if any(counts[rank][w.barrier] < w.target for w in inst.waits):
                    break
                if not all(is_complete(rank, region) for region in inst.reads(tensors)):
                    break
                yield rank, index
                for other, region in written(rank, inst):
                    pending[other, region.tensor].discard(region)
                if inst.signal is not None:
                    shared = inst.signal < program.shared_barriers
                    for other in ranks if shared else (rank,):
                        counts[other][inst.signal] += 1
                heads[number] += 1
                remaining -= 1
        if remaining == before:
            raise MachineFault("no instruction can run: the program waits for itself")


class ReferenceMachine:
    """Runs programs one instruction at a time, in torch."""

    name = "reference"
    memory_device = "cpu"
    memory = staticmethod(memory_on_cpu)

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> Executable:
        if verify:
            verify_program(program, self.name)
        require_ranks(program, memory)
        for rank in memory.ranks:
            rank.require(program.tensors, rows=True)
        return ReferenceExecutable(program, memory)


class ReferenceExecutable:
    """A program on the ReferenceMachine."""

    def __init__(self, program: Program, memory: Memory) -> None:
        self.program = program
        self.memory = memory
        self._order: list[tuple[int, int]] | None = None

    def execute_one(self, index: int, step: int = 0, rank: int = 0) -> None:
        """Run one instruction of a rank, without its waits, in the step after the last one run."""
        inst, tensors = self.program.instructions[index], self.program.tensors
        reads, writes = list(inst.reads(tensors)), list(inst.writes(tensors))
        tag = self.memory.epoch + step + 1
        view = View(self.memory.ranks, rank, tensors, step, tag, reads, writes)
        try:
            # Dead rows are neither read nor written, but their words are waited for and tagged.
            for region in reads:
                if tensors[region.tensor].tagged:
                    view.check_tags(region)
            meaning(inst.name())(inst, view)
            for region in writes:
                if tensors[region.tensor].tagged:
                    view.tag(region)
        except (IndexError, MachineFault) as error:
            text = inst.disassemble(self.program.tensors)
            state = WorkerState(
                0, "consumer", index, text, "", rank if self.program.ranks > 1 else None
            )
            raise MachineFault(f"instruction {index} failed: {error}", (state,)) from error

    def run(self, steps: int = 1) -> None:
        if self._order is None:
            self._order = list(sequential_order(self.program))
        try:
            for step in range(steps):
                for rank, index in self._order:
                    self.execute_one(index, step, rank)
        finally:
            # Also after a fault: words may already carry the tags of these steps.
            self.memory.epoch += steps

    def reset(self) -> None:
        """Nothing to do: every run begins anew."""
