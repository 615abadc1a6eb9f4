"""A program on the GPUs of a CudaMachine: its launches, faults and traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megavm.vm.config import INSTRUCTION_BYTES, NONE
from megavm.vm.cuda import faults as cuda_faults
from megavm.vm.cuda.clocks import Offset
from megavm.vm.cuda.driver import CudaError
from megavm.vm.cuda.faults import FaultKind, Record
from megavm.vm.cuda.launch import (
    BARRIER_STRIDE,
    EXCHANGE,
    TRACE_COLUMNS,
    WORKER_COLUMN,
)
from megavm.vm.cuda.layouts import names
from megavm.vm.cuda.rank import LaunchParameters, RankPart, Tables
from megavm.vm.events import Event
from megavm.vm.layout import Layout
from megavm.vm.machine import MachineFault, Notes, WorkerState
from megavm.vm.memory import Memory
from megavm.vm.program import Program

if TYPE_CHECKING:
    from megavm.vm.cuda.machine import CudaMachine

EVENTS = {event.label: event.value for event in Event}  # columns of a trace

IndexOf = Callable[[Record], int | None]  # the instruction that a warp was at
Layouts = Mapping[str, tuple[Layout, ...]]


@dataclass(frozen=True)
class _LaunchNotes:
    """The notes of one launch: int64 [rows, TRACE_COLUMNS] of each rank, on its GPU and its clock."""

    steps: int
    times: list[torch.Tensor]
    offsets: list[Offset]

    def joined(self, device: torch.device) -> torch.Tensor:
        """All rows, rank by rank, on the clock of rank 0."""
        parts = []
        for times, offset in zip(self.times, self.offsets, strict=True):
            own = times.to(device)
            if offset.nanoseconds:
                events = own[:, :WORKER_COLUMN]
                events -= torch.where(events != 0, offset.nanoseconds, 0)
            parts.append(own)
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class CudaExecutable:
    """A program on the CudaMachine."""

    def __init__(
        self,
        machine: CudaMachine,
        program: Program,
        memory: Memory,
        layouts: Layouts,
        functions: list[Any],
        box_rows: int | None,
    ) -> None:
        self.program = program
        self.memory = memory
        self._layouts = layouts
        self.broken = False
        self._machine = machine
        self._tables = tables = Tables(program)
        self._tagged = frozenset(spec.name for spec in program.tensors if spec.tagged)
        words = (tables.num_counters + 1) * BARRIER_STRIDE
        if machine.arena is None:
            counters = [machine.drivers[0].zeros(words)]
        else:
            counters = list(machine.arena.allocate((words,), torch.int32))
        self._ranks = [
            RankPart(machine, program, own, rank, function, tables, counter, box_rows)
            for rank, (own, function, counter) in enumerate(
                zip(memory.ranks, functions, counters, strict=True)
            )
        ]
        self._alone: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._traces = machine.trace  # whether the kernel was compiled with traces
        self._noting: list[_LaunchNotes] = []  # launches that ``finish`` has not waited for
        self._noted: list[_LaunchNotes] = []
        self._steps_before = 0
        self._even_steps = self._odd_steps = 0  # values of the barriers of steps
        self._resolve()
        # The first launch of one rank may write what another GPU is still filling with zeros.
        if len(self._ranks) > 1:
            self._synchronize()

    def _synchronize(self) -> None:
        """Wait for all work on the GPUs of all ranks.

        Raises MachineFault when some of it has failed, MachineLost when the CUDA context is lost.
        """
        try:
            for rank in self._ranks:
                rank.synchronize()
        except CudaError as error:
            raise self._machine._fault(error) from error

    def _resolve(self) -> None:
        """Build the tables of tensors.

        Raises MachineFault when a tensor meanwhile has a layout that the program cannot read.
        """
        for own in self.memory.ranks:
            for name, choice in self._layouts.items():
                if own.layout(name) not in choice:
                    raise MachineFault(
                        f"tensor {name} has been given the layout {own.layout(name)} for another "
                        f"program, this one needs {names(choice)}"
                    )
        for rank in self._ranks:
            rank.resolve()
        self._relayouts = [own.relayouts for own in self.memory.ranks]

    @property
    def barriers(self) -> list[int]:
        """The barriers' counters, rank by rank."""
        return [
            int(value)
            for rank in self._ranks
            for value in rank.counters.cpu()
            .numpy()
            .view(np.uint32)[::BARRIER_STRIDE][: len(self.program.barriers)]
        ]

    # Running.

    def run(self, steps: int = 1) -> None:
        """Run the program ``steps`` times and return when it has finished. Advances ``memory.epoch``.

        Raises MachineFault when it cannot finish: the executable then needs ``reset`` to run again;
        MachineLost when the CUDA context is lost.
        """
        self.launch(steps)
        self.finish()

    def launch(self, steps: int = 1) -> None:
        """Start a run on torch's current streams and return; ``finish`` waits for it. Launches run in order.

        Raises MachineFault when the launch is refused.
        """
        if self.broken:
            raise MachineFault("an earlier run of this executable ended in the middle: reset it")
        if steps < 1:
            raise ValueError(f"steps is {steps}: a run has at least one step")
        self._machine.check_alive()
        if self._relayouts != [own.relayouts for own in self.memory.ranks]:
            self._resolve()
        first_copy = self._first_copy()
        if self._traces:
            self._noting.append(
                _LaunchNotes(steps, self._make_notes(steps), self._machine.clock_offsets())
            )
        for rank in self._ranks:
            rank.parameters.first_copy = first_copy
            rank.parameters.steps = steps
            rank.parameters.steps_before = self._steps_before
            rank.parameters.even_steps = self._even_steps & 0xFFFFFFFF
            rank.parameters.odd_steps = self._odd_steps & 0xFFFFFFFF
        # Whether or not the launch succeeds.
        self.memory.epoch += steps
        if self._tagged:
            self.memory.turns.advance(self._tagged, steps)
        try:
            # Ranks wait for each other, so nothing that could wait comes between their launches.
            streams = [rank.stream() for rank in self._ranks]
            for rank, stream in zip(self._ranks, streams, strict=True):
                rank.start(stream)
            for rank in self._ranks:
                rank.fetch()
        except CudaError as error:
            self._break()
            raise self._machine._fault(error) from error
        odd = (steps + self._steps_before % 2) // 2
        self._odd_steps += odd * self._tables.step_signals
        self._even_steps += (steps - odd) * self._tables.step_signals
        self._steps_before = (self._steps_before + steps) & 0xFFFFFFFF

    def _first_copy(self) -> int:
        """The copy of its tagged tensors that the next step uses, whose words are empty."""
        if not self._tagged:
            return 0
        copy = self.memory.turns.begin(self._tagged)
        if copy is None:
            # Another rank may still store words, or store some at once.
            several = len(self._ranks) > 1
            if several:
                self._synchronize()
            self.memory.empty_words()
            if several:
                self._synchronize()
            copy = self.memory.turns.begin(self._tagged)
        assert copy is not None
        return copy

    def finish(self) -> None:
        """Wait for all launches. Raises MachineFault when one of them could not finish."""
        try:
            faulted = [rank.wait() for rank in self._ranks]
        except CudaError as error:
            self._break()
            raise self._machine._fault(error) from error
        if any(faulted):
            self._break()
            raise self._machine_fault(self._instruction_at)
        self._end_noting(self._noting)

    def mark(self) -> Callable[[], None]:
        """Note all work on torch's current streams, launches included; the result waits for it.

        It raises MachineFault when a launch of this executable has faulted.
        """
        self._machine.check_alive()
        launched = list(self._noting)
        try:
            waits = [driver.mark() for driver in dict.fromkeys(self._machine.drivers)]
        except CudaError as error:
            self._break()
            raise self._machine._fault(error) from error

        def wait() -> None:
            try:
                for of_driver in waits:
                    of_driver()
            except CudaError as error:
                self._break()
                raise self._machine._fault(error) from error
            if any(rank._aborted[0] for rank in self._ranks):
                self._break()
                raise self._machine_fault(self._instruction_at)
            self._end_noting(launched)

        return wait

    def reset(self) -> None:
        """Set counters and fault records to those of a fresh load, so that the program runs again.

        Waits for launches in progress: those behind a broken one read its abort word and end. Raises
        MachineLost when the CUDA context is lost.
        """
        self._machine.check_alive()
        self._synchronize()
        for rank in self._ranks:
            rank.counters.zero_()
            rank.records.zero_()
        # The next launch may be on another stream.
        self._synchronize()
        for rank in self._ranks:
            rank.forget()
        self._steps_before = 0
        self._even_steps = self._odd_steps = 0
        if self._tagged:
            self.memory.turns.spoil()
        self._noting = []
        self.broken = False

    def execute_one(self, index: int, step: int = 0, rank: int = 0) -> None:
        """Run one instruction of a rank alone, without its waits and signal, as in step ``step`` of a launch.

        For tools; keeps ``memory.epoch``. Raises MachineFault when the instruction fails or reads a tagged
        word that this step has not written.
        """
        if not (0 <= rank < len(self._ranks) and 0 <= index < len(self.program)):
            raise IndexError(
                f"instruction {index} of rank {rank}: the program has {len(self.program)} on each of "
                f"{len(self._ranks)} ranks"
            )
        self._machine.check_alive()
        if self._relayouts != [own.relayouts for own in self.memory.ranks]:
            self._resolve()
        own = self._ranks[rank]
        if rank not in self._alone:
            exchanges = self._tables.exchanges.table.copy()
            exchanges["hint"]["signal"] = exchanges["hint"]["wait"] = NONE
            self._alone[rank] = (
                own.upload(self.program.words),
                own.upload(exchanges),
                own.upload(np.array([0, 1], dtype=np.uint32)),
            )
        words, table, ends = self._alone[rank]
        parameters = LaunchParameters.from_buffer_copy(own.parameters)
        parameters.instructions = words.data_ptr() + index * INSTRUCTION_BYTES
        parameters.exchanges = table.data_ptr() + index * EXCHANGE.size
        parameters.queue_begin = ends.data_ptr()
        events = own.driver.zeros(TRACE_COLUMNS, torch.int64) if self._traces else None
        parameters.trace = 0 if events is None else events.data_ptr()
        parameters.first_copy = self._first_copy()
        self.memory.turns.ahead = step
        parameters.steps_before = self._steps_before
        parameters.steps, parameters.first_step = 1, step
        parameters.dynamic, parameters.alone = 0, 1
        try:
            own.start(own.stream(), parameters, 1)
            own.fetch()
            faulted = own.wait()
        except CudaError as error:
            raise self._machine._fault(error) from error
        if faulted:
            raise self._machine_fault(lambda _: index)

    def _instruction_at(self, record: Record) -> int | None:
        """Number of the instruction that a warp was at; None past the end of its queue."""
        begin, queue = self._tables.begin, 0 if self.program.dynamic else record.worker
        place = int(begin[queue]) + record.position
        return int(self._tables.order[place]) if place < begin[queue + 1] else None

    # Faults.

    def _break(self) -> None:
        """Note that a run ended in the middle."""
        self.broken = True
        self.memory.turns.spoil()

    def _machine_fault(self, index_of: IndexOf) -> MachineFault:
        """The fault that the records describe. Clears the records."""
        records = [record for rank in self._ranks for record in rank.take_records()]
        if not records:
            return MachineFault("a worker stopped and did not say why")
        # Of all warps of one worker and role, keep the record that says most.
        telling: dict[tuple[int, int, str], Record] = {}
        for record in sorted(records, key=lambda r: r.order):
            telling.setdefault((record.rank, record.worker, record.role), record)
        cause = min(records, key=lambda r: r.order)
        states = tuple(self._state(telling[key], index_of) for key in sorted(telling))
        index = index_of(cause)
        at = "no instruction" if index is None else f"instruction {index}"
        on = f" on rank {cause.rank}" if len(self._ranks) > 1 else ""
        if index is not None and cause.condition is FaultKind.INSTRUCTION:
            inst = self.program.instructions[index]
            text = cuda_faults.sentence(cause, inst, self.program.tensors)
            return MachineFault(f"{at}{on} ({inst.name()}): {text}", states)
        waiting = self._state(cause, index_of).waiting_for
        return MachineFault(
            f"worker {cause.worker}{on} ({cause.role}) gave up after {self._machine.timeout:g} s: "
            f"{at} waits for {waiting}",
            states,
        )

    def _state(self, record: Record, index_of: IndexOf) -> WorkerState:
        index = index_of(record)
        tensors = self.program.tensors
        inst = None if index is None else self.program.instructions[index]
        waiting = cuda_faults.waiting_for(record, inst, tensors, self.program.barriers)
        text = "" if inst is None else inst.disassemble(tensors)
        rank = record.rank if len(self._ranks) > 1 else None
        return WorkerState(record.worker, record.role, index, text, waiting, rank)

    # Traces.

    def _make_notes(self, steps: int) -> list[torch.Tensor]:
        """Make room for the notes of a launch, and pass it to the ranks: int64 [rows, columns] each."""
        rows = len(self._tables.order) * steps
        notes = []
        for rank in self._ranks:
            times = rank.driver.zeros(max(rows, 1) * TRACE_COLUMNS, torch.int64)
            rank.parameters.trace = times.data_ptr()
            notes.append(times.view(-1, TRACE_COLUMNS)[:rows])
        return notes

    def _end_noting(self, launches: Sequence[_LaunchNotes]) -> None:
        """The notes of these launches, the oldest in progress, are complete."""
        count = min(len(launches), len(self._noting))
        self._noted += self._noting[:count]
        self._noting = self._noting[count:]

    def trace(self) -> list[Notes]:
        """The traces of all launches finished since the last call, in ns of the global timer of rank 0's GPU.

        The data stay on that GPU. Raises ValueError when the machine does not trace.
        """
        if not self._traces:
            raise ValueError("nothing is noted: load the program on a CudaMachine(trace=True)")
        noted, self._noted = self._noted, []
        device = self.memory.device
        return [
            Notes(
                launch.steps,
                launch.joined(device),
                EVENTS,
                WORKER_COLUMN,
                tuple((o.nanoseconds, o.uncertainty) for o in launch.offsets[: len(self._ranks)])
                if len(self._ranks) > 1
                else (),
            )
            for launch in noted
        ]
