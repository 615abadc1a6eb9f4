"""Records the notes of a machine step by step, and assembles them into a trace."""

from __future__ import annotations

import dataclasses
import datetime
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from megavm.profiler.causes import Executions, find_causes
from megavm.profiler.dependencies import trace_program
from megavm.profiler.environment import environment, version
from megavm.profiler.ring import EARLY_PAGES
from megavm.profiler.trace import EVENTS, Floats, Ints, Longs, Trace, TraceError
from megavm.vm.config import MIN_GROUP_ROWS
from megavm.vm.machine import Notes, TracingExecutable
from megavm.vm.program import Program
from megavm.vm.specialisation import program_specialisation

DRAIN: Final = 64  # launches after which their notes are taken at once


@dataclass(frozen=True, eq=False)
class _Launch:
    """The notes of one launch; they are evaluated only when a trace is requested."""

    program: Program
    notes: Notes
    first_step: int  # number of its first step since the recorder was made
    positions: Ints
    rows: int
    sequences: Ints | None

    @property
    def tokens(self) -> int:
        """Rows that each step computed."""
        return len(self.positions)

    def count_rows(self) -> tuple[int, int]:
        """Number of sequences of a step, and of its rows that belong to prompts.

        A sequence with several rows runs a prompt chunk; one with a single row decodes.
        """
        sequences = np.zeros(0, np.int32) if self.sequences is None else self.sequences
        _, rows = np.unique(sequences, return_counts=True)
        return len(rows), int(rows[rows > 1].sum())

    @property
    def contexts(self) -> Floats:
        """Mean number of context tokens per row of the program, by step: float64 [steps].

        Rows without a token count as 0.
        """
        seen = int(self.positions.sum()) + self.tokens * (1 + np.arange(self.notes.steps))
        return np.asarray(seen / self.rows, np.float64)


class Recorder:
    """Keeps the notes of the last ``steps`` steps of a machine (of all steps by default).

    Pass it to ``record`` of a runner or an ``LLM``. Notes stay in the machine's memory, on a GPU in
    GPU memory: about 64 bytes per executed instruction, for ``steps`` steps and 64 launches more.
    ``machine``, ``model`` and ``notes`` go into the header of the trace. Several threads may call
    the methods.

    Raises ValueError when ``steps`` is less than 1.
    """

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}: a recorder keeps at least one step")
        self.steps = steps
        self.machine: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._new: deque[tuple[TracingExecutable, Ints, int, Ints | None]] = deque()
        # Notes of launches for which ``add`` has not been called yet.
        self._early: dict[TracingExecutable, deque[Notes]] = {}
        self._launches: deque[_Launch] = deque()
        self._kept = 0  # steps in _launches
        self._seen = 0  # steps since the recorder was made
        self._lock = threading.Lock()

    def add(
        self,
        executable: TracingExecutable,
        positions: Ints,
        rows: int,
        sequences: Ints | None = None,
    ) -> None:
        """Keep the notes of the executable's next launch. Call it after every launch.

        ``positions``, int32 [tokens]: positions of the first step's tokens in their sequences.
        ``rows``: rows of the program. ``sequences``, int32 [tokens]: the sequence of each token;
        None when the program is not a model's. The arrays are kept, not copied.
        """
        # Do as little as possible per launch: caches are cold after a step, so code here runs
        # several times slower than usual. ``drain`` processes many launches at once.
        self._new.append((executable, positions, rows, sequences))
        if len(self._new) >= DRAIN:
            self.drain()

    def drain(self) -> None:
        """Take the notes of all added launches from their executables.

        Call it before another recorder uses the same executables.
        """
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while self._new:
            executable, positions, rows, sequences = self._new.popleft()
            noted = self._early.setdefault(executable, deque())
            if not noted:
                noted += executable.trace()
            notes = noted.popleft()
            if not noted:
                del self._early[executable]
            if len(notes.times):
                self._launches.append(
                    _Launch(executable.program, notes, self._seen, positions, rows, sequences)
                )
                self._kept += notes.steps
                self._seen += notes.steps
        while self.steps is not None and self._kept > self.steps:
            oldest = self._launches[0].notes.steps
            if self._kept - oldest < self.steps:
                break
            self._launches.popleft()
            self._kept -= oldest

    def __len__(self) -> int:
        """Number of steps that a trace would have now."""
        with self._lock:
            self._drain()
            return self._kept if self.steps is None else min(self._kept, self.steps)

    def clear(self) -> None:
        """Drop everything recorded so far."""
        with self._lock:
            self._drain()
            self._launches.clear()
            self._kept = 0

    def trace(self) -> Trace:
        """The kept steps as a trace. Raises TraceError when there is none."""
        with self._lock:
            self._drain()
            launches = list(self._launches)
            dropped = max(self._kept - self.steps, 0) if self.steps is not None else 0
        if not launches:
            raise TraceError("nothing was recorded: no step has run")
        return _assemble(launches, dropped, self)


