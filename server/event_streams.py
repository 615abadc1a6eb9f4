"""Streams whose events a thread without the GIL writes to the sockets (event_writer.cpp).

Most parts of a stream are *plain*: their events differ in their text only. The thread in which
tokens arrive hands these texts to that thread, once per step for all streams, so that neither the
event loop nor the streams' tasks wake up for them. All other events are written by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Final

from megavm.server._event_writer import EventWriter, Stream

_LAST_WORD_SECONDS: Final = 5.0  # to write what is left of a stream that ends


class EventStreams:
    """Construct it in the thread of the event loop, and call all methods but `write` there."""

    def __init__(self) -> None:
        self._writer = EventWriter()
        self._loop = asyncio.get_running_loop()
        self._ending: dict[Stream, asyncio.Event] = {}
        self._loop.add_reader(self._writer.fileno(), self._on_ended)

    def open(self, connection: asyncio.Transport, head: str, tail: str) -> Stream:
        """A stream of events that are `head`, a text in JSON, and `tail`, in chunks of HTTP/1.1.

        Until its end, nobody else may write to the connection, which must have written everything.
        """
        return self._writer.open(connection.get_extra_info("socket").fileno(), head, tail)

    def write(self, streams: list[Stream], texts: Sequence[str]) -> None:
        """Add an event for each text to the stream at the same place. Any thread may call this."""
        self._writer.write(streams, list(map(encode_basestring_ascii, texts)))

    async def end(self, stream: Stream, connection: asyncio.Transport) -> None:
        """Wait until all events of a stream are written; it takes no more.

        If its client does not read them in time, the connection is closed.
        """
        if self._writer.end(stream):
            return
        written = self._ending[stream] = asyncio.Event()
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await written.wait()
        except TimeoutError:
            connection.abort()
        finally:
            del self._ending[stream]
            if not written.is_set():
                self._writer.discard(stream)

    def close(self) -> None:
        """End the thread. What is not written yet is lost."""
        self._loop.remove_reader(self._writer.fileno())
        self._writer.close()

    def _on_ended(self) -> None:
        for stream in self._writer.take_ended():
            if (written := self._ending.get(stream)) is not None:
                written.set()


def writable_socket(connection: asyncio.Transport) -> bool:
    """Whether another thread may write to a connection's socket now: no TLS, nothing waits."""
    return (
        connection.get_extra_info("socket") is not None
        and connection.get_extra_info("sslcontext") is None
        and not connection.is_closing()
        and connection.get_write_buffer_size() == 0
    )
