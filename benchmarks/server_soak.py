"""A server under random load, and under overload.

    python benchmarks/server_soak.py [--requests 2500] [--overload-seconds 300] [--save]

First, 64 clients send requests of many kinds; some cancel or disconnect at a random moment. Every
answer must equal that of `LLM.generate` for the request alone, token for token. Afterwards all KV
blocks must be free and no task may be left. Then more clients than the queue has room for send
requests without a pause. The server must answer 429 to requests that it cannot take, its memory
must stay constant within 5 % after the first minute, and no callback may block its event loop for
more than 50 ms.

The server runs in this process, the clients in another. On a busy computer a callback may only be
waiting for a core, so the CPU time of its thread is reported beside its duration.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

from environment import save
from megavm import LLM, SamplingParams
from megavm.server.engine.transport import EngineThread
from megavm.server.run import Server, listen
from megavm.server.settings import Settings

CLIENTS: Final = 64
OVERLOAD_CLIENTS: Final = 300
MEMORY_LIMIT: Final = 0.05
LATE_LIMIT_MS: Final = 50.0
BEAT_SECONDS: Final = 0.01
ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_blocks": 72,  # too few for all sequences, so that some are preempted
}
OPENINGS: Final = ("Once upon a time", "The little fox", "One day, a boy named Tim", "A", "It was")


# The clients.


@dataclass
class Counts:
    """Number of requests by outcome; ``wrong`` describes failures."""

    answered: int = 0
    abandoned: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def workload(seed: int, count: int) -> list[dict[str, Any]]:
    """Bodies of greedy requests with random prompts and options."""
    chance = random.Random(seed)
    bodies = []
    for _ in range(count):
        prompt = " ".join(chance.choices(OPENINGS, k=chance.randint(1, 6)))
        body: dict[str, Any] = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": chance.choice((1, 5, 20, 60, 120)),
            "ignore_eos": chance.random() < 0.5,
        }
        if chance.random() < 0.2:
            body["n"] = 2
        if chance.random() < 0.2:
            body["stop"] = [chance.choice((".", " the", "and"))]
        if chance.random() < 0.2:
            body["logprobs"] = 1
        bodies.append(body)
    return bodies


def expected(bodies: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Token ids of `LLM.generate` for each request alone, by completion."""
    results = []
    with LLM("stories", dtype="float32") as llm:
        for body in bodies:
            params = {k: v for k, v in body.items() if k not in ("prompt", "temperature")}
            output = llm.generate(body["prompt"], SamplingParams(temperature=0.0, **params))[0]
            results.append([o.token_ids for o in output.outputs])
    return results


