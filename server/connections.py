"""Accept connections: how many there may be, and how long each may wait for a request.

uvicorn speaks HTTP on a connection. Accepting is done here, because asyncio accepts without a limit
and logs every failure, and uvicorn waits for the headers of a request without a limit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from starlette.types import Message, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from megavm.server.errors import (
    ApiError,
    bad_request,
    headers_too_late,
    to_json,
    too_many_connections,
)
from megavm.server.logs import Repeated, log
from megavm.server.settings import Settings

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol

CONNECTION: Final = "megavm.connection"  # key in an ASGI scope: the request's transport

_MAX_OPEN_FILES: Final = 65536  # the soft limit of descriptors is raised up to this
_RESERVED_FILES: Final = 256  # descriptors for the model, the machine, and connections that end
_BATCH: Final = 32  # connections accepted before the event loop does other work
_MAX_REFUSALS: Final = 64  # connections that are answered with 503 at the same time
_REFUSAL_SECONDS: Final = 1.0  # for a refused client to read its answer
_LEAST_WAIT: Final = 1.0  # seconds that a connection may wait even if there are too many
_RETRY_SECONDS: Final = 0.1  # after a failure to accept
# Of what waits behind a request so much is read: requests with httptools, bytes with h11.
_MAX_PIPELINED: Final = 16
_MAX_UNREAD: Final = 65536
_UPGRADE: Final = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)


class Connections:
    """The connections of a server, accepted from a listening socket.

    While there are as many as allowed, a new connection takes the place of the one that has waited
    longest for a request. If none has waited for a second, the new one is answered with 503.

    `count(status)` is called for every answer that is given without a request.

    Attributes:
        limit: largest number of connections.
        waiting: connections without a request, longest first, and since when. Those whose TLS
            handshake is not complete are among them.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: Settings,
        config: uvicorn.Config,
        state: ServerState,
        app_state: dict[str, Any],
        count: Callable[[int], None],
    ) -> None:
        self.settings = settings
        self.count = count
        self.waiting: dict[Connection, float] = {}
        self.limit = possible_connections(settings.max_connections)
        self._listener = listener
        self._config = config
        self._state = state
        self._app_state = app_state
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Protocol, asyncio.Task[None]] = {}  # not yet in `state`
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals: set[_Refusal] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._answer = raw_response(too_many_connections(self.limit))
        self._full = Repeated(logging.WARNING, "too many connections")
        self._failed = Repeated(logging.ERROR, "cannot accept connections")

    def start(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more connections. Those that have a request stay open."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        for refusal in self._refusals:
            refusal.end()

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptor or no memory is left. The connection stays in the kernel's queue.
                self._failed(cause=error.strerror)
                self._make_room()
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY_SECONDS, self.start)
                return
            connection.setblocking(False)
            self._limit_unread(connection)
            if self._num_open() < self.limit or self._make_room():
                protocol = Connection(self, self._config, self._state, self._app_state)
                self.waiting[protocol] = self._loop.time()
                task = self._open(connection, protocol, self.settings.header_timeout)
                self._opening[protocol] = task
            else:
                self._refuse(connection)

    def opened(self, protocol: Connection) -> None:
        """A connection has been made; uvicorn counts it from now on."""
        del self._opening[protocol]

    def _num_open(self) -> int:
        return len(self._state.connections) + len(self._opening)

    def _limit_unread(self, connection: socket.socket) -> None:
        """Let the kernel end a connection whose client does not read, after the request timeout."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = int(min(self.settings.request_timeout * 1e3 + 1, (1 << 31) - 1))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request; False if none has waited."""
        oldest = next(iter(self.waiting), None)
        if oldest is None or self._loop.time() - self.waiting[oldest] < _LEAST_WAIT:
            return False
        del self.waiting[oldest]
        if oldest in self._opening:
            self._opening[oldest].cancel()
        else:
            oldest.transport.close()
        self._full(limit=self.limit, done="closed the one that was idle longest")
        return True

    def _refuse(self, connection: socket.socket) -> None:
        self.count(HTTPStatus.SERVICE_UNAVAILABLE)
        self._full(limit=self.limit, done="answered 503")
        if len(self._refusals) < _MAX_REFUSALS:
            refusal = _Refusal(self._answer, self._refusals)
            self._open(connection, refusal, _REFUSAL_SECONDS)
        else:
            with suppress(OSError):
                if self._config.ssl is None:
                    connection.send(self._answer)  # lost if the request arrives after the close
            connection.close()

    def _open(
        self, connection: socket.socket, protocol: asyncio.Protocol, seconds: float
    ) -> asyncio.Task[None]:
        task = self._loop.create_task(self._connect(connection, protocol, seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(
        self, connection: socket.socket, protocol: asyncio.Protocol, seconds: float
    ) -> None:
        """Connect a socket to a protocol, after the handshake if there is TLS."""
        context: ssl.SSLContext | None = self._config.ssl
        timeout = None if context is None else seconds
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=timeout
            )
        except OSError as error:
            log(logging.DEBUG, "a connection failed", cause=str(error))
        finally:
            if self._opening.pop(protocol, None) is not None:  # the handshake has failed
                self.waiting.pop(cast(Connection, protocol), None)


class Connection(HttpProtocol):
    """uvicorn's protocol, with a limit on the time until the headers of a request are complete.

    It offers no other protocol, and notices a client that leaves while requests are pipelined.
    """

    def __init__(
        self,
        connections: Connections,
        config: uvicorn.Config,
        state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, state, app_state)
        self._application = self.app
        self.app = self._answer
        self._owner = connections
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False  # whether a part of the next request's headers has arrived
        self._running: Any = None  # uvicorn's cycle of the request that is answered

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application; it finds its connection in the scope."""
        scope[CONNECTION] = self.transport
        if scope["http_version"] == "1.0" and self._running is not None:
            send = partial(_send_without_chunks, self._running, send)
        await self._application(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._owner.opened(self)
        self._wait()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Pass the data on; then either there is a request, or its headers are incomplete."""
        super().data_received(data if self._has_request else _without_upgrade(data))
        if self._has_request:
            self._stop_timer()
            self._owner.waiting.pop(self, None)
            self._go_on_reading()
        else:
            self._begun = True
            self._start_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn limits the time until its first byte."""
        super().on_response_complete()
        if not self._has_request and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and tell the request that is answered."""
        self._stop_timer()
        self._owner.waiting.pop(self, None)
        super().connection_lost(exc)  # tells the last request that has arrived
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close the connection."""
        self._owner.count(HTTPStatus.BAD_REQUEST)
        self.transport.write(raw_response(bad_request(msg)))
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[misc]

    def _go_on_reading(self) -> None:
        """Read on while some requests wait behind the one that is answered.

        uvicorn does not, so that nobody would see that the client leaves.
        """
        if hasattr(self, "pipeline"):  # httptools
            few = 0 < len(self.pipeline) <= _MAX_PIPELINED
        else:
            few = 0 < len(self.conn.trailing_data[0]) <= _MAX_UNREAD
        if few and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _wait(self) -> None:
        self._owner.waiting.setdefault(self, self.loop.time())

    def _start_timer(self) -> None:
        if self._timer is None:
            seconds = self._owner.settings.header_timeout
            self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_timer(self) -> None:
        self._begun = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._begun:  # a client that has sent nothing expects no answer
            self._owner.count(HTTPStatus.REQUEST_TIMEOUT)
            answer = headers_too_late(self._owner.settings.header_timeout)
            self.transport.write(raw_response(answer))
        self.transport.close()


async def _send_without_chunks(cycle: Any, send: Send, message: Message) -> None:
    """Send a message to a client of HTTP/1.0, which knows no chunks: where there is no length, the
    end of the connection is that of the body. `cycle` is httptools' one; h11 does so by itself."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding, cycle.expected_content_length = False, math.inf
    elif not message.get("more_body") and cycle.expected_content_length == math.inf:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _without_upgrade(data: bytes) -> bytes:
    """Headers of a request without an offer of another protocol, which a server may ignore.

    With the offer, httptools would not read the body: clients that would rather use HTTP/2, such
    as Java's, send it with every request.
    """
    head, blank, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nignored", head) + blank + rest


class _Refusal(asyncio.Protocol):
    """Sends one answer, and closes when the client does or after a second.

    Closing at once would drop the answer if the client's request is on its way.
    """

    def __init__(self, answer: bytes, others: set[_Refusal]) -> None:
        self._answer = answer
        self._others = others
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._others.add(self)
        self._transport.write(self._answer)
        asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, self.end)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._others.discard(self)


def raw_response(error: ApiError) -> bytes:
    """An error as the bytes of an HTTP response, after which the connection is closed."""
    body = to_json(error.body()).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def possible_connections(wanted: int) -> int:
    """`wanted`, or fewer if the process may not open that many files; raises its soft limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft < most:
        with suppress(OSError, ValueError):  # a system's own limit may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    possible = max(soft - min(_RESERVED_FILES, soft // 2), 1)
    if possible < wanted:
        log(
            logging.WARNING,
            "fewer connections than asked for: too few files may be open",
            max_connections=wanted,
            possible=possible,
            open_files=soft,
        )
        return possible
    return wanted
