"""How long a GPU waits for its host, at the pace of a GPU that none is needed for.

    python benchmarks/host_pace.py [--batches 1 8 64 256] [--paths engine asyncio uvloop]
                                   [--steps-per-launch 1 8] [--writers thread loop] [--save [NAME]]
    python benchmarks/host_pace.py --waves 4 [--batches 8 64 256] [--paths asyncio uvloop]

The engine, the launches' bookkeeping and the server are the real ones, with the shipped model's
tokenizer. Only the machine is replaced. A *paced machine* executes nothing: a launch chooses the
next tokens of a text, and is complete ``pace`` later, for which its thread waits without the GIL.
The paces are those that megavm aims at for a Llama of 1B on an H200.

``idle_share``: time between the end of a launch and the begin of the next, over all time; launches
that are not a decode step of the full batch are left out. ``plan_us`` and ``collect_us`` are means
of a launch, by the clock, so they include waiting for the GIL and for a core. Paths:

- ``engine``: ``Engine.step`` in a loop; nobody reads the text.
- ``asyncio``: the server without uvloop and httptools, one streaming HTTP client per sequence.
- ``uvloop``: the server with both of them (megavm[fast]).

``--writers loop``: the server without the thread that writes plain events, so that the event loop
writes them all.

``--waves N``: prompts come all the time, as from ``megavm bench serve``. Each client sends N
requests of 160 token ids for 128 tokens, one as soon as the last is answered, over one connection.
A step of R rows takes 0.6 ms + R * 4 us, a launch of pure decode has 8 of them. ``idle_share``: the
time in which there were requests and the machine did nothing, over the time in which there were.
``idle_share_of_busy``: 1 - run / busy of the server's metrics, where "busy" leaves out the time
between two steps. ``ttft_ms``: the clients' time to the first token, ``cpu_ms_per_request`` as
below.

Each path has a process of its own, and the clients share another one: they need cores too, so
compare with ``cores`` and ``load_average`` of the result. ``cpu_ms_per_step`` is the time on a core
of the clients and of the server's threads, ``core_wait_ms_per_step`` the time in which they could
run and had no core, for 200 steps of the full batch. "engine", "steps" and "loop" share the GIL.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import random
import selectors
import socket
import statistics
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from unittest.mock import patch

import torch

from environment import save
from megavm import LLM, SamplingParams
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.run import runner as runner_module
from megavm.vm.machine import Executable
from megavm.vm.memory import Memory
from megavm.vm.program import Program

if TYPE_CHECKING:
    from megavm.server.engine_loop import Generation
    from megavm.server.run import Server

PACE_MS: Final = {1: 0.6, 8: 0.7, 64: 1.2, 256: 2.4}  # time of a step, by batch
IDLE_LIMIT: Final = 0.05
HOST_LIMIT: Final = 0.10  # plan and collect, as a share of the pace
TOKENS: Final = 600  # of each sequence
WARM_UP: Final = 50  # first steps of a full batch, not counted
COUNTED: Final = 200  # following steps, whose CPU time is measured
PATHS: Final = ("engine", "asyncio", "uvloop")
# Waves of requests.
PROMPT: Final = 160
OUTPUT: Final = 128
STEP_SECONDS: Final = 0.6e-3  # and for each of its rows:
ROW_SECONDS: Final = 4e-6
STEPS_PER_LAUNCH: Final = 8
MAX_ROWS: Final = 2048
IDS: Final = range(2, 102)  # token ids of the prompts
PR_SET_TIMERSLACK: Final = 29


@dataclass
class Launch:
    """Times of a launch in seconds, by ``time.perf_counter``; ``full``: a decode step of all."""

    begin: float
    end: float
    full: bool


class PacedMachine:
    """A machine whose launches choose tokens of ``text``, an int32 list.

    Slot s reads the text from token s on. A step takes ``pace`` seconds, and ``row_pace`` more for
    each of its rows.
    """

    name = "cpu"
    memory_device = "cpu"

    def __init__(self, batch: int, pace: float, text: torch.Tensor, row_pace: float = 0.0) -> None:
        self.batch = batch
        self.pace = pace
        self.row_pace = row_pace
        self.text = text.numpy()
        self.launches: list[Launch] = []
        self.full = 0  # launches of the full batch
        self.watch: Callable[[int], None] = lambda count: None  # called with the full launches

    def memory(self, ranks: int = 1) -> Memory:
        """As ``Machine.memory``."""
        return Memory("cpu", ranks)

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> Executable:
        """As ``Machine.load``; nothing is verified, because nothing is executed."""
        # Step memory only launches it; it has no instruction to execute alone.
        return cast(Executable, PacedExecutable(self, program, memory))


class PacedExecutable:
    """A program that is not executed (step_memory.AsynchronousExecutable)."""

    def __init__(self, machine: PacedMachine, program: Program, memory: Memory) -> None:
        self.program = program
        self._machine = machine
        names = ("tokens", "row_sequence", "row_position", "row_count", "logit_row", "logit_count")
        arrays = (memory[f"step.{name}"].numpy() for name in names)
        self._tokens, self._slots, self._positions, self._rows, self._logits, self._count = arrays
        self._complete = 0.0

    def launch(self, steps: int = 1) -> None:
        """Begin a launch; its tokens are there at once, as copies behind it read them."""
        machine, begin = self._machine, time.perf_counter()
        if machine.launches:
            begin = max(begin, machine.launches[-1].end)  # behind the one in progress
        else:
            # A thread's timers are late by 50 us unless it asks for less; a GPU's host spins.
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        rows, count = int(self._rows[0]), int(self._count[0])
        chosen = self._logits[:count]
        slots, positions = self._slots[chosen], self._positions[chosen]
        for step in range(steps):
            at = positions + step
            self._tokens[slots, at + 1] = machine.text[(slots + at) % len(machine.text)]
        self._complete = begin + (machine.pace + machine.row_pace * rows) * steps
        full = rows == count == machine.batch
        if full:
            machine.full += 1
            machine.watch(machine.full)
        machine.launches.append(Launch(begin, self._complete, full))

    def mark(self) -> Callable[[], None]:
        """A wait, without the GIL, until the last launch is complete."""
        complete = self._complete
        return lambda: time.sleep(max(0.0, complete - time.perf_counter()))

    def run(self, steps: int = 1) -> None:
        """Launch and wait."""
        self.launch(steps)
        self.mark()()

    def reset(self) -> None:
        """As ``Executable.reset``; there are no counters."""


def make_llm(
    batch: int, pace: float, steps: int = 1, row_pace: float = 0.0, max_rows: int | None = None
) -> tuple[LLM, PacedMachine]:
    """The shipped model with a paced machine, and step memory as a GPU has it."""
    with patch.object(runner_module, "StepMemory", DeviceStepMemory):
        llm = LLM(
            "stories",
            max_num_seqs=batch,
            max_num_batched_tokens=max_rows,
            overlap=True,
            steps_per_launch=steps,
        )
    text = llm.tokenizer.encode(__doc__ or "", add_special_tokens=False)
    machine = PacedMachine(batch, pace, torch.tensor(text, dtype=torch.int32), row_pace)
    llm.runner.machine = machine
    llm.runner._executables.clear()  # that of one token, which the constructor loads
    # The cost of a program that comes for the first time is not measured here.
    for context in (1 << bit for bit in range(llm.max_model_len.bit_length())):
        llm.runner.program(llm.runner.bucket(batch, batch, context, decode=True))
    return llm, machine


# Measurements.


def summary(llm: LLM, machine: PacedMachine, steps: int) -> dict[str, Any]:
    """The waits of the GPU in launches of the full batch, and the host's work of all launches."""
    pairs = zip(machine.launches, machine.launches[1:], strict=False)
    full = [(a, b) for a, b in pairs if a.full and b.full][WARM_UP // steps :]
    waits = sorted(max(0.0, b.begin - a.end) for a, b in full)
    if not waits:
        raise RuntimeError("the batch was never full: the clients were too slow")
    periods = [b.begin - a.begin for a, b in full]
    counters = llm.engine.counters
    plan, collect = (
        1e6 * seconds / counters.launches
        for seconds in (counters.plan_seconds, counters.collect_seconds)
    )
    return {
        "launches": len(full),
        "step_ms": round(1e3 * statistics.median(periods) / steps, 3),
        "idle_share": round(sum(waits) / sum(periods), 4),
        "idle_us": {
            "median": round(1e6 * statistics.median(waits), 1),
            "p90": round(1e6 * waits[int(0.9 * (len(waits) - 1))], 1),
            "p99": round(1e6 * waits[int(0.99 * (len(waits) - 1))], 1),
        },
        "plan_us": round(plan, 1),
        "collect_us": round(collect, 1),
        "host_share": round(1e-6 * (plan + collect) / (machine.pace * steps), 4),
    }


def run_engine(batch: int, pace: float, tokens: int, steps: int) -> dict[str, Any]:
    """Launches of the engine alone."""
    llm, machine = make_llm(batch, pace, steps)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        llm.engine.add([2 + i % 100] * (1 + i % 16), params)
    gc.collect()
    gc.freeze()  # as the server does
    while llm.engine.has_work:
        llm.engine.step()
    result = summary(llm, machine, steps)
    llm.close()
    return result


def cpu_seconds(clients: int | None = None) -> dict[str, tuple[float, float]]:
    """Seconds on a core, and waiting for one, of this process by thread, and of the clients' one.

    "loop" is the main thread, "engine" and "steps" those of the engine, "events" the one that
    writes events without the GIL.
    """
    names = {t.native_id: t.name.removeprefix("megavm-") for t in threading.enumerate()}
    names[threading.main_thread().native_id] = "loop"
    found: dict[str, tuple[float, float]] = {}
    processes = [("self", None), (str(clients), "client")]
    for process, tasks in processes if clients else processes[:1]:
        for task in Path(f"/proc/{process}/task").iterdir():
            own = names.get(int(task.name)) or (task / "comm").read_text().strip()
            name = tasks or own.removeprefix("megavm-")
            if name in ("client", "loop", "engine", "steps", "events"):
                ran, waited, _ = (task / "schedstat").read_text().split()  # nanoseconds
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + 1e-9 * int(ran), before[1] + 1e-9 * int(waited)
    return found


@dataclass(frozen=True)
class Load:
    """What clients send: each of them ``requests``, one after the other.

    ``prompt``: token ids of each; None: 1 to 16. ``tokens``: of each answer.
    """

    clients: int
    tokens: int
    prompt: int | None = None
    requests: int = 1


async def run_server(
    llm: LLM, machine: PacedMachine, batch: int, tokens: int, steps: int
) -> dict[str, Any]:
    """Launches of a server while ``batch`` clients read streams."""
    async with serving(llm) as (port, _):
        used: dict[int, dict[str, tuple[float, float]]] = {}
        clients = Clients(port, Load(batch, tokens))

        def watch(count: int) -> None:
            if count in (WARM_UP // steps, (WARM_UP + COUNTED) // steps):
                used[count] = cpu_seconds(clients.pid)

        machine.watch = watch
        await clients.answered()
        result = summary(llm, machine, steps)
        if len(used) == 2:
            (first, before), (last, after) = used.items()
            result |= per_unit("step", before, after, steps * (last - first))
        return result


async def run_waves(llm: LLM, machine: PacedMachine, batch: int, waves: int) -> dict[str, Any]:
    """A server to which ``batch`` clients send prompts all the time, ``waves`` each."""
    # One program runs all steps: what programs cost when they come first is not measured here.
    limits, largest = llm.runner.limits, llm.runner.bucket
    bucket = largest(limits.max_num_batched_tokens, batch, llm.max_model_len)
    llm.runner.bucket = lambda *sizes, **kinds: bucket  # type: ignore[method-assign]
    async with serving(llm) as (port, server):
        llm.runner.close()  # compile nothing in the background
        await Clients(port, Load(batch, OUTPUT, PROMPT)).answered()
        metrics, begun = server.service.metrics.of_engine, work_begins(server)
        machine.launches.clear()
        busy, before = metrics.busy_seconds, cpu_seconds()
        answers = await Clients(port, Load(batch, OUTPUT, PROMPT, waves)).answered()
        busy, after = metrics.busy_seconds - busy, cpu_seconds()
    launches = machine.launches
    ran = sum(launch.end - launch.begin for launch in launches)
    idle, end = 0.0, 0.0
    for launch in launches:
        # Requests that have come before it are there since:
        since = begun[bisect_right(begun, launch.begin) - 1]
        idle += max(0.0, launch.begin - max(end, since))
        end = launch.end
    first = sorted(1e3 * answer.first for answer in answers)
    return {
        "idle_share": round(idle / (idle + ran), 4),
        "idle_share_of_busy": round(1 - ran / busy, 4),
        "tokens_per_second": round(len(answers) * OUTPUT / (end - launches[0].begin)),
        "ttft_ms": {
            "median": round(statistics.median(first), 1),
            "p99": round(first[int(0.99 * (len(first) - 1))], 1),
        },
        "launches": len(launches),
        **per_unit("request", before, after, len(answers)),
    }


def work_begins(server: Server) -> list[float]:
    """The times, from now on, of requests that come while the engine has none."""
    loop, begun = server.service.engine_loop, [time.perf_counter()]
    submit = loop.submit

    def noted(generation: Generation) -> None:
        if not loop.num_sequences:
            begun.append(time.perf_counter())
        submit(generation)

    loop.submit = noted  # type: ignore[method-assign]
    return begun


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[tuple[int, Server]]:
    """A server of ``llm`` that is ready, and its port."""
    # uvicorn chooses its parser when it is imported: uvloop and httptools are hidden by now.
    from megavm.server.run import Server, listen
    from megavm.server.settings import Settings

    listener = listen("127.0.0.1", 0)
    server = Server(lambda progress: llm, Settings(("model",)), listener)
    running = asyncio.create_task(server.serve())
    while not server.started or gc.get_freeze_count() == 0:
        await asyncio.sleep(0.01)
    yield listener.getsockname()[1], server
    server.should_exit = True
    await running


def per_unit(
    unit: str,
    before: dict[str, tuple[float, float]],
    after: dict[str, tuple[float, float]],
    count: int,
) -> dict[str, dict[str, float]]:
    """Milliseconds per step or request on a core and without one, by thread (``cpu_seconds``)."""
    none = (0.0, 0.0)
    return {
        f"{key}_ms_per_{unit}": {
            name: round(1e3 * (after[name][kind] - before.get(name, none)[kind]) / count, 3)
            for name in sorted(after)
        }
        for kind, key in enumerate(("cpu", "core_wait"))
    }


# Clients.


@dataclass(frozen=True)
class ClientAnswer:
    """Events of an answer, and seconds from the request to the first of them."""

    events: int
    first: float


class Clients:
    """A process whose clients send ``load`` to a server."""

    def __init__(self, port: int, load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self._load = load
        self._results, theirs = context.Pipe()
        self._process = context.Process(target=run_clients, args=(port, load, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid or 0

    async def answered(self) -> list[ClientAnswer]:
        """All answers. Raises RuntimeError when an event is missing."""
        answers: list[ClientAnswer] = await asyncio.to_thread(self._results.recv)
        await asyncio.to_thread(self._process.join)
        events, load = sum(answer.events for answer in answers), self._load
        if events != load.clients * load.requests * load.tokens:
            raise RuntimeError(f"the clients read {events} events of {load}")
        return answers


def run_clients(port: int, load: Load, results: Connection) -> None:
    """Main function of the clients' process; sends all answers.

    It takes a fifth of the time of asyncio's streams, as it needs a core that the server may want.
    """
    os.nice(10)
    selector, answers = selectors.DefaultSelector(), []
    for number in range(load.clients):
        connection = socket.create_connection(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_READ, run_client(connection, number, load))
    for key in selector.get_map().values():
        next(key.data)
    while selector.get_map():
        for key, _ in selector.select():
            connection = cast(socket.socket, key.fileobj)
            try:
                key.data.send(connection.recv(1 << 16))
            except StopIteration as end:
                answers += end.value
                selector.unregister(connection)
                connection.close()
    results.send(answers)


def run_client(
    connection: socket.socket, number: int, load: Load
) -> Generator[None, bytes, list[ClientAnswer]]:
    """A client; takes what its connection has received, and returns its answers."""
    answers = []
    for _ in range(load.requests):
        body = {
            "model": "model",
            # No two prompts begin with the same tokens.
            "prompt": random.choices(IDS, k=load.prompt or 1 + number % 16),
            "max_tokens": load.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        content = json.dumps(body).encode()
        begin, first, events, tail = time.perf_counter(), 0.0, 0, b""
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(content) + content
        )
        while b"[DONE]" not in tail:
            received = yield
            tail = tail[-6:] + received  # an event's beginning may be in what came before
            if not received or b"HTTP/1.1 5" in tail or b"HTTP/1.1 4" in tail:
                raise RuntimeError(f"a request was not answered: {tail!r}")
            events += tail.count(b"data: {")
            if events and not first:
                first = time.perf_counter() - begin
        answers.append(ClientAnswer(events, first))
    return answers


# The command.


@dataclass(frozen=True)
class Case:
    """What is measured in a process of its own; ``waves``: None for steady decoding."""

    path: str
    batch: int
    steps: int
    writer: str
    tokens: int
    waves: int | None = None


def measure(case: Case, results: Connection) -> None:
    """Main function of the process of one case; sends the result."""
    batch, steps, waves = case.batch, case.steps, case.waves
    if case.path == "asyncio":
        for name in ("uvloop", "httptools"):
            sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    if case.path == "engine":
        results.send(run_engine(batch, 1e-3 * PACE_MS[batch], case.tokens, steps))
        return
    if case.writer == "loop":
        from megavm.server.service import Service

        Service.plain_writer = property(lambda self: None)  # type: ignore[assignment,method-assign]
    factory = None
    if case.path == "uvloop":
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        if waves is None:
            llm, machine = make_llm(batch, 1e-3 * PACE_MS[batch], steps)
            result = runner.run(run_server(llm, machine, batch, case.tokens, steps))
        else:
            llm, machine = make_llm(batch, STEP_SECONDS, steps, ROW_SECONDS, MAX_ROWS)
            result = runner.run(run_waves(llm, machine, batch, waves))
        results.send({**result, "event_loop": runner.get_loop().__module__.partition(".")[0]})


def measure_apart(case: Case, limit: float = 300.0) -> dict[str, Any]:
    """``measure`` in a process of its own. Raises RuntimeError when it fails or takes too long."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(case, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            raise RuntimeError(f"{case.path} at batch {case.batch} took more than {limit:.0f} s")
        result: dict[str, Any] = ours.recv()
    except EOFError as error:
        raise RuntimeError(f"{case.path} at batch {case.batch} failed") from error
    finally:
        process.terminate()
        process.join()
    return result


def measure_waves(options: argparse.Namespace) -> int:
    """Measure waves and print a table."""
    print("    path batch    idle of busy  tokens/s  TTFT ms: median    p99  CPU ms per request")
    results = []
    for _, path, batch in itertools.product(range(options.rounds), options.paths, options.batches):
        case = Case(path, batch, STEPS_PER_LAUNCH, "thread", OUTPUT, options.waves)
        r = measure_apart(case)
        results.append({"path": path, "batch": batch, **r})
        print(f"{path:>8} {batch:5} {r['idle_share']:7.1%} {r['idle_share_of_busy']:7.1%} ", end="")
        print(f"{r['tokens_per_second']:9} ", end="")
        print(f"{r['ttft_ms']['median']:16} {r['ttft_ms']['p99']:6} ", end="")
        print(*(f"{name} {ms}" for name, ms in r["cpu_ms_per_request"].items()), flush=True)
    if options.save:
        report = {"load_average": os.getloadavg()[0], "waves": options.waves, "results": results}
        print(f"saved {save(options.save, report)}")
    return 0


def measure_steps(options: argparse.Namespace) -> int:
    """Measure steady decoding and print a table; returns 1 if the host is slower than allowed."""
    print(
        f"{'path':>8} {'writer':>6} {'batch':>5} {'steps':>6} {'pace ms':>8} {'step ms':>8} ",
        end="",
    )
    print(f"{'idle':>7} {'plan us':>8} {'collect us':>11} {'host':>7}  CPU ms per step")
    results = []
    for path in options.paths:
        for batch, steps, writer in itertools.product(
            options.batches,
            options.steps_per_launch,
            options.writers[:1] if path == "engine" else options.writers,
        ):
            r = measure_apart(Case(path, batch, steps, writer, options.tokens))
            pace = PACE_MS[batch]
            sizes = {"batch": batch, "steps_per_launch": steps, "pace_ms": pace}
            results.append({"path": path, "writer": writer, **sizes, **r})
            print(f"{path:>8} {writer:>6} {batch:5} {steps:6} {pace:8} {r['step_ms']:8} ", end="")
            print(f"{r['idle_share']:7.1%} {r['plan_us']:8} {r['collect_us']:11} ", end="")
            used = r.get("cpu_ms_per_step", {}).items()
            print(f"{r['host_share']:7.1%} ", *(f"{name} {ms}" for name, ms in used), flush=True)
    late = any(r["idle_share"] > IDLE_LIMIT or r["host_share"] > HOST_LIMIT for r in results)
    if options.save:
        limits = {"idle_share": IDLE_LIMIT, "host_share": HOST_LIMIT}
        report = {"load_average": os.getloadavg()[0], "limits": limits, "within_limits": not late}
        print(f"saved {save(options.save, {**report, 'results': results})}")
    return 1 if late else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; returns 1 if the host is slower than the limits allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", choices=PACE_MS, default=list(PACE_MS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--steps-per-launch", type=int, nargs="+", default=[1])
    parser.add_argument("--writers", nargs="+", choices=("thread", "loop"), default=["thread"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each sequence")
    parser.add_argument("--waves", type=int, metavar="N", help="N requests of each client instead")
    parser.add_argument("--rounds", type=int, default=1, help="of waves")
    parser.add_argument(
        "--save", nargs="?", const="host_pace", metavar="NAME", help="write results/NAME.json"
    )
    options = parser.parse_args(arguments)
    if options.waves is None:
        return measure_steps(options)
    options.paths = [path for path in options.paths if path != "engine"]
    return measure_waves(options)


if __name__ == "__main__":
    raise SystemExit(main())
