"""`megavm serve` as a process."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

SECONDS = 60.0


class Process:
    """A server process and what it has said."""

    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = ("-m", "megavm", "serve"),
        **environment: str,
    ) -> None:
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        assert self.process.stderr is not None
        self._stderr = self.process.stderr

    def wait_for(self, words: str) -> str:
        """The first line that holds `words`."""
        end = time.monotonic() + SECONDS
        while words not in self.said:
            ready = select.select([self._stderr], [], [], max(end - time.monotonic(), 0))[0]
            part = os.read(self._stderr.fileno(), 65536).decode() if ready else ""
            assert part, f"{words!r} does not come: {self.said}"
            self.said += part
        return next(line for line in self.said.splitlines() if words in line)

    def connect(self) -> http.client.HTTPConnection:
        """A connection, as soon as there is somebody to connect to."""
        address = re.search(r"url=http://(\S+):(\d+)", self.wait_for("url="))
        assert address is not None
        return http.client.HTTPConnection(address[1], int(address[2]), timeout=SECONDS)

    def end(self, signal_number: int | None = None) -> int:
        """The exit code."""
        if signal_number is not None:
            self.process.send_signal(signal_number)
        said, _ = None, self.process.wait(SECONDS)
        said = self._stderr.read().decode()
        self.said += said
        return self.process.returncode


@contextlib.contextmanager
def started(*arguments: str, **environment: str) -> Iterator[Process]:
    process = Process("stories", "--port", "0", "--machine", "cpu", *arguments, **environment)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
        process.end()
