"""A server or an engine whose machine has the pace of a GPU, and clients: for host benchmarks.

The engine, the launches' bookkeeping and the server are the real ones, with the shipped model's
tokenizer. Only the machine is replaced. A *paced machine* executes nothing: a launch chooses the
next tokens of a text, and is complete when a GPU would be, for which its thread waits without the
GIL. Its copies keep the GIL, as those of a GPU do (vm/cuda/copies.py).

host_pace.py and host_waves.py use it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import logging
import multiprocessing
import os
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from unittest.mock import patch

import torch

from megavm import LLM
from megavm.garbage import is_frozen
from megavm.scheduler.engine import step_memory
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.run import runner as runner_module
from megavm.vm.cuda.copies import HostCopies, Words
from megavm.vm.machine import Executable
from megavm.vm.memory import Memory
from megavm.vm.program import Program

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from megavm.server.run import Server

EVENT_LOOPS: Final = ("asyncio", "uvloop")  # without uvloop and httptools, and with both
PR_SET_TIMERSLACK: Final = 29
THREADS: Final = ("loop", "receiver", "sender", "events", "engine", "transfer", "client")
_IDS: Final = range(2, 102)  # token ids of the prompts
_KEPT: Final = 500  # numpy gives up the GIL to copy more elements than that


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


class PacedCopies(HostCopies):
    """Copies that keep the GIL."""

    beside = True

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Copies.send``."""
        target.numpy().data[:] = source.numpy().data

    def gather(self, words: Words, table: torch.Tensor, count: int) -> None:
        """See ``Copies.gather``."""
        cells = table.numpy()
        for part in _parts(count):
            words.value_array[part] = cells[words.place_array[part]]

    def scatter(self, words: Words, table: torch.Tensor, count: int) -> None:
        """See ``Copies.scatter``."""
        cells = table.numpy()
        for part in _parts(count):
            cells[words.place_array[part]] = words.value_array[part]


def _parts(count: int) -> list[slice]:
    return [slice(begin, min(begin + _KEPT, count)) for begin in range(0, count, _KEPT)]


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
    with (
        patch.object(runner_module, "StepMemory", DeviceStepMemory),
        patch.object(step_memory, "HostCopies", PacedCopies),
    ):
        llm = LLM(
            "stories",
            max_num_seqs=batch,
            max_num_batched_tokens=max_rows,
            overlap=True,
            steps_per_launch=steps,
        )
    llm.checkpoint.generation["do_sample"] = False  # a server has greedy programs when it is ready
    text = llm.tokenizer.encode(__doc__ or "", add_special_tokens=False)
    machine = PacedMachine(batch, pace, torch.tensor(text, dtype=torch.int32), row_pace)
    llm.runner.programs.use(machine)
    # The cost of a program that comes for the first time is not measured here.
    for context in (1 << bit for bit in range(llm.max_model_len.bit_length())):
        llm.runner.programs.program(llm.runner.programs.bucket(batch, batch, context, decode=True))
    return llm, machine


@dataclass(frozen=True)
class Work:
    """What an engine and its machine have done, at its end."""

    launches: list[Launch]
    plan_seconds: float
    collect_seconds: float
    num_launches: int


@dataclass
class PacedServer:
    """A server that is ready; its engine has a paced machine, in a process of its own."""

    port: int
    server: Server
    engine: int  # id of the engine's process
    _full: Synchronized[int]
    _results: Connection
    _work: Work | None = None

    @property
    def full_launches(self) -> int:
        """Launches of the full batch so far."""
        return self._full.value

    def work(self) -> Work:
        """What the engine has done, when it has ended."""
        if self._work is None:
            self._work = self._results.recv()
        return self._work


