"""Events that a thread without the GIL writes: what arrives, who waits, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from serving import RunningServer, serving, wait_until

from megavm.server import event_streams
from megavm.server.event_streams import EventStreams

TEXTS = ["a", 'b"\\', "ü", "", "\u2028", "😀", "\0"]


class Connection:
    """The server's end of a connection, as far as streams use it; `client` is the other one."""

    def __init__(self) -> None:
        self.client, self._server = socket.socketpair()
        self._server.setblocking(False)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.client.settimeout(20)
        self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self._server}[name]

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def close(self) -> None:
        """Close the event loop's descriptor, as asyncio does."""
        self._server.close()

    def read(self) -> list[Any]:
        """What the client reads of chunks of events, until all descriptors are closed."""
        data = b""
        while block := self.client.recv(1 << 16):
            data += block
        return decode(data)


def decode(data: bytes) -> list[Any]:
    """The JSON of the events in chunks of HTTP/1.1."""
    events = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        events, data = events + rest[:length], rest[length + 2 :]
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n")[:-1]]


def run(test: Callable[[EventStreams, Callable[[], Connection]], Awaitable[None]]) -> None:
    """Run a test with a writer and with what makes connections; no descriptor may be left."""

    async def body() -> None:
        connections: list[Connection] = []

        def connect() -> Connection:
            connections.append(Connection())
            return connections[-1]

        streams = EventStreams()
        try:
            async with asyncio.timeout(30):
                await test(streams, connect)
        finally:
            streams.close()
            for connection in connections:
                connection.close()
                connection.client.close()

    gc.collect()  # other tests' connections
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) <= before


def open_stream(streams: EventStreams, connection: Connection) -> Any:
    return streams.open(cast(Any, connection), 'data: {"text": ', "}\n\n")


def test_events_arrive_in_order_and_say_what_was_meant() -> None:
    async def test(streams: EventStreams, connect: Callable[[], Connection]) -> None:
        connections = [connect() for _ in range(3)]
        made = [open_stream(streams, connection) for connection in connections]
        for number in range(500):
            texts = [f"{number} {text}" for text in TEXTS]
            for stream in made:
                streams.write([stream] * len(texts), texts)
            await asyncio.sleep(0)
        reading = [asyncio.to_thread(connection.read) for connection in connections]
        tasks = [asyncio.create_task(read) for read in reading]
        for stream, connection in zip(made, connections, strict=True):
            await streams.end(stream, cast(Any, connection))
            connection.close()
        for task in tasks:
            expected = [{"text": f"{n} {text}"} for n in range(500) for text in TEXTS]
            assert await task == expected

    run(test)


def test_a_client_that_does_not_read_delays_no_other() -> None:
    async def test(streams: EventStreams, connect: Callable[[], Connection]) -> None:
        slow, fast = connect(), connect()
        made = [open_stream(streams, connection) for connection in (slow, fast)]
        text = "x" * 1000
        for _ in range(300):
            streams.write(made, [text, text])
        reading = asyncio.create_task(asyncio.to_thread(fast.read))
        await streams.end(made[1], cast(Any, fast))
        fast.close()
        assert len(await reading) == 300
        # The other one misses nothing when it reads at last.
        ending = asyncio.create_task(streams.end(made[0], cast(Any, slow)))
        await asyncio.sleep(0.05)
        assert not ending.done()
        reading = asyncio.create_task(asyncio.to_thread(slow.read))
        await ending
        slow.close()
        assert [event["text"] for event in await reading] == [text] * 300

    run(test)


def test_a_client_that_never_reads_is_disconnected_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_streams, "_LAST_WORD_SECONDS", 0.1)

    async def test(streams: EventStreams, connect: Callable[[], Connection]) -> None:
        connection = connect()
        stream = open_stream(streams, connection)
        streams.write([stream] * 300, ["x" * 1000] * 300)
        await streams.end(stream, cast(Any, connection))
        assert connection.aborted
        streams.write([stream], ["too late"])

    run(test)


