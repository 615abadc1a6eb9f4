"""Run a server: open the socket, load the model, serve, and end on a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
import time
from dataclasses import replace
from types import FrameType
from typing import Final

import uvicorn

from megavm.garbage import freeze_heap
from megavm.server.app import create_app
from megavm.server.connections import Connections
from megavm.server.engine.client import Transport
from megavm.server.engine.core import LoadModel
from megavm.server.engine.transport import SWITCH_SECONDS, EngineProcess
from megavm.server.hosts import is_address
from megavm.server.logs import NOTICE, log, logging_to_stderr
from megavm.server.service import Service, Status
from megavm.server.settings import KEEP_ALIVE, Settings

EXIT_INTERRUPTED: Final = 130
_CLOSING_SECONDS: Final = 3  # for connections still open after all requests are answered


class Server(uvicorn.Server):
    """Serves until a signal arrives, then drains; a second signal aborts running requests.

    The server also ends when the model cannot be loaded or the engine stops for good.

    `transport` carries messages to the engine; `listener` is an open socket.

    Attributes:
        service: the state behind the endpoints.
        received: the last signal received, or None.
    """

    def __init__(self, transport: Transport, settings: Settings, listener: socket.socket) -> None:
        app = create_app(transport, settings)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        _load(config)
        super().__init__(config)
        self.service: Service = app.state.service
        self.received: int | None = None
        self._listener = listener
        self._url = url_of(listener, config.is_ssl)
        self._signal = asyncio.Event()
        self._again = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal arrives or `should_exit` is set."""
        self._event_loop = asyncio.get_running_loop()
        await super().serve()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections; until the model is loaded, requests get its progress."""
        # The thread that brings tokens must get the GIL soon.
        sys.setswitchinterval(SWITCH_SECONDS)
        await super().startup([])  # uvicorn accepts no connections, `_connections` does
        self._connections = Connections(
            self._listener,
            self.service.settings,
            self.config,
            self.server_state,
            self.lifespan.state,
            lambda status: self.service.metrics.count_answer("other", status),
        )
        self._connections.start()
        log(logging.INFO, "listening", url=self._url)
        self._tasks = [
            asyncio.create_task(self._announce()),
            asyncio.create_task(self._drain()),
            asyncio.create_task(self._watch()),
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end those that there are."""
        self._connections.close()
        await super().shutdown([])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        self._again = self.received is not None
        self.received = sig
        self._event_loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        self._signal.set()
        if self._again:
            self.service.abort()

    async def _announce(self) -> None:
        began = time.perf_counter()
        await self.service.loaded()
        if self.service.status is not Status.READY:
            self.should_exit |= not self.service.has_model  # else `_watch` or `_drain` say when
            return
        freeze_heap()
        facts = self.service.model.facts
        limits = facts.limits
        log(
            NOTICE,
            "ready",
            url=self._url,
            model=self.service.settings.model_names,
            machine=facts.machine,
            dtype=facts.dtype,
            context=limits.max_model_len,
            kv_tokens=limits.num_blocks * limits.block_size,
            kv_blocks=limits.num_blocks,
            sequences=facts.max_num_seqs,
            seconds=time.perf_counter() - began,
        )

    async def _drain(self) -> None:
        await self._signal.wait()
        await self.service.drain()
        self.should_exit = True

    async def _watch(self) -> None:
        await self.service.loaded()
        if self.service.has_model:
            await self.service.broken()
            self.should_exit = True


def serve(load_model: LoadModel, settings: Settings, host: str, port: int, log_level: int) -> int:
    """Serve until a signal arrives, and return the exit code of the process.

    `load_model(progress)` makes the LLM, in a process of its own (EngineProcess). Port 0 takes a
    free port. Records below `log_level` are not written to stderr. At a loopback address, only its
    names and `settings.allowed_hosts` are answered, though `settings.allowed_hosts` is None.

    Raises:
        OSError: the address is not available, or a certificate cannot be used.
        EngineEnded: the engine stopped for good.
        Exception: any error of `load_model`.
    """
    transport = EngineProcess(load_model, log_level)
    try:
        with logging_to_stderr(log_level):
            listener = listen(host, port)
            if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
                names = () if is_address(host) else (host,)
                allowed = (*names, *(settings.allowed_hosts or ()))
                settings = replace(settings, allowed_hosts=allowed)
            server = Server(transport, settings, listener)
            server.run()
    finally:
        transport.give_up()
    if server.service.failure is not None:
        raise server.service.failure
    return EXIT_INTERRUPTED if server.received == signal.SIGINT else 0


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        OSError: the address is not available; the message names it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen at {host}:{port}: {reason}") from error
    return listener


def url_of(listener: socket.socket, tls: bool = False) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _load(config: uvicorn.Config) -> None:
    """Load a configuration. Raises OSError if its certificate or its key cannot be used."""
    try:
        config.load()
    except OSError as error:
        certificate, key = config.ssl_certfile, config.ssl_keyfile
        files = f"{certificate} with the key {key}" if key else f"{certificate}"
        reason = getattr(error, "reason", None) or error.strerror or error
        raise OSError(f"cannot use the certificate {files}: {reason}") from error
