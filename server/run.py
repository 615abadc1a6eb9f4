"""Runs a server: opens its socket, loads its model, answers, and ends when a signal says so."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import Final

import uvicorn

from megavm.server.app import create_app
from megavm.server.logs import NOTICE, configure, log
from megavm.server.service import LoadModel, Service, Status
from megavm.server.settings import KEEP_ALIVE, Settings

EXIT_INTERRUPTED: Final = 130
_CLOSING_SECONDS: Final = 3  # for connections that are open when all has been answered
_SWITCH_SECONDS: Final = 0.0005  # after which a thread gives way to another that waits


class Server(uvicorn.Server):
    """Serves until a signal comes, then drains; a second signal ends what still runs.

    It ends by itself when the model does not load or cannot run any more.

    `load_model(progress)` makes the LLM; `listener` is an open socket.

    Attributes:
        service: what the endpoints serve.
        received: the first signal, if there was one.
    """

    def __init__(self, load_model: LoadModel, settings: Settings, listener: socket.socket) -> None:
        app = create_app(load_model, settings)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        super().__init__(config)
        self.service: Service = app.state.service
        self.received: int | None = None
        self._listener = listener
        self._url = url_of(listener)
        self._signal = asyncio.Event()
        self._again = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes or `should_exit` is set."""
        self._event_loop = asyncio.get_running_loop()
        await super().serve([self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the socket; whoever waits for the model is told how far it is."""
        # The engine's thread must not wait for long when the machine has ended a step.
        sys.setswitchinterval(_SWITCH_SECONDS)
        await super().startup(sockets)
        log(logging.INFO, "listening", url=self._url)
        self._tasks = [
            asyncio.create_task(self._announce()),
            asyncio.create_task(self._drain()),
            asyncio.create_task(self._watch()),
        ]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM."""
        self._again = self.received is not None
        self.received = sig
        if self._again and self.service.is_loading:
            # Nothing can be lost yet, and a download would be waited for to its end.
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._event_loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        self._signal.set()
        if self._again:
            self.service.abort()

    async def _announce(self) -> None:
        began = time.perf_counter()
        await self.service.loaded()
        if self.service.status is not Status.READY:
            self.should_exit = True
            return
        # What is there now stays: to look through it for garbage would hold up everybody.
        gc.collect()
        gc.freeze()
        llm, settings = self.service.llm, self.service.settings
        blocks = llm.engine.blocks
        log(
            NOTICE,
            "ready",
            url=self._url,
            model=settings.model_names,
            machine=llm.runner.machine.name,
            dtype=llm.runner.dtype.name,
            context=llm.max_model_len,
            kv_tokens=blocks.num_blocks * blocks.block_size,
            kv_blocks=blocks.num_blocks,
            sequences=llm.runner.max_num_seqs,
            seconds=time.perf_counter() - began,
        )

    async def _drain(self) -> None:
        await self._signal.wait()
        await self.service.drain()
        self.should_exit = True

    async def _watch(self) -> None:
        await self.service.loaded()
        if self.service.status is Status.READY:
            await self.service.broken()
            self.should_exit = True


def serve(load_model: LoadModel, settings: Settings, host: str, port: int, quiet: bool) -> int:
    """Serve until a signal comes, and return the exit code of the process.

    `load_model(progress)` makes the LLM. Port 0 is a free one.

    Raises:
        OSError: the address is not to be had.
        EngineEnded: the model cannot run any more.
        Exception: what `load_model` raises.
    """
    configure(NOTICE if quiet else logging.INFO)
    server = Server(load_model, settings, listen(host, port))
    server.run()
    if server.service.failure is not None:
        raise server.service.failure
    return EXIT_INTERRUPTED if server.received == signal.SIGINT else 0


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Raises:
        OSError: the address is not to be had; its message names it.
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


def url_of(listener: socket.socket) -> str:
    """The URL of what listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
