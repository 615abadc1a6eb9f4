"""The path of a token to the client: its speed, and clients that do not read or go away."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megavm.sampling_params import SamplingParams
from megavm.server.chat import ChatAnswer
from megavm.server.engine.generation import Generation, Part
from megavm.server.errors import failed
from megavm.server.logs import NOTES
from megavm.server.protocol import ChatRequest
from megavm.server.service import Service
from megavm.server.sse import (
    DONE,
    ClientDisconnected,
    EventStream,
    Template,
    line,
    until_disconnect,
)


def make_stream(timeout: float = 10.0) -> tuple[Generation, EventStream, list[str]]:
    """A generation without an engine, its stream, and what is noted when the stream is closed."""
    params = SamplingParams(max_tokens=None)
    generation = Generation([cast(Any, [0])], params, whole=False)
    settings = SimpleNamespace(model_names=("model",))
    service = cast(Service, SimpleNamespace(settings=settings, tokenizer=None))
    body = ChatRequest(messages=[{"role": "user", "content": ""}])
    answer = ChatAnswer(service, body, generation)
    closed: list[str] = []
    return generation, EventStream(generation, answer, lambda: closed.append("x"), timeout), closed


def give(generation: Generation, token: int, end: bool = False) -> None:
    part = Part([token], [f" word{token}"], finish_reason="length" if end else None)
    generation.add(0, part)
    generation.wake()


async def stay() -> Any:
    """A client that says nothing more."""
    await asyncio.sleep(3600)


async def seconds_of_a_stream(count: int) -> float:
    """Thread time of a stream of `count` tokens, one event each."""
    generation, stream, _ = make_stream()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    serving = asyncio.create_task(stream({NOTES: {}}, stay, send))
    begin = time.thread_time()
    for number in range(count):
        give(generation, number, end=number == count - 1)
        await asyncio.sleep(0)
    await serving
    seconds = time.thread_time() - begin
    assert sum(body.count(b"data: {") for body in sent) == count
    assert len(sent) > count // 3  # it was not one great batch
    return seconds


async def seconds_of_json(count: int) -> float:
    """Thread time of the same events from a queue and json.dumps, without all else of a stream."""
    tokens: asyncio.Queue[str | None] = asyncio.Queue()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    async def serve() -> None:
        chunk = {
            "id": "chatcmpl-" + "0" * 32,
            "object": "chat.completion.chunk",
            "created": 1 << 30,
        }
        while (token := await tokens.get()) is not None:
            choice = {"index": 0, "delta": {"content": token}, "logprobs": None}
            choice |= {"finish_reason": None, "stop_reason": None}
            event = json.dumps(chunk | {"model": "model", "choices": [choice]})
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    serving = asyncio.create_task(serve())
    begin = time.thread_time()
    for number in range(count):
        tokens.put_nowait(f" word{number}")
        await asyncio.sleep(0)
    tokens.put_nowait(None)
    await serving
    seconds = time.thread_time() - begin
    assert len(sent) == count
    return seconds


def test_an_event_costs_about_what_its_json_costs() -> None:
    streams, plain = [], []
    for _ in range(4):  # in turns: the speed of a shared core changes
        streams.append(asyncio.run(seconds_of_a_stream(5_000)))
        plain.append(asyncio.run(seconds_of_json(5_000)))
    assert min(streams) < 1.5 * min(plain)


def test_a_client_that_reads_nothing_is_left_when_its_time_is_over() -> None:
    async def test() -> None:
        generation, stream, closed = make_stream(timeout=0.1)
        notes: dict[str, Any] = {}
        reading = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and not reading.is_set():
                reading.set()
                await asyncio.sleep(3600)

        give(generation, 1)
        async with asyncio.timeout(5):
            await stream({NOTES: notes}, stay, send)
        assert closed == ["x"]
        assert "took longer" in notes["error"]

    asyncio.run(test())


def test_a_client_that_goes_away_ends_the_stream_at_once() -> None:
    async def test() -> None:
        _, stream, closed = make_stream()

        async def leave() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return

        with pytest.raises(ClientDisconnected):
            await stream({NOTES: {}}, leave, send)
        assert closed == ["x"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(test())


def test_a_client_that_goes_away_as_its_answer_ends_cancels_nothing_more() -> None:
    async def test() -> None:
        left = asyncio.Event()

        async def leave() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> int:
            await asyncio.sleep(0)
            left.set()
            return 7

        assert await until_disconnect(leave, work()) == 7
        await asyncio.sleep(0.01)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(test())


def test_a_time_limit_around_an_answer_is_no_client_that_goes_away() -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await until_disconnect(stay, asyncio.sleep(3600))

    asyncio.run(test())


def test_a_stream_that_fails_says_why_and_ends_as_every_stream() -> None:
    async def test() -> bytes:
        generation, stream, _ = make_stream()
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        give(generation, 1)
        generation.fail(failed("the machine stopped"))
        await stream({NOTES: {}}, stay, send)
        return b"".join(sent)

    content = asyncio.run(test())
    assert b" word1" in content
    assert content.endswith(line(failed("the machine stopped").body()).encode() + DONE)


def test_a_template_makes_the_events_that_json_makes() -> None:
    def content(text: str) -> dict[str, Any]:
        return {"id": 'a"b', "choices": [{"delta": {"content": text}, "finish_reason": None}]}

    template = Template(content)
    for text in (
        "",
        "word",
        '"quoted" \\ \n\r\t\x00\x1f',
        "日本 \u2028 \U0001f600",
        "\ud800",
        "</",
    ):
        assert template.line(text) == line(content(text))