@asynccontextmanager
async def serving(
    make: Callable[[], tuple[LLM, PacedMachine]], **settings: Any
) -> AsyncIterator[PacedServer]:
    """A server of the model that `make` makes, in the engine's process.

    The caller's process must not have threads yet.
    """
    # uvicorn chooses its parser when it is imported: uvloop and httptools are hidden by now.
    from megavm.server.engine.transport import EngineProcess
    from megavm.server.run import Server, listen
    from megavm.server.settings import Settings

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    full = context.Value("i", 0)

    def load(progress: object) -> LLM:
        llm, machine = make()
        llm.runner.close()  # it compiles nothing in the background any more
        close, counters = llm.close, llm.engine.counters

        def count(launches: int) -> None:
            full.value = launches

        def close_and_tell() -> None:
            seconds = counters.plan_seconds, counters.collect_seconds
            theirs.send(Work(machine.launches, *seconds, counters.launches))
            close()

        machine.watch = count
        llm.close = close_and_tell  # type: ignore[method-assign]
        return llm

    transport = EngineProcess(load, logging.WARNING)
    theirs.close()
    listener = listen("127.0.0.1", 0)
    server = Server(transport, Settings(("model",), **settings), listener)
    running = asyncio.create_task(server.serve())
    while not server.started or not is_frozen():
        if running.done():
            raise RuntimeError("the server has ended")
        await asyncio.sleep(0.01)
    process = server.service.model.facts.process
    assert process is not None
    made = PacedServer(listener.getsockname()[1], server, process, full, ours)
    try:
        yield made
    finally:
        server.should_exit = True
        await running
        transport.give_up()


# Processes.


def run_with(event_loop: str, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The result of ``work`` on one of EVENT_LOOPS, and the name of the loop's package.

    The server must not be imported yet: uvicorn chooses its parser then.
    """
    if event_loop == "asyncio":
        for name in ("uvloop", "httptools"):
            sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    factory = None
    if event_loop == "uvloop":
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        result = runner.run(work)
        return {**result, "event_loop": runner.get_loop().__module__.partition(".")[0]}


def measure_apart(
    measure: Callable[..., dict[str, Any]], *arguments: Any, limit: float = 300.0
) -> dict[str, Any]:
    """What ``measure`` returns in a process of its own.

    Raises RuntimeError when it fails or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, measure, arguments))
    process.start()
    theirs.close()
    what = ", ".join(map(str, arguments))
    try:
        if not ours.poll(limit):
            raise RuntimeError(f"{what}: it took more than {limit:.0f} s")
        result: dict[str, Any] = ours.recv()
    except EOFError as error:
        raise RuntimeError(f"{what}: it failed") from error
    finally:
        process.terminate()
        process.join()
    return result


def _send(
    results: Connection, measure: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    results.send(measure(*arguments))


def cpu_seconds(engine: int, clients: int | None = None) -> dict[str, tuple[float, float]]:
    """Seconds on a core, and waiting for one, of the threads of all processes.

    In this process "loop" is the main thread, "events" the one that writes events without the GIL,
    "receiver" and "sender" carry messages; in the engine's process "engine" is the main thread, and
    "transfer" are the others. "client": all threads of the clients' process.
    """
    names = {t.native_id: t.name.removeprefix("megavm-") for t in threading.enumerate()}
    names[threading.main_thread().native_id] = "loop"
    found: dict[str, tuple[float, float]] = {}
    for process in ("self", engine, *([clients] if clients else [])):
        for task in Path(f"/proc/{process}/task").iterdir():
            if process == "self":
                own = names.get(int(task.name)) or (task / "comm").read_text().strip()
                name = own.removeprefix("megavm-")
            elif process == engine:
                name = "engine" if task.name == str(engine) else "transfer"
            else:
                name = "client"
            if name in THREADS:
                ran, waited, _ = (task / "schedstat").read_text().split()  # nanoseconds
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + 1e-9 * int(ran), before[1] + 1e-9 * int(waited)
    return found


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
class Load:
    """What clients send: each of them ``requests``, one after the other.

    ``prompt``: token ids of each; None: 1 to 16. ``tokens``: of each answer.
    """

    clients: int
    tokens: int
    prompt: int | None = None
    requests: int = 1


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
            "prompt": random.choices(_IDS, k=load.prompt or 1 + number % 16),
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
