"""Tokens per second of the server's streams alone, without model and engine.

    python benchmarks/server_sse.py [--streams 16] [--tokens 4000] [--save]

Every stream gets one token after the other, as from the steps of an engine. Each token takes the
whole path: wake-up, JSON, HTTP, socket. The client runs in its own process, reads and counts. The
rate per CPU second is the throughput of one core without other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from types import SimpleNamespace
from typing import Any, Final, cast

import uvicorn
from starlette.types import Receive, Scope, Send

from environment import save
from megavm.sampling_params import SamplingParams
from megavm.server.chat import ChatAnswer
from megavm.server.engine.generation import Generation, Part
from megavm.server.protocol import ChatRequest
from megavm.server.service import Service
from megavm.server.sse import EventStream

LIMIT: Final = 50_000
PATHS: Final = {
    "asyncio and h11": ("asyncio", "h11"),
    "uvloop and httptools": ("uvloop", "httptools"),
}


class Streams:
    """An ASGI application that answers every request with a new stream."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        settings = SimpleNamespace(model_names=("model",))
        self._service = cast(Service, SimpleNamespace(settings=settings, tokenizer=None))
        self._body = ChatRequest(messages=[{"role": "user", "content": ""}])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        params = SamplingParams(max_tokens=None)
        generation = Generation([cast(Any, [0])], params, whole=False)
        self.generations.append(generation)
        answer = ChatAnswer(self._service, self._body, generation)
        await EventStream(generation, answer, lambda: None, 600.0)(scope, receive, send)

    async def feed(self, streams: int, tokens: int) -> float:
        """Give every stream its tokens; returns the CPU seconds of this thread."""
        while len(self.generations) < streams:
            await asyncio.sleep(0.01)
        begin = time.thread_time()
        for number in range(tokens):
            for generation in self.generations:
                part = Part([number], [f" word{number}"])
                if number == tokens - 1:
                    part.finish_reason = "length"
                generation.add(0, part)
                generation.wake()
            await asyncio.sleep(0)  # let the streams take the tokens before the next step
        while any(not g.finished for g in self.generations):
            await asyncio.sleep(0)
        return time.thread_time() - begin


def client(port: int, streams: int, results: Any) -> None:
    """Read all streams to their end; puts the number of events into ``results``."""

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        content = await reader.read(-1)
        writer.close()
        return content.count(b"data: {")

    async def everything() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    results.put(asyncio.run(everything()))


def measure(path: str, streams: int, tokens: int) -> dict[str, Any]:
    """Run the server with one combination of event loop and HTTP parser."""
    loop, http = PATHS[path]
    listener = socket.create_server(("127.0.0.1", 0))
    streamed = Streams()
    config = uvicorn.Config(
        streamed, loop=cast(Any, loop), http=cast(Any, http), lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(
        target=client, args=(listener.getsockname()[1], streams, results), daemon=True
    )

    async def run() -> dict[str, Any]:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        process.start()
        while len(streamed.generations) < streams:
            await asyncio.sleep(0.01)
        begin = time.perf_counter()
        busy = await streamed.feed(streams, tokens)
        seconds = time.perf_counter() - begin
        events = await asyncio.to_thread(results.get, True, 60)
        assert events == streams * tokens, f"{events} events for {streams * tokens} tokens"
        server.should_exit = True
        await serving
        return {
            "path": path,
            "streams": streams,
            "tokens": tokens,
            "tokens_per_second": round(events / seconds),
            "tokens_per_cpu_second": round(events / busy),
        }

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        result = runner.run(run())
    process.join(60)
    return result


def main() -> int:
    """Measure and print; returns 1 if the rate is below LIMIT."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--save", action="store_true", help="write results/server_sse.json")
    arguments = parser.parse_args()
    results = []
    for path in PATHS:
        try:
            results.append(measure(path, arguments.streams, arguments.tokens))
        except ImportError as error:
            print(f"{path}: {error}")
        else:
            print(json.dumps(results[-1]))
    slow = results[0]["tokens_per_cpu_second"] < LIMIT
    if arguments.save:
        report = {"load_average": os.getloadavg()[0], "limit": LIMIT, "results": results}
        print(f"saved {save('server_sse', report)}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