async def send(port: int, body: dict[str, Any]) -> tuple[Any, Any, int]:
    """Send a request and read the head of its answer: reader, writer, status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    content = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    )
    head = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, int(head.split(b" ", 2)[1])


def read_answer(content: bytes, body: dict[str, Any]) -> list[list[int]]:
    """Token ids of an answer, by completion."""
    found: list[list[int]] = [[] for _ in range(body.get("n", 1))]
    if not body["stream"]:
        for choice in json.loads(content)["choices"]:
            found[choice["index"]] = choice["token_ids"]
        return found
    # Lines of the chunked encoding (sizes) do not begin with "data: ".
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] += choice["token_ids"]
    if b"data: [DONE]" not in content:
        raise ValueError("a stream has ended without [DONE]")
    return found


async def one_request(
    port: int, body: dict[str, Any], tokens: list[list[int]], chance: random.Random, counts: Counts
) -> None:
    """Send one request; check its answer, or disconnect at a random moment."""
    body = {**body, "stream": chance.random() < 0.5, "return_token_ids": True}
    leave = chance.random() < 0.3
    writer: Any = None
    try:
        async with asyncio.timeout(chance.uniform(0, 0.5) if leave else 300):
            reader, writer, status = await send(port, body)
            content = await reader.read(-1)
    except TimeoutError:
        counts.abandoned += 1
        return
    finally:
        if writer is not None:
            writer.close()
    if status == 429:
        counts.refused += 1
    elif status != 200:
        counts.wrong.append(f"status {status}: {content[:200]!r}")
    elif read_answer(content, body) != tokens:
        counts.wrong.append(f"other tokens than alone: {body}")
    else:
        counts.answered += 1


async def random_load(port: int, requests: int, seed: int, kinds: int = 60) -> Counts:
    """Send requests of many kinds from `CLIENTS` clients, and check every answer."""
    bodies = workload(seed, kinds)
    tokens = expected(bodies)
    counts, left = Counts(), iter(range(requests))

    async def client(number: int) -> None:
        chance = random.Random(seed + 1 + number)
        for _ in left:
            which = chance.randrange(kinds)
            await one_request(port, bodies[which], tokens[which], chance, counts)

    await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return counts


async def overload(port: int, seconds: float, seed: int) -> Counts:
    """Send requests without a pause from `OVERLOAD_CLIENTS` clients, more than the queue holds."""
    counts, end = Counts(), time.monotonic() + seconds

    async def client(number: int) -> None:
        chance = random.Random(seed + number)
        while time.monotonic() < end:
            body = {
                "prompt": chance.choices(range(10, 2000), k=chance.randint(1, 200)),
                "max_tokens": chance.randint(1, 100),
                "ignore_eos": True,
                "stream": chance.random() < 0.5,
                "seed": number,
            }
            reader, writer, status = await send(port, body)
            content = await reader.read(-1)
            writer.close()
            if status == 429:
                counts.refused += 1
                await asyncio.sleep(chance.uniform(0.1, 0.5))
            elif status == 200 and b'"error"' not in content:
                counts.answered += 1
            else:
                counts.wrong.append(f"status {status}: {content[:200]!r}")

    await asyncio.gather(*(client(i) for i in range(OVERLOAD_CLIENTS)))
    return counts


def run_clients(kind: str, port: int, amount: float, seed: int, results: Any) -> None:
    """Main function of the clients' process: generate the load, put the Counts into ``results``."""
    load = (
        random_load(port, int(amount), seed) if kind == "random" else overload(port, amount, seed)
    )
    results.put(asyncio.run(load))


# The server.


class WatchedServer:
    """A server in a thread, with measurements of its event loop.

    Attributes:
        late: (delay in ms, CPU ms meanwhile) of each wake-up of a task that sleeps for 10 ms.
        longest: (ms, CPU ms, name) of callbacks that took more than 10 ms.
    """

    def __init__(self, settings: Settings, engine: dict[str, Any]) -> None:
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.engine = EngineThread(lambda progress: LLM("stories", **engine))
        self._server = Server(self.engine, settings, listener)
        self.service = self._server.service
        self.late: list[tuple[float, float]] = []
        self.longest: list[tuple[float, float, str]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._ready = threading.Event()
        self._thread.start()
        if not self._ready.wait(60):
            raise RuntimeError("the server does not get ready")

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._time_callbacks()
        tasks = [asyncio.create_task(self._announce()), asyncio.create_task(self._beat())]
        await self._server.serve()
        for task in tasks:
            task.cancel()

    def _time_callbacks(self) -> None:
        run, thread, longest = asyncio.Handle._run, threading.get_ident(), self.longest

        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != thread:
                run(handle)
                return
            begin, used = time.perf_counter(), time.thread_time()
            run(handle)
            wall = 1e3 * (time.perf_counter() - begin)
            if wall > 10:
                longest.append((wall, 1e3 * (time.thread_time() - used), repr(handle)[:200]))

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]

    async def _announce(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        await self.service.loaded()
        await asyncio.sleep(0.5)
        self._ready.set()

    async def _beat(self) -> None:
        while True:
            begin, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_SECONDS)
            late = time.perf_counter() - begin - BEAT_SECONDS
            self.late.append((1e3 * late, 1e3 * (time.thread_time() - used)))

    def forget(self) -> None:
        """Drop all measurements so far."""
        self.late.clear()
        self.longest.clear()

    def num_tasks(self) -> int:
        """Number of tasks of the event loop."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(30)

    def wait_idle(self, seconds: float) -> None:
        """Wait until no sequence is left, for at most ``seconds``."""
        end = time.monotonic() + seconds
        while self.service.engine.num_sequences and time.monotonic() < end:
            time.sleep(0.05)

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join(60)


def resident_megabytes() -> float:
    """Resident memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def lateness(server: WatchedServer) -> dict[str, Any]:
    """Delays of the event loop and its longest callbacks, in ms."""
    times = sorted(wall for wall, _ in server.late)
    longest = sorted(server.longest, reverse=True)
    return {
        "late_p50_ms": round(statistics.median(times), 3),
        "late_p99_ms": round(times[int(0.99 * (len(times) - 1))], 3),
        "late_max_ms": round(times[-1], 3),
        "longest_callback_ms": round(longest[0][0], 1) if longest else 10.0,
        "longest_callback_cpu_ms": round(max((cpu for _, cpu, _ in longest), default=10.0), 1),
        "longest_callbacks": [[round(w, 1), round(c, 1), name] for w, c, name in longest[:5]],
    }


