"""What requests cost the server's threads, and what garbage collections take of it. Needs no GPU.

    python benchmarks/server_requests.py [--clients 256] [--waves 3] [--output 128]
                                         [--objects 700 10000] [--rounds 3] [--save]

The machine is that of paced.py, which executes nothing; a step takes 4.5 ms, as with 256
requests on an H200. Each client, all in a process of their own, sends requests of 160 token ids one
after the other over one connection and reads streams. Times are of a core, in ms per request: of
the event loop, of the engine's thread, which shares the GIL with it, and of the writer of
events. ``collect_ms``: garbage collections of a run, which are in these times, and the longest.
``--objects``: objects made between two collections. The server's own number is 10,000, Python's
is 700; rounds take turns. uvloop and httptools are used where they are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from environment import save
from megavm.garbage import is_frozen
from paced import cpu_seconds, make_llm

PROMPT: Final = 160
PACE: Final = 4.5e-3
STEPS_PER_LAUNCH: Final = 8
THREADS: Final = ("loop", "engine", "events")


def run_clients(port: int, clients: int, waves: int, output: int, results: Connection) -> None:
    """Main function of the clients' process; sends the TTFT of every request in seconds."""

    async def one(number: int) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        prompt = [2 + (7 * number + i) % 100 for i in range(PROMPT)]
        body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        found = []
        for _ in range(waves):
            begin, first, tail = time.perf_counter(), 0.0, b""
            writer.write(head.encode() + content)
            while b"data: [DONE]" not in tail:
                data = await reader.read(1 << 16)
                if not data:
                    raise RuntimeError(f"a request was not answered: {tail!r}")
                if not first and b"data: " in data:
                    first = time.perf_counter()
                tail = tail[-40:] + data
            found.append(first - begin)
        writer.close()
        return found

    async def everyone() -> list[float]:
        found = await asyncio.gather(*map(one, range(clients)))
        return [seconds for own in found for seconds in own]

    results.send(asyncio.run(everyone()))


async def run_server(clients: int, waves: int, output: int, objects: int) -> dict[str, Any]:
    """Times of all requests of a new server."""
    from megavm.server.run import Server, listen
    from megavm.server.settings import Settings

    llm, _ = make_llm(clients, PACE, STEPS_PER_LAUNCH)
    listener = listen("127.0.0.1", 0)
    server = Server(lambda progress: llm, Settings(("model",), max_queue=clients), listener)
    serving = asyncio.create_task(server.serve())
    while not server.started or not is_frozen():
        await asyncio.sleep(0.1)
    # What programs cost is not measured here.
    llm.runner.close()
    sizes = [1 << bit for bit in range(9) if 1 << bit <= clients]
    for rows in (256, 512):
        for count in sizes:
            llm.runner.program(llm.runner.bucket(rows, count, 256))
    gc.set_threshold(objects)
    collections: list[float] = []  # seconds; negative while one runs

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(-time.thread_time())
        else:
            collections[-1] += time.thread_time()

    gc.callbacks.append(note)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (listener.getsockname()[1], clients, waves, output, theirs)
    process = context.Process(target=run_clients, args=arguments, daemon=True)
    process.start()
    theirs.close()
    own = os.getpid()
    before = cpu_seconds(own)
    ttft = await asyncio.to_thread(ours.recv)
    after = cpu_seconds(own)
    gc.callbacks.remove(note)
    await asyncio.to_thread(process.join)
    server.should_exit = True
    await serving
    return {
        "objects": objects,
        "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "ttft_ms": round(1e3 * statistics.median(ttft), 1),
        "ms_per_request": {
            name: round(1e3 * (after[name][0] - before.get(name, (0.0,))[0]) / len(ttft), 3)
            for name in THREADS
        },
        "collections": len(collections),
        "collect_ms": round(1e3 * sum(collections), 1),
        "longest_collection_ms": round(1e3 * max(collections, default=0.0), 1),
    }


def measure(clients: int, waves: int, output: int, objects: int, results: Connection) -> None:
    """Main function of a server's process; sends the result."""
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        results.send(runner.run(run_server(clients, waves, output, objects)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--waves", type=int, default=3, help="requests of each client")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--objects", type=int, nargs="+", default=[700, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/server_requests.json")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    results = []
    for _ in range(options.rounds):
        for objects in options.objects:
            ours, theirs = context.Pipe()
            load = (options.clients, options.waves, options.output)
            process = context.Process(target=measure, args=(*load, objects, theirs))
            process.start()
            theirs.close()
            try:
                results.append(ours.recv())
            except EOFError as error:
                raise RuntimeError("the server failed") from error
            finally:
                process.join()
            print(results[-1], flush=True)
    if options.save:
        sizes = {name: getattr(options, name) for name in ("clients", "waves", "output")}
        report = {"load_average": os.getloadavg()[0], **sizes, "results": results}
        print(f"saved {save('server_requests', report)}")


if __name__ == "__main__":
    main()
