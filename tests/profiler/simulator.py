"""A machine of a few lines: workers with queues, loaders with rings, exchanges. It records traces.

It is written from what the words of docs/trace-format.md mean, as processes that wait for events,
and knows nothing of the analysis. Run it with something changed, and the effect of the change is
known.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from megavm.profiler.causes import Executions, find_causes
from megavm.profiler.trace import BARRIER, EVENTS, TAGGED, Trace, TraceProgram
from megavm.vm.config import PAGE_BYTES

NONE = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Task:
    """An instruction: what it waits for (groups of tasks), and which group its results complete."""

    label: str
    work: float  # ns to compute
    group: int
    waits: tuple[int, ...] = ()
    pages: int = 0
    late: bool = False  # loads wait for the barriers that it waits for


@dataclasses.dataclass(frozen=True)
class Machine:
    """Times in ns."""

    queues: tuple[tuple[Task, ...], ...]
    tagged: tuple[bool, ...]  # of each group: words, else a barrier
    hop: float = 700.0  # from a result to those who wait for it
    turn: float = 40.0  # from one instruction to the next
    store: float = 90.0
    signal: float = 150.0
    page: float = 400.0  # to load a page
    ring: int = 8  # pages that a loader may be ahead
    slower: tuple[float, ...] = ()  # factors of the loaders of workers
    stray: float = 0.0  # the most that an exchange takes longer for some workers than for others
    # How many times its even share of a memory that all loaders share a loader gets when alone;
    # 0: every loader has a memory of its own.
    burst: float = 0.0
    # Of a shared memory: pages that a loader may have asked for and that have not arrived, and how
    # long one is on its way after it has left the memory.
    copies: int = 1
    way: float = 0.0


class Happening:
    """Something that processes wait for."""

    def __init__(self, count: int = 1) -> None:
        self.missing = count
        self.waiting: list[Any] = []


Process = Generator[float | Happening, None, None]


class Simulation:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Process]] = []
        tasks = [task for queue in machine.queues for task in queue]
        self.memory_free = 0.0  # when the memory has brought all pages that were asked for
        self.complete = [
            Happening(sum(task.group == g for task in tasks)) for g in range(len(machine.tagged))
        ]
        self.completed_at = [0.0] * len(machine.tagged)
        self.notes: list[list[dict[str, float]]] = [[{} for _ in q] for q in machine.queues]
        self.ready = [[Happening() for _ in q] for q in machine.queues]
        random = np.random.default_rng(0)
        self.ways = machine.hop + machine.stray * random.random(
            (len(machine.queues), len(machine.tagged))
        )
        for worker, queue in enumerate(machine.queues):
            pages = sum(task.pages for task in queue)
            arrived = [Happening() for _ in range(pages)]
            freed = [Happening() for _ in range(pages)]
            self.start(self.consume(worker, arrived, freed))
            self.start(self.load(worker, arrived, freed))
        while self._agenda:
            self.now, _, process = heapq.heappop(self._agenda)
            self.advance(process)

    def start(self, process: Process) -> None:
        heapq.heappush(self._agenda, (self.now, next(self._order), process))

    def advance(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Happening):
                if wanted.missing > 0:
                    wanted.waiting.append(process)
                    return
            else:
                heapq.heappush(self._agenda, (self.now + wanted, next(self._order), process))
                return

    def happen(self, what: Happening) -> None:
        what.missing -= 1
        if what.missing == 0:
            for process in what.waiting:
                self.start(process)

    def load(self, worker: int, arrived: list[Happening], freed: list[Happening]) -> Process:
        page = 0
        slower = self.machine.slower[worker] if self.machine.slower else 1.0
        for task, note, ready in zip(
            self.machine.queues[worker], self.notes[worker], self.ready[worker], strict=True
        ):
            if task.late and not all(self.machine.tagged[group] for group in task.waits):
                yield ready
            for i in range(task.pages):
                if page >= self.machine.ring:
                    yield freed[page - self.machine.ring]
                if i == 0:
                    note["load_begin"] = self.now
                if self.machine.copies > 1:
                    if page >= self.machine.copies:
                        yield arrived[page - self.machine.copies]
                    note["load_issued"] = self.now
                    self.start(self.bring(arrived[page], note))
                else:
                    yield self.fetch() if self.machine.burst else self.machine.page * slower
                    self.happen(arrived[page])
                    note["load_issued"] = note["load_arrived"] = self.now
                page += 1

    def bring(self, arrived: Happening, note: dict[str, float]) -> Process:
        yield self.fetch()
        note["load_arrived"] = self.now
        self.happen(arrived)

    def fetch(self) -> float:
        """How long a page takes that the shared memory brings after all that it was asked for."""
        page = self.machine.page
        self.memory_free = max(self.memory_free, self.now) + page / len(self.machine.queues)
        return max(self.memory_free - self.now, page / self.machine.burst) + self.machine.way

    def consume(self, worker: int, arrived: list[Happening], freed: list[Happening]) -> Process:
        page = 0
        for task, note, ready in zip(
            self.machine.queues[worker], self.notes[worker], self.ready[worker], strict=True
        ):
            yield self.machine.turn
            note["fetched"] = note["begin"] = note["ready"] = self.now
            for group in task.waits:
                yield self.complete[group]
                way = float(self.ways[worker, group])
                yield max(self.completed_at[group] + way - self.now, 0.0)
                if not self.machine.tagged[group]:
                    note["ready"] = self.now
            note["inputs"] = self.now
            self.happen(ready)
            for _ in range(task.pages):
                yield arrived[page]
                yield task.work / task.pages
                self.happen(freed[page])
                page += 1
            yield 0.0 if task.pages else task.work
            note["computed"] = self.now
            yield self.machine.store
            note["end"] = self.now
            self.start(self.report(task, note))

    def report(self, task: Task, note: dict[str, float]) -> Process:
        if not self.machine.tagged[task.group]:
            yield self.machine.signal
        note["signalled"] = self.now
        self.completed_at[task.group] = self.now
        self.happen(self.complete[task.group])
        yield from ()


def step_time(machine: Machine) -> float:
    """How long the machine takes for its queues: ns."""
    notes = Simulation(machine).notes
    return max(note["signalled"] for queue in notes for note in queue)


def simulate(machine: Machine) -> Trace:
    """A trace of one step."""
    notes = Simulation(machine).notes
    tasks = [task for queue in machine.queues for task in queue]
    count = len(tasks)
    flat = [note for queue in notes for note in queue]
    # Times are whole ns, and not 0: that is not noted.
    times = np.array(
        [[round(note.get(event.name, -2)) + 1 for note in flat] for event in EVENTS], np.int64
    )
    sizes = [len(queue) for queue in machine.queues]
    worker = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    slot = np.concatenate([np.arange(size) for size in sizes]).astype(np.int32)
    number = np.arange(count, dtype=np.int32)
    program = _program(machine, tasks)
    row = {event.name: times[i] for i, event in enumerate(EVENTS)}
    step = np.zeros(count, np.int32)
    zero = np.zeros(1, np.int32)
    cause, channel = find_causes(
        Executions(
            programs=(program,), step_program=zero, launch=zero, step=step, worker=worker,
            slot=slot, instruction=number, begin=row["begin"], stored=row["end"],
            signalled=row["signalled"],
        )
    )  # fmt: skip
    return Trace(
        machine={
            "name": "simulation", "device": "none", "workers": len(sizes),
            "bandwidth": len(sizes) * PAGE_BYTES / machine.page * 1e9 if machine.burst else None,
            "flops_per_second": None, "clock": "simulated", "clock_step": 1,
        },
        programs=(program,),
        step_program=zero,
        step_number=np.zeros(1, np.int64),
        step_tokens=np.ones(1, np.int32),
        record_step=step,
        record_worker=worker,
        record_slot=slot,
        record_instruction=number,
        record_cause=cause,
        record_cause_channel=channel,
        times=times,
    )  # fmt: skip


def _program(machine: Machine, tasks: Sequence[Task]) -> TraceProgram:
    count, groups = len(tasks), len(machine.tagged)
    labels = list(dict.fromkeys(task.label for task in tasks))
    producers = [[i for i, t in enumerate(tasks) if t.group == g] for g in range(groups)]
    waits = [(i, g, 0) for i, task in enumerate(tasks) for g in sorted(task.waits)]
    size = np.array([PAGE_BYTES * task.pages for task in tasks], np.int64)
    words = np.zeros((count, 32), np.uint32)
    words[:, 0] = [2 if task.label.endswith(".attention") else 1 for task in tasks]
    words[:, 1:8] = np.array([NONE] + [NONE, 0] * 3, np.uint32)
    tagged = np.array(machine.tagged)
    return TraceProgram(
        facts={
            "fingerprint": "0" * 64, "dynamic": False, "workers": len(machine.queues),
            "barriers": [f"group {g}" for g in range(groups)],
            "tensors": [[f"group {g}", [1, 1], "F32", "activation", True] for g in range(groups)],
            "labels": labels, "metadata": {},
            "pages": machine.ring, "early_pages": 0,
            "opcodes": {
                "1": {"name": "task", "help": "computes", "fields": []},
                "2": {"name": "attention", "help": "attends", "fields": []},
            },
        },
        words=words,
        label=np.array([labels.index(task.label) for task in tasks], np.int32),
        bytes=size,
        load_bytes=size,
        flops=size,
        channel_kind=np.where(tagged, TAGGED, BARRIER).astype(np.int32),
        channel_object=np.arange(groups, dtype=np.int32),
        channel_target=np.where(tagged, 0, [len(p) for p in producers]).astype(np.int32),
        channel_offsets=np.cumsum([0, *(len(p) for p in producers)]).astype(np.int32),
        channel_producers=np.array([i for p in producers for i in p], np.int32),
        waits=np.array(waits, np.int32).reshape(-1, 3),
    )  # fmt: skip


def layered(
    workers: int,
    layers: int,
    phases: Sequence[tuple[str, float, int, bool]],
    seed: int = 0,
    spread: float = 0.2,
    **times: Any,
) -> Machine:
    """Layers of phases (name, work, pages, tagged): a part each, after all parts of the last."""
    random = np.random.default_rng(seed)
    queues: list[list[Task]] = [[] for _ in range(workers)]
    tagged: list[bool] = []
    for layer, (name, work, pages, words) in itertools.product(range(layers), phases):
        group = len(tagged)
        tagged.append(words)
        for queue in queues:
            queue.append(
                Task(
                    f"layers.{layer}.{name}",
                    float(work * random.uniform(1 - spread, 1 + spread)),
                    group,
                    (group - 1,) if group else (),
                    pages,
                )
            )
    return Machine(tuple(map(tuple, queues)), tuple(tagged), **times)


def changed(machine: Machine, what: str, of: str, factor: float) -> Machine:
    """The machine with the thing really changed that a change of the replay names."""

    def replace(worker: int, task: Task) -> Task:
        phase = "layers.*." + task.label.rpartition(".")[2]
        if what == "computing" and of in ("", phase):
            return dataclasses.replace(task, work=task.work * factor)
        if what == "bytes" and of in ("", phase):
            return dataclasses.replace(task, pages=math.ceil(task.pages * factor))
        if what == "worker" and of == str(worker):
            return dataclasses.replace(task, work=task.work * factor)
        if what == "wait":
            names = {t.group: t.label for queue in machine.queues for t in queue}
            waits = tuple(
                g for g in task.waits if "layers.*." + names[g].rpartition(".")[2] != of.split()[0]
            )
            return dataclasses.replace(task, waits=waits)
        return task

    queues = tuple(tuple(replace(w, t) for t in q) for w, q in enumerate(machine.queues))
    times: dict[str, Any] = {}
    if what == "worker":
        times = {"slower": tuple(factor if str(w) == of else 1.0 for w in range(len(queues)))}
    if what == "latency" and not of:
        names = "hop", "signal", "stray"
        times = {name: getattr(machine, name) * factor for name in names}
    if what == "loading" and not of:
        times = {"page": machine.page * factor}
    if what == "storing" and not of:
        times = {"store": machine.store * factor}
    if what == "switching":
        times = {"turn": machine.turn * factor}
    return dataclasses.replace(machine, queues=queues, **times)
