"""Server-sent events: one for each token, made from a template and not from objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megavm.server.engine_loop import Batch, Generation
from megavm.server.errors import ApiError, timed_out

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_LAST_WORD_SECONDS: Final = 5.0  # for the event that says why a stream ends
_HOLE: Final = "\0"  # what JSON text cannot contain as it is

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


class Renderer(Protocol):
    """Turns deltas into events."""

    def render(self, batch: Batch) -> bytes:
        """The events of a batch."""
        ...

    def end(self) -> bytes:
        """The events after the last batch, without [DONE]."""
        ...


class Template:
    """The events of one continuation, ready but for text and finish reason.

    `event` makes the object of an event from the two.
    """

    def __init__(self, event: Callable[[str, str | None], dict[str, Any]]) -> None:
        self._event = event
        head, tail = _line(event(_HOLE, None)).split(encode_basestring_ascii(_HOLE))
        self._head, self._tail = head, tail

    def token(self, text: str) -> str:
        """The event of a token that is not the last."""
        return self._head + encode_basestring_ascii(text) + self._tail

    def last(self, text: str, finish_reason: str) -> str:
        """The event of the last token."""
        return _line(self._event(text, finish_reason))


def _line(event: dict[str, Any]) -> str:
    # Escaped beyond ASCII: some clients take U+2028 and its like for ends of lines.
    return f"data: {json.dumps(event, allow_nan=False, separators=(',', ':'))}\n\n"


def event(content: dict[str, Any]) -> bytes:
    """One event that is not made from a template."""
    return _line(content).encode()


class EventStream(Response):
    """Streams a generation: events as they come, [DONE] last, whatever happens.

    `close` is called with the generation when the stream ends or the client goes away; `timeout`
    is in seconds, for the whole stream.
    """

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        close: Callable[[Generation], None],
        timeout: float,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._generation = generation
        self._renderer = renderer
        self._close = close
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._answer(send))
        finally:
            self._close(self._generation)

    async def _answer(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        )
        try:
            async with asyncio.timeout(self._timeout):
                await self._send_events(send)
            last = self._renderer.end()
        except TimeoutError:
            last = event(timed_out(self._timeout).body())
        except ApiError as error:
            last = event(error.body())
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await send({"type": "http.response.body", "body": last + DONE})

    async def _send_events(self, send: Send) -> None:
        render = self._renderer.render
        while batch := await self._generation.next_batch():
            body = render(batch)
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away.

    To be used when the body of the request has been read.

    Raises:
        ClientDisconnected: the client went away first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        await _cancel(task)
        await _cancel(watch)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # looked at, so that nobody complains that it was not
