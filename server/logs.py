"""Structured logs on stderr: one line per event, `time LEVEL event key=value ...`."""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import os
import queue
import re
import select
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

logger: Final = logging.getLogger("megavm.server")

NOTICE: Final = 25  # level of lines that are written even with --quiet
NOTES: Final = "megavm.notes"  # key of an ASGI scope
_REPEAT_SECONDS: Final = 10.0
_MAX_LINES: Final = 10_000  # that wait for the reader of stderr
_LINES_AT_ONCE: Final = 100
_REST_SECONDS: Final = 0.01  # between two writes
_FLUSH_SECONDS: Final = 1.0
_PLAIN: Final = re.compile(r"[\w.:/@+,\[\]-]+", re.ASCII)


class LineFormatter(logging.Formatter):
    """A record as one line; the fields of `log` follow the message."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        time = when.isoformat(timespec="milliseconds").removesuffix("+00:00")
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        parts = [f"{time}Z {record.levelname} {_value(record.getMessage(), spaces=True)}"]
        parts += [f"{name}={_value(value)}" for name, value in fields.items() if value is not None]
        return " ".join(parts)


def log(level: int, event: str, **fields: object) -> None:
    """Write one line; a field that is None is left out."""
    if logger.isEnabledFor(level):
        # As Logger.log, but for the place of the call, which takes a while to find.
        record = logging.LogRecord(logger.name, level, "", 0, event, (), None)
        record.fields = fields
        logger.handle(record)


def note(scope: MutableMapping[str, Any], **fields: object) -> None:
    """Add fields to the log line of a request (its ASGI scope), written when the request ends."""
    scope.setdefault(NOTES, {}).update(fields)


class Repeated:
    """An event that may occur often: one line at once, then at most one every 10 s with a count."""

    def __init__(self, level: int, event: str) -> None:
        self._level = level
        self._event = event
        self._count = 0
        self._next = 0.0

    def __call__(self, **fields: object) -> None:
        """Count an event, and write a line unless one was written a moment ago."""
        self._count += 1
        now = time.monotonic()
        if now >= self._next:
            log(self._level, self._event, count=self._count, **fields)
            self._count, self._next = 0, now + _REPEAT_SECONDS


@contextmanager
def logging_to_stderr(level: int) -> Iterator[None]:
    """Send the records of megavm, uvicorn and asyncio to stderr.

    Lines are written by a thread. While nobody reads stderr they wait, up to _MAX_LINES of them;
    further lines are dropped and counted, so that the server never waits for the reader.
    """
    logging.addLevelName(NOTICE, "NOTICE")
    lines = _Lines(queue.SimpleQueue())
    lines.setFormatter(LineFormatter())
    writer = _Writer(lines, sys.stderr.fileno()) if sys.stderr is not None else None
    handler = lines if writer is not None else logging.NullHandler()
    for name, least in (("megavm", level), ("uvicorn", logging.WARNING), ("asyncio", level)):
        chosen = logging.getLogger(name)
        chosen.handlers = [handler]
        chosen.setLevel(max(level, least))
        chosen.propagate = False
    try:
        if writer is not None:
            writer.start()
        yield
    finally:
        if writer is not None:
            writer.stop()


class _Lines(logging.handlers.QueueHandler):
    """Formats records, and queues the lines; while too many wait it drops and counts them."""

    queue: queue.SimpleQueue[Any]
    _dropped = 0

    def prepare(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return self.format(record)

    def enqueue(self, record: Any) -> None:
        """Queue a line. Called with the handler's lock."""
        if self.queue.qsize() < _MAX_LINES:
            self.queue.put(record)
        else:
            self._dropped += 1

    def take_dropped(self) -> int:
        """Number of lines dropped since the last call."""
        self.acquire()
        dropped, self._dropped = self._dropped, 0
        self.release()
        return dropped


class _Writer(logging.handlers.QueueListener):
    """Writes queued lines to a file descriptor.

    It uses neither a handler nor sys.stderr: both have locks, and the process could not end while
    a write that never returns holds one.
    """

    def __init__(self, lines: _Lines, descriptor: int) -> None:
        super().__init__(lines.queue)
        self._lines = lines
        self._descriptor = descriptor

    def handle(self, record: Any) -> None:
        """Write a line and those behind it, and rest: to write each at once takes the interpreter
        from the event loop and the engine as often."""
        if dropped := self._lines.take_dropped():
            fields = {"count": dropped}
            facts = {"msg": "log lines were dropped", "levelname": "WARNING", "fields": fields}
            self._write(self._lines.format(logging.makeLogRecord(facts)))
        lines = [record]
        while len(lines) < _LINES_AT_ONCE and not self._lines.queue.empty():
            line = self.dequeue(False)
            if line is None:  # the last one
                self.enqueue_sentinel()
                break
            lines.append(line)
        self._write("\n".join(lines))
        time.sleep(_REST_SECONDS)

    def stop(self) -> None:
        """Write what is queued, unless that takes longer than a second.

        In that case nobody reads stderr, and it becomes /dev/null: the last words of the process
        would block as well.
        """
        self.enqueue_sentinel()
        assert self._thread is not None
        self._thread.join(_FLUSH_SECONDS)
        if self._thread.is_alive():
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._descriptor)

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                return  # the reader is gone


def _value(value: object, spaces: bool = False) -> str:
    """A value on one line, quoted as a JSON string if needed."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if _PLAIN.fullmatch(text.replace(" ", "") if spaces else text):
        return text
    return json.dumps(text)
