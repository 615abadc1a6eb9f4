"""A server in a thread of the test, and what speaks to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import anthropic
import openai
import pytest

from megavm import LLM
from megavm.scheduler.engine.engine import Engine
from megavm.server.engine.core import EngineCore
from megavm.server.engine.transport import EngineThread
from megavm.server.run import Server, listen
from megavm.server.service import Service
from megavm.server.settings import Settings

WAIT_SECONDS = 30.0


@dataclass
class Response:
    """An answer over a plain connection."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content, parse_constant=pytest.fail)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which an error must be."""
        assert self.status >= 400, self.content
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        assert self.json["error"]["message"]
        return cast(dict[str, Any], self.json["error"])

    @property
    def anthropic_error(self) -> dict[str, Any]:
        """Anthropic's error object, which an error of its paths must be."""
        assert self.status >= 400, self.content
        assert set(self.json) == {"type", "error"}
        assert self.json["type"] == "error"
        assert set(self.json["error"]) == {"type", "message"}
        return cast(dict[str, Any], self.json["error"])

    @property
    def named_events(self) -> list[Any]:
        """The objects of a stream whose events have names: each is the object's type."""
        assert self.status == 200, self.content
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, nothing = self.content.split(b"\n\n")
        assert nothing == b""
        found = []
        for event in events:
            name, data = event.split(b"\n")
            found.append(json.loads(data.removeprefix(b"data: "), parse_constant=pytest.fail))
            assert name == b"event: " + found[-1]["type"].encode()
        return found

    @property
    def events(self) -> list[Any]:
        """The objects of a stream, which must have ended as it should."""
        assert self.status == 200, self.content
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, end, nothing = self.content.split(b"\n\n")
        assert (end, nothing) == (b"data: [DONE]", b"")
        assert all(e.startswith(b"data: {") and b"\n" not in e for e in events)
        return [json.loads(e[len(b"data: ") :], parse_constant=pytest.fail) for e in events]


@dataclass
class RunningServer:
    """A server of this process."""

    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    transport: EngineThread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def core(self) -> EngineCore:
        """The engine's end, in a thread of this process."""
        return self.transport.core

    @property
    def llm(self) -> LLM:
        return self.core.llm

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_SECONDS, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_SECONDS, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_SECONDS, **options}
        return anthropic.Anthropic(base_url=self.url, **options)

    def send(
        self, method: str, path: str, body: bytes | str | None = None, **headers: str
    ) -> Response:
        """One request over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Response(answer.status, found, answer.read())

    def post(self, path: str, content: Any, **headers: str) -> Response:
        """One request with a JSON body."""
        return self.send(
            "POST", path, json.dumps(content), content_type="application/json", **headers
        )

    def get(self, path: str, **headers: str) -> Response:
        return self.send("GET", path, **headers)

    def complete(self, **fields: Any) -> Any:
        """The answer of /v1/completions."""
        response = self.post("/v1/completions", {"prompt": "Once upon a time", **fields})
        assert response.status == 200, response.content
        return response.json

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream."""
        return self.post(path, {**fields, "stream": True}).events

    def open(self, path: str, **fields: Any) -> socket.socket:
        """A request whose answer nobody has read yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)
        body = json.dumps(fields).encode()
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics, summed over the labels that are not given."""
        total = 0.0
        for line in self.get("/metrics").content.decode().splitlines():
            if line.startswith(f"megavm:{name}{{") and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total


def wait_until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Wait for something that is to come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


def assert_idle(server: RunningServer) -> None:
    """Nothing is held any more, and no task is left."""
    engine = server.engine
    wait_until(lambda: not engine.has_work and not server.service.engine.num_sequences)
    wait_until(lambda: not server.service.engine._open)
    assert not server.service.engine._generations
    assert not server.service.engine._compiling
    assert not server.core.loop._owners
    assert not server.core.loop._requests
    assert not server.core._compiling
    assert engine.blocks.num_held == 0
    assert engine.num_running == engine.num_waiting == 0
    engine.blocks.check()
    metrics = server.core.metrics
    assert not metrics._last
    assert not metrics._ended
    # What is left in the event loop: the server itself with two that watch, and this look at it.
    wait_until(lambda: num_tasks(server) <= 5)


def num_tasks(server: RunningServer) -> int:
    """Tasks of the server's event loop."""

    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), server.loop).result(WAIT_SECONDS)


@contextlib.contextmanager
def running(load_model: Callable[..., Any], **settings: Any) -> Iterator[RunningServer]:
    """A server in a thread; at the end it is closed and must be gone."""
    settings = {"model_names": ("stories",), "max_queue": 256, **settings}
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    transport = EngineThread(load_model)
    server = Server(transport, Settings(**settings), listener)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    def work() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield RunningServer(port, server.service, loops[0], transport)
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@contextlib.contextmanager
def serving(settings: dict[str, Any] | None = None, **options: Any) -> Iterator[RunningServer]:
    """A ready server of the shipped model, in float32 if the options do not say otherwise."""
    options = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    with running(lambda progress: LLM("stories", **options), **(settings or {})) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
