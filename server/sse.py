"""Server-sent events: one per token, rendered from a template instead of objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megavm.server.connections import CONNECTION
from megavm.server.engine.client import EngineClient
from megavm.server.engine.generation import Batch, Generation
from megavm.server.errors import ApiError, fault, note_error, timed_out, to_json
from megavm.server.event_streams import writable_socket
from megavm.server.logs import logger

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_LAST_WORD_SECONDS: Final = 5.0  # to send the last event of a stream
_NO_USAGE: Final = "null}\n\n"  # the end of an event whose last key, usage, is null
_HOLE: Final = "\0"  # placeholder of the text in an event; occurs nowhere else in it

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client went away before the answer was complete."""


class Renderer(Protocol):
    """Turns deltas into events."""

    @property
    def template(self) -> Template | None:
        """The template of the events of all plain deltas to come; None if they need `render`."""
        ...

    def begin(self) -> bytes:
        """The events before the first batch."""
        ...

    def render(self, batch: Batch) -> bytes:
        """The events of a batch."""
        ...

    def end(self) -> bytes:
        """The events after the last batch."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """The events that end the stream when it has failed."""
        ...


class Template:
    """Events that differ in one text only; `content(text)` makes the object of an event.

    Attributes:
        head: what is before the text in JSON.
        tail: what is behind it.
    """

    def __init__(self, content: Callable[[str], dict[str, Any]]) -> None:
        self.head, self.tail = line(content(_HOLE)).split(encode_basestring_ascii(_HOLE))

    def line(self, text: str) -> str:
        """The event for a text."""
        return self.head + encode_basestring_ascii(text) + self.tail

    def line_with_usage(self, text: str, usage: dict[str, Any]) -> str:
        """The event for a text and a usage; its last key must be usage, null in `content`."""
        tail = self.tail.removesuffix(_NO_USAGE)
        return f"{self.head}{encode_basestring_ascii(text)}{tail}{to_json(usage)}}}\n\n"


def line(content: dict[str, Any]) -> str:
    """One event, including the blank line that ends it."""
    # to_json escapes all but ASCII: some clients treat U+2028 and others as line ends.
    return f"data: {to_json(content)}\n\n"


def named_line(content: dict[str, Any]) -> str:
    """One event whose name is its "type"."""
    return f"event: {content['type']}\n{line(content)}"


class EventStream(Response):
    """Streams a generation: events as they arrive, and the renderer's last ones after an error.

    Calls `close` when the stream ends or the client goes away. `timeout` is the limit of the whole
    stream in seconds. `plain_writer`: what can write plain events without the event loop.
    """

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        close: Callable[[], None],
        timeout: float,
        plain_writer: EngineClient | None = None,
    ) -> None:
        # Without Response.__init__, which makes headers of a body.
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._generation = generation
        self._renderer = renderer
        self._close = close
        self._timeout = timeout
        self._plain_writer = plain_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._answer(scope, send))
        finally:
            self._close()

    async def _answer(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._timeout):
                if first := self._renderer.begin():
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                await self._send_events(scope, send)
            last = self._renderer.end()
        except TimeoutError:
            last = self._failure(scope, timed_out(self._timeout))
        except ApiError as error:
            last = self._failure(scope, error)
        except Exception:
            logger.exception("a stream failed")
            last = self._failure(scope, fault())
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await send({"type": "http.response.body", "body": last})

    def _failure(self, scope: Scope, error: ApiError) -> bytes:
        note_error(scope, error)
        return self._renderer.fail(error)

    async def _send_events(self, scope: Scope, send: Send) -> None:
        renderer, generation = self._renderer, self._generation
        while batch := await generation.next_batch():
            body = renderer.render(batch)
            await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._plain_writer is None or generation.finished:
                continue
            template, connection = renderer.template, _plain_connection(scope)
            if template is not None and connection is not None:
                await self._plain_writer.write_plain(
                    generation, connection, template.head, template.tail
                )


def _plain_connection(scope: Scope) -> asyncio.Transport | None:
    """The connection of a request, if chunks can be written to its socket now."""
    connection: asyncio.Transport | None = scope.get(CONNECTION)
    if connection is None or scope["http_version"] != "1.1" or scope["method"] == "HEAD":
        return None
    return connection if writable_socket(connection) else None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it when the client goes away.

    Use it only after the body of the request has been read.

    Raises:
        ClientDisconnected: the client went away first.
    """
    task = asyncio.current_task()
    assert task is not None, "a request is a task"
    watch = asyncio.ensure_future(_disconnect(receive))
    running, gone = True, False

    def leave(watch: asyncio.Future[None]) -> None:
        nonlocal gone
        if watch.cancelled():
            return
        watch.exception()  # retrieved, so that asyncio does not log it as never retrieved
        if running:
            gone = True
            task.cancel()

    watch.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == 1:
            raise ClientDisconnected from None
        raise
    finally:
        running = False
        watch.cancel()
        if gone:
            task.uncancel()


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