def test_a_client_that_is_gone_ends_its_stream() -> None:
    async def test(streams: EventStreams, connect: Callable[[], Connection]) -> None:
        connection, other = connect(), connect()
        stream, alive = open_stream(streams, connection), open_stream(streams, other)
        connection.client.close()
        for _ in range(5):
            streams.write([stream, alive], ["nobody", "somebody"])
            await asyncio.sleep(0.01)
        await streams.end(stream, cast(Any, connection))
        await streams.end(alive, cast(Any, other))
        other.close()
        assert len(await asyncio.to_thread(other.read)) == 5

    run(test)


def test_a_closed_writer_loses_what_is_left() -> None:
    async def test(streams: EventStreams, connect: Callable[[], Connection]) -> None:
        stream = open_stream(streams, connect())
        streams.write([stream] * 300, ["x" * 1000] * 300)

    run(test)


# In a server.


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server whose answers are long enough to be interrupted."""
    with serving() as running_server:
        yield running_server


@contextlib.contextmanager
def counted(server: RunningServer) -> Iterator[SimpleNamespace]:
    """Counts what the writer writes meanwhile."""
    streams, counts = server.service.engine._streams, SimpleNamespace(events=0)
    write = streams.write

    def counting(made: Any, texts: Any) -> None:
        counts.events += len(texts)
        write(made, texts)

    with patch.object(streams, "write", counting):
        yield counts


BODY: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(server: RunningServer, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Tell me a story"}]}
    body = {**BODY, **chat} if "chat" in path else BODY
    body = {name: value for name, value in body.items() if name != "prompt" or "chat" not in path}
    whole = server.post(path, body).json
    with counted(server) as counts:
        options = {"stream_options": {"include_usage": True}}
        *events, usage = server.stream(path, **body, **options)
    assert counts.events >= 40
    assert len(events) == 60
    choices = [event["choices"][0] for event in events]
    said = whole["choices"][0]
    text = "".join(c["delta"].get("content", "") if "chat" in path else c["text"] for c in choices)
    assert text == (said["message"]["content"] if "chat" in path else said["text"])
    assert choices[-1]["finish_reason"] == said["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == whole["usage"][name]


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 1},
        {"n": 2, "temperature": 1, "seed": 1},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=["logprobs", "n", "token ids", "usage"],
)
def test_events_with_more_than_text_are_written_by_the_event_loop(
    server: RunningServer, more: dict[str, Any]
) -> None:
    with counted(server) as counts:
        assert server.stream("/v1/completions", **{**BODY, **more})
    assert counts.events == 0


def test_http_1_0_has_no_chunks(server: RunningServer) -> None:
    content = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
    with counted(server) as counts, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        answer = b""
        while block := client.recv(1 << 16):
            answer += block
    assert counts.events == 0
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in headers.lower()
    *events, done, nothing = body.split(b"\n\n")
    assert len(events) == 60
    assert all(event.startswith(b"data: {") for event in events)
    assert (done, nothing) == (b"data: [DONE]", b"")


def test_a_connection_is_used_again_after_a_stream(server: RunningServer) -> None:
    client = server.client()
    for _ in range(3):
        chunks = list(client.completions.create(model="stories", stream=True, **request()))
        assert len(chunks) == 60


def request() -> dict[str, Any]:
    options = {name: value for name, value in BODY.items() if name != "ignore_eos"}
    return {**options, "extra_body": {"ignore_eos": True}}


def test_a_client_that_leaves_within_a_stream_frees_its_blocks_and_its_descriptor(
    server: RunningServer,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with counted(server) as counts:
        connections = [
            server.open("/v1/completions", **{**BODY, "max_tokens": 900, "stream": True})
            for _ in range(4)
        ]
        wait_until(lambda: counts.events > 100)
        for connection in connections:
            connection.close()
        wait_until(lambda: server.engine.blocks.num_held == 0)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_an_aborted_stream_ends_with_an_error(server: RunningServer) -> None:
    answer = bytearray()
    connection = server.open("/v1/completions", **{**BODY, "max_tokens": 900, "stream": True})

    def read() -> None:
        while block := connection.recv(1 << 16):
            answer.extend(block)
            if answer.endswith(b"\r\n0\r\n\r\n"):  # it may come by itself
                break

    with counted(server) as counts, connection:
        reading = threading.Thread(target=read)
        reading.start()
        wait_until(lambda: counts.events > 50)
        server.loop.call_soon_threadsafe(server.service.abort)
        reading.join(20)
        assert not reading.is_alive()
    assert b'"code":"draining"' in answer
    assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in answer
