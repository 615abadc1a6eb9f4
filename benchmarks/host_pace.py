"""How long a GPU waits for its host, at the pace of a GPU that none is needed for.

    python benchmarks/host_pace.py [--batches 1 8 64 256] [--paths engine asyncio uvloop]
                                   [--steps-per-launch 1 8] [--writers thread loop] [--save [NAME]]

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
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import torch

from environment import save
from megavm import LLM, SamplingParams
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.run import runner as runner_module
from megavm.vm.machine import Executable
from megavm.vm.memory import Memory
from megavm.vm.program import Program

PACE_MS: Final = {1: 0.6, 8: 0.7, 64: 1.2, 256: 2.4}  # time of a step, by batch
IDLE_LIMIT: Final = 0.05
HOST_LIMIT: Final = 0.10  # plan and collect, as a share of the pace
TOKENS: Final = 600  # of each sequence
WARM_UP: Final = 50  # first steps of a full batch, not counted
COUNTED: Final = 200  # following steps, whose CPU time is measured
PATHS: Final = ("engine", "asyncio", "uvloop")
PR_SET_TIMERSLACK: Final = 29


@dataclass
class Launch:
    """Times of a launch in seconds, by ``time.perf_counter``; ``full``: a decode step of all."""

    begin: float
    end: float
    full: bool


class PacedMachine:
    """A machine whose launches take ``pace`` seconds and choose tokens of ``text``, an int32 list.

    Slot s reads the text from token s on.
    """

    name = "cpu"
    memory_device = "cpu"

    def __init__(self, batch: int, pace: float, text: torch.Tensor) -> None:
        self.batch = batch
        self.pace = pace
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
        self._complete = begin + machine.pace * steps
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


def make_llm(batch: int, pace: float, steps: int = 1) -> tuple[LLM, PacedMachine]:
    """The shipped model with a paced machine, and step memory as a GPU has it."""
    with patch.object(runner_module, "StepMemory", DeviceStepMemory):
        llm = LLM("stories", max_num_seqs=batch, overlap=True, steps_per_launch=steps)
    text = llm.tokenizer.encode(__doc__ or "", add_special_tokens=False)
    machine = PacedMachine(batch, pace, torch.tensor(text, dtype=torch.int32))
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


def cpu_seconds(clients: int) -> dict[str, tuple[float, float]]:
    """Seconds on a core, and waiting for one, of the clients' process and of this one by thread.

    "loop" is the main thread, "engine" and "steps" those of the engine, "events" the one that
    writes events without the GIL.
    """
    names = {t.native_id: t.name.removeprefix("megavm-") for t in threading.enumerate()}
    names[threading.main_thread().native_id] = "loop"
    found: dict[str, tuple[float, float]] = {}
    for process, tasks in (("self", None), (clients, "client")):
        for task in Path(f"/proc/{process}/task").iterdir():
            own = names.get(int(task.name)) or (task / "comm").read_text().strip()
            name = tasks or own.removeprefix("megavm-")
            if name in ("client", "loop", "engine", "steps", "events"):
                ran, waited, _ = (task / "schedstat").read_text().split()  # nanoseconds
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + 1e-9 * int(ran), before[1] + 1e-9 * int(waited)
    return found


async def run_server(
    llm: LLM, machine: PacedMachine, batch: int, tokens: int, steps: int
) -> dict[str, Any]:
    """Launches of a server while ``batch`` clients read streams."""
    # uvicorn chooses its parser when it is imported: uvloop and httptools are hidden by now.
    from megavm.server.run import Server, listen
    from megavm.server.settings import Settings

    listener = listen("127.0.0.1", 0)
    server = Server(lambda progress: llm, Settings(("model",)), listener)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    await server.service.loaded()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = listener.getsockname()[1]
    clients = context.Process(target=run_clients, args=(port, batch, tokens, theirs), daemon=True)
    clients.start()
    used: dict[int, dict[str, tuple[float, float]]] = {}

    def watch(count: int) -> None:
        if count in (WARM_UP // steps, (WARM_UP + COUNTED) // steps):
            used[count] = cpu_seconds(clients.pid or 0)

    machine.watch = watch
    events = await asyncio.to_thread(ours.recv)
    await asyncio.to_thread(clients.join)
    if events != batch * tokens:
        raise RuntimeError(f"the clients read {events} events of {batch * tokens} tokens")
    result = summary(llm, machine, steps)
    if len(used) == 2:
        (first, before), (last, after) = used.items()
        for kind, key in enumerate(("cpu_ms_per_step", "core_wait_ms_per_step")):
            result[key] = {
                name: round(
                    1e3 * (after[name][kind] - before[name][kind]) / steps / (last - first), 3
                )
                for name in sorted(after)
            }
    result["event_loop"] = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    server.should_exit = True
    await serving
    return result


def run_clients(port: int, clients: int, tokens: int, results: Connection) -> None:
    """Main function of the clients' process; sends the number of events that they have read."""

    async def one(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        body = {
            "model": "model",
            "prompt": [2 + number % 100] * (1 + number % 16),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        content = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        events, tail = 0, b""
        while data := await reader.read(1 << 16):
            data = tail + data
            events += data.count(b"data: {")
            tail = data[-6:]  # an event's beginning that the next read completes
        writer.close()
        return events

    async def everyone() -> int:
        return sum(await asyncio.gather(*map(one, range(clients))))

    results.send(asyncio.run(everyone()))


def measure(
    path: str, batch: int, pace: float, tokens: int, steps: int, writer: str, results: Connection
) -> None:
    """Main function of the process of one path and batch; sends the result."""
    if path == "asyncio":
        for name in ("uvloop", "httptools"):
            sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    if path == "engine":
        results.send(run_engine(batch, pace, tokens, steps))
        return
    if writer == "loop":
        from megavm.server.service import Service

        Service.plain_writer = property(lambda self: None)  # type: ignore[assignment,method-assign]
    llm, machine = make_llm(batch, pace, steps)
    factory = None
    if path == "uvloop":
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        results.send(runner.run(run_server(llm, machine, batch, tokens, steps)))


def measure_apart(
    path: str, batch: int, tokens: int, steps: int, writer: str = "thread", limit: float = 300.0
) -> dict[str, Any]:
    """``measure`` in a process of its own. Raises RuntimeError when it fails or takes too long."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    pace = 1e-3 * PACE_MS[batch]
    process = context.Process(
        target=measure, args=(path, batch, pace, tokens, steps, writer, theirs)
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            raise RuntimeError(f"{path} at batch {batch} took more than {limit:.0f} s")
        result: dict[str, Any] = ours.recv()
    except EOFError as error:
        raise RuntimeError(f"{path} at batch {batch} failed") from error
    finally:
        process.terminate()
        process.join()
    sizes = {"batch": batch, "steps_per_launch": steps, "pace_ms": PACE_MS[batch]}
    return {"path": path, "writer": writer, **sizes, **result}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; returns 1 if the host is slower than the limits allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", choices=PACE_MS, default=list(PACE_MS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--steps-per-launch", type=int, nargs="+", default=[1])
    parser.add_argument("--writers", nargs="+", choices=("thread", "loop"), default=["thread"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each sequence")
    parser.add_argument(
        "--save", nargs="?", const="host_pace", metavar="NAME", help="write results/NAME.json"
    )
    options = parser.parse_args(arguments)
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
            r = measure_apart(path, batch, options.tokens, steps, writer)
            results.append(r)
            print(
                f"{path:>8} {writer:>6} {batch:5} {steps:6} {r['pace_ms']:8} {r['step_ms']:8} ",
                end="",
            )
            print(f"{r['idle_share']:7.1%} {r['plan_us']:8} {r['collect_us']:11} ", end="")
            used = r.get("cpu_ms_per_step", {}).items()
            print(f"{r['host_share']:7.1%} ", *(f"{name} {ms}" for name, ms in used), flush=True)
    late = any(r["idle_share"] > IDLE_LIMIT or r["host_share"] > HOST_LIMIT for r in results)
    if options.save:
        limits = {"idle_share": IDLE_LIMIT, "host_share": HOST_LIMIT}
        report = {"load_average": os.getloadavg()[0], "limits": limits, "within_limits": not late}
        print(f"saved {save(options.save, {**report, 'results': results})}")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