def _assemble(launches: list[_Launch], dropped: int, recorder: Recorder) -> Trace:
    """One trace of all launches, without the first ``dropped`` steps."""
    programs = list({id(launch.program): launch.program for launch in launches}.values())
    number = {id(program): p for p, program in enumerate(programs)}
    steps = [launch.notes.steps for launch in launches]
    step_launch = np.repeat(np.arange(len(launches), dtype=np.int32), steps)[dropped:]
    step_number = np.concatenate([n.first_step + np.arange(n.notes.steps) for n in launches])
    step_program = np.array([number[id(n.program)] for n in launches], np.int32)[step_launch]
    context = np.concatenate([launch.contexts for launch in launches])[dropped:]
    described = tuple(
        trace_program(program, float(context[step_program == p].mean()))
        for p, program in enumerate(programs)
    )
    if recorder.machine.get("name") == "cuda":
        described = tuple(
            dataclasses.replace(own, facts={**own.facts, **_ring(program)})
            for own, program in zip(described, programs, strict=True)
        )
    places, times = _records(launches, np.cumsum([-dropped, *steps[:-1]]))
    order = np.lexsort(places[[2, 0, 1]])
    order = order[places[1, order] >= 0]
    worker, step, slot, instruction, sm = places[:, order]
    times = times[:, order]
    noted = times > 0
    times = np.where(noted, times - times[noted].min(initial=np.iinfo(np.int64).max), -1)
    row = {event.name: times[i] for i, event in enumerate(EVENTS)}
    executions = Executions(
        programs=described,
        step_program=step_program,
        launch=step_launch,
        step=step,
        worker=worker,
        slot=slot,
        instruction=instruction,
        begin=row["begin"],
        stored=row["end"],
        signalled=np.maximum(row["signalled"], row["end"]),
    )
    cause, channel = find_causes(executions)
    counts = None
    if all(launch.sequences is not None for launch in launches):
        counts = np.array([launch.count_rows() for launch in launches], np.int32)[step_launch]
    return Trace(
        machine={
            "clock_step": _resolution(times),
            **_clocks(launches),
            **_machine(recorder, described[0].workers),
        },
        programs=described,
        step_program=step_program,
        step_number=step_number[dropped:],
        step_tokens=np.array([n.tokens for n in launches], np.int32)[step_launch],
        step_sequences=None if counts is None else counts[:, 0],
        step_prompt_rows=None if counts is None else counts[:, 1],
        record_step=step,
        record_worker=worker,
        record_slot=slot,
        record_instruction=instruction,
        record_cause=cause,
        record_cause_channel=channel,
        record_sm=sm if (sm >= 0).any() else None,
        times=times,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        megavm=version("megavm"),
        environment=environment(),
        model=dict(recorder.model),
        notes=dict(recorder.notes),
    )


def _records(launches: list[_Launch], first_steps: Longs) -> tuple[Ints, Longs]:
    """Worker, step, slot, instruction, SM [5, r] and times [events, r] of all launches.

    Times that were not noted are 0. ``first_steps``: index in the trace of the first step of each
    launch.
    """
    places, times = [], []
    for launch, first in zip(launches, first_steps.tolist(), strict=True):
        program = launch.program
        worker, step, slot, instruction = launch.notes.places(program)
        if program.ranks > 1:  # see trace_program
            instruction = instruction + np.int32(len(program)) * (worker // program.workers)
        sms = launch.notes.sms()
        places.append(np.stack([worker, step + np.int32(first), slot, instruction, sms]))
        noted = launch.notes.times.cpu().numpy()
        table = np.zeros((len(EVENTS), len(worker)), np.int64)
        for i, event in enumerate(EVENTS):
            if event.name in launch.notes.events:
                table[i] = noted[:, launch.notes.events[event.name]]
        times.append(table)
    return np.concatenate(places, axis=1), np.concatenate(times, axis=1)


def _ring(program: Program) -> dict[str, int]:
    """The ring of pages of a program's workers, as members of the header.

    As kernels of unchanged sources have it.
    """
    sizes = program_specialisation(program).common
    # Consumers of matrix products and of groups of 16 rows take no pages early.
    few = not sizes.get("matrix_rows", 0) and sizes["group_rows"] <= MIN_GROUP_ROWS
    early = EARLY_PAGES if few else 0
    return {"pages": sizes["pages"], "early_pages": early}


def _resolution(times: Longs) -> int | None:
    """The greatest common divisor of all times in ns: an upper bound of the clock's resolution."""
    step = int(np.gcd.reduce(times[times > 0], initial=0))
    return step or None


def _clocks(launches: list[_Launch]) -> dict[str, Any]:
    """How far the clocks of the ranks were apart, if there are several; {} otherwise.

    ``ranks``: for each rank the median of the offsets in ns that were taken off its times, and the
    largest uncertainty of one.
    """
    offsets = [launch.notes.offsets for launch in launches if launch.notes.offsets]
    if not offsets:
        return {}
    apart = np.array(offsets, np.int64)  # [launches, ranks, 2]
    medians, most = np.median(apart[:, :, 0], axis=0), apart[:, :, 1].max(axis=0)
    return {
        "ranks": [
            {"clock_offset": int(offset), "clock_uncertainty": int(uncertainty)}
            for offset, uncertainty in zip(medians, most, strict=True)
        ]
    }


def _machine(recorder: Recorder, workers: int) -> dict[str, Any]:
    unknown = dict.fromkeys(("name", "device", "clock"), "unknown")
    ceilings = dict.fromkeys(("bandwidth", "flops_per_second"))
    return {**unknown, **ceilings, "workers": workers, **recorder.machine}