def run_load(
    server: WatchedServer, kind: str, amount: float, seed: int
) -> tuple[Counts, list[tuple[float, float]]]:
    """Run the clients; returns their Counts and samples (seconds, MB) of this process's memory."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=run_clients, args=(kind, server.port, amount, seed, results))
    process.start()
    memory: list[tuple[float, float]] = []
    begin = time.monotonic()
    while process.is_alive() and results.empty():
        memory.append((time.monotonic() - begin, resident_megabytes()))
        time.sleep(1)
    counts = results.get(timeout=60)
    process.join(60)
    return counts, memory


def soak(requests: int, seed: int) -> dict[str, Any]:
    """Run the random load; `wrong` in the result describes all failures."""
    server = WatchedServer(Settings(("stories",), max_queue=256), ENGINE)
    try:
        tasks = server.num_tasks()
        server.forget()
        begin = time.perf_counter()
        counts, _ = run_load(server, "random", requests, seed)
        seconds = time.perf_counter() - begin
        server.wait_idle(60)
        time.sleep(0.5)
        engine = server.engine.core.llm.engine
        engine.blocks.check()
        wrong = counts.wrong[:5]
        if engine.blocks.num_held:
            wrong.append(f"{engine.blocks.num_held} KV blocks are held")
        if server.num_tasks() > tasks:
            wrong.append(f"{server.num_tasks() - tasks} tasks are left")
        return {
            "requests": requests,
            "clients": CLIENTS,
            "answered": counts.answered,
            "abandoned": counts.abandoned,
            "refused": counts.refused,
            "wrong": wrong,
            "preemptions": engine.planner.preemptions,
            "kv_blocks_held": engine.blocks.num_held,
            "seconds": round(seconds, 1),
            "event_loop": lateness(server),
        }
    finally:
        server.close()


def overloaded(seconds: float, seed: int) -> dict[str, Any]:
    """Run the overload."""
    server = WatchedServer(Settings(("stories",), max_queue=64), ENGINE)
    try:
        server.forget()
        counts, memory = run_load(server, "overload", seconds, seed)
        later = [megabytes for when, megabytes in memory if when > min(60, seconds / 2)]
        return {
            "seconds": seconds,
            "clients": OVERLOAD_CLIENTS,
            "answered": counts.answered,
            "refused": counts.refused,
            "wrong": counts.wrong[:5],
            "memory_mb": [
                round(megabytes, 1) for _, megabytes in memory[:: max(len(memory) // 20, 1)]
            ],
            "memory_growth": round(max(later) / later[0] - 1, 4),
            "event_loop": lateness(server),
        }
    finally:
        server.close()


def main() -> int:
    """Run both loads and print the results; returns 1 if a check or a limit fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--overload-seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/server_soak.json")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, Any] = {"load_average": load}
    results["random_load"] = soak(arguments.requests, arguments.seed)
    print(json.dumps(results["random_load"]))
    results["overload"] = overloaded(arguments.overload_seconds, arguments.seed)
    print(json.dumps(results["overload"]))
    bad = results["random_load"]["wrong"] or results["overload"]["wrong"]
    bad = bad or results["overload"]["memory_growth"] > MEMORY_LIMIT
    bad = bad or results["overload"]["event_loop"]["longest_callback_ms"] > LATE_LIMIT_MS
    results["within_limits"] = not bad
    if arguments.save:
        print(f"saved {save('server_soak', results)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
