"""Records what a machine notes, step after step, and makes a trace of it."""

from __future__ import annotations

import datetime
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from megavm.profiler.causes import Executions, find_causes
from megavm.profiler.dependencies import trace_program
from megavm.profiler.environment import environment, version
from megavm.profiler.trace import EVENTS, Floats, Ints, Longs, Trace, TraceError
from megavm.vm.machine import Notes, TracingExecutable
from megavm.vm.program import Program

DRAIN: Final = 64  # launches that wait for their notes


@dataclass(frozen=True, eq=False)
class _Launch:
    """One launch as it was noted; nothing is made of it before a trace is asked for."""

    program: Program
    notes: Notes
    first_step: int  # in the life of the recorder
    positions: Ints
    rows: int

    @property
    def contexts(self) -> Floats:
        """Tokens of context that a row of the program saw on average, in every step.

        A row may have no token.
        """
        tokens = len(self.positions)
        seen = int(self.positions.sum()) + tokens * (1 + np.arange(self.notes.steps))
        return np.asarray(seen / self.rows, np.float64)


class Recorder:
    """Keeps what a machine noted of the last ``steps`` steps (all of them by default).

    It is given to a runner or an ``LLM`` (``record``). Notes stay where the machine has left them,
    on a GPU in its memory: about 64 bytes for each instruction executed, of ``steps`` steps and
    those of 64 launches. ``machine``, ``model`` and ``notes`` go into the header of the trace.
    Methods may be called from several threads.

    Raises ValueError when ``steps`` is less than 1.
    """

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}: a recorder keeps at least one step")
        self.steps = steps
        self.machine: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._new: deque[tuple[TracingExecutable, Ints, int]] = deque()
        # Notes of launches that ``add`` has not been called for yet.
        self._early: dict[TracingExecutable, deque[Notes]] = {}
        self._launches: deque[_Launch] = deque()
        self._kept = 0  # steps of the launches
        self._seen = 0  # steps of the recorder's life
        self._lock = threading.Lock()

    def add(self, executable: TracingExecutable, positions: Ints, rows: int) -> None:
        """Keep what the executable's next launch has noted: it is called after each of them.

        ``positions``, int32 [tokens], are those of the first step's tokens in their sequences; the
        program has room for ``rows`` tokens. The arrays are kept.
        """
        # The caches are cold after a step, and what runs here costs several times what it should:
        # the rest is done for many launches at once.
        self._new.append((executable, positions, rows))
        if len(self._new) >= DRAIN:
            self.drain()

    def drain(self) -> None:
        """Take the notes of all launches that were added from their executables.

        To be called before another recorder is given the same executables.
        """
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        while self._new:
            executable, positions, rows = self._new.popleft()
            noted = self._early.setdefault(executable, deque())
            if not noted:
                noted += executable.trace()
            notes = noted.popleft()
            if not noted:
                del self._early[executable]
            if len(notes.times):
                self._launches.append(
                    _Launch(executable.program, notes, self._seen, positions, rows)
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
        """Steps that a trace would have now."""
        with self._lock:
            self._drain()
            return self._kept if self.steps is None else min(self._kept, self.steps)

    def clear(self) -> None:
        """Forget what was recorded."""
        with self._lock:
            self._drain()
            self._launches.clear()
            self._kept = 0

    def trace(self) -> Trace:
        """What is kept, as a trace. Raises TraceError when that is nothing."""
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
    places, times = _records(launches, np.cumsum([-dropped, *steps[:-1]]))
    order = np.lexsort(places[[2, 0, 1]])
    order = order[places[1, order] >= 0]
    worker, step, slot, instruction = places[:, order]
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
    return Trace(
        machine={"clock_step": _resolution(times), **_machine(recorder, described[0].workers)},
        programs=described,
        step_program=step_program,
        step_number=step_number[dropped:],
        step_tokens=np.array([len(n.positions) for n in launches], np.int32)[step_launch],
        record_step=step,
        record_worker=worker,
        record_slot=slot,
        record_instruction=instruction,
        record_cause=cause,
        record_cause_channel=channel,
        times=times,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        megavm=version("megavm"),
        environment=environment(),
        model=dict(recorder.model),
        notes=dict(recorder.notes),
    )


def _records(launches: list[_Launch], first_steps: Longs) -> tuple[Ints, Longs]:
    """Worker, step, slot, instruction [4, r] and times [events, r] of all launches; 0: not noted.

    The steps of a launch are counted from its first step.
    """
    places, times = [], []
    for launch, first in zip(launches, first_steps.tolist(), strict=True):
        worker, step, slot, instruction = launch.notes.places(launch.program)
        places.append(np.stack([worker, step + np.int32(first), slot, instruction]))
        noted = launch.notes.times.cpu().numpy()
        table = np.zeros((len(EVENTS), len(worker)), np.int64)
        for i, event in enumerate(EVENTS):
            if event.name in launch.notes.events:
                table[i] = noted[:, launch.notes.events[event.name]]
        times.append(table)
    return np.concatenate(places, axis=1), np.concatenate(times, axis=1)


def _resolution(times: Longs) -> int | None:
    """The largest step of the clock with which all times are consistent, in ns."""
    step = int(np.gcd.reduce(times[times > 0], initial=0))
    return step or None


def _machine(recorder: Recorder, workers: int) -> dict[str, Any]:
    unknown = {"name": "unknown", "device": "unknown", "clock": "unknown", "bandwidth": None}
    return {**unknown, "workers": workers, **recorder.machine}
