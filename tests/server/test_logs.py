"""What is logged of a request, which lines, and that a reader who does not read holds up nobody."""

from __future__ import annotations

import http.client
import io
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from serving import RunningServer, wait_until

from megavm.server import logs
from megavm.server.logs import LineFormatter, Repeated, log, logging_to_stderr

NAMES = ("megavm", "uvicorn", "asyncio")


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restores what `logging_to_stderr` changes."""
    chosen = [logging.getLogger(name) for name in NAMES]
    before = [(x.handlers, x.level, x.propagate) for x in chosen]
    yield
    for logger, state in zip(chosen, before, strict=True):
        logger.handlers, logger.level, logger.propagate = state


class Pipe(io.StringIO):
    """A stderr whose other end is read by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.reader, self._writer = os.pipe()
        monkeypatch.setattr(sys, "stderr", self)

    def fileno(self) -> int:
        return self._writer

    def lines(self, until: str) -> list[str]:
        """The lines up to the first that holds `until`, and those that came with it."""
        text = ""
        while until not in text or not text.endswith("\n"):
            assert select.select([self.reader], [], [], 10)[0], f"{until!r} does not come: {text}"
            text += os.read(self.reader, 1 << 16).decode()
        return text.splitlines()


# Requests.


def test_an_error_is_logged_with_its_field_its_sentence_and_the_client(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megavm.server")
    caplog.handler.setFormatter(LineFormatter())
    response = server.post("/v1/completions", {"prompt": "x", "temperature": -1})
    server.get("/v1/nothing")
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, x_forwarded_for="203.0.113.7")
    wait_until(lambda: caplog.text.count(" request ") == 3)
    wrong, missing, good = caplog.text.splitlines()
    assert response.status == 400
    assert "client=127.0.0.1:" in wrong
    assert "param=temperature" in wrong
    assert f'error="{response.error["message"]}"' in wrong
    assert "status=404" in missing
    assert 'error="Not Found: GET /v1/nothing"' in missing
    assert "client=203.0.113.7 " in good
    assert "error=" not in good
    assert "param=" not in good


def test_an_event_that_repeats_is_one_line_with_a_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="megavm.server")
    caplog.handler.setFormatter(LineFormatter())
    now = 100.0
    monkeypatch.setattr("megavm.server.logs.time.monotonic", lambda: now)
    event = Repeated(logging.WARNING, "too many")
    for _ in range(1000):
        event(limit=3)
    now = 111.0
    event(limit=3)
    first, second = caplog.text.splitlines()
    assert first.endswith("WARNING too many count=1 limit=3")
    assert second.endswith("WARNING too many count=1000 limit=3")


# The level.


@pytest.mark.usefixtures("loggers")
def test_records_below_the_level_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe(monkeypatch)
    with logging_to_stderr(logging.WARNING):
        log(logging.INFO, "said quietly")
        logging.getLogger("uvicorn.error").info("uvicorn says")
        logging.getLogger("asyncio").error("asyncio fails")
        log(logging.WARNING, "said aloud", of="it")
    lines = pipe.lines(until="said aloud of=it\n")
    assert [line.partition("Z ")[2] for line in lines] == [
        "ERROR asyncio fails",
        "WARNING said aloud of=it",
    ]


# A reader that does not read.


@pytest.mark.usefixtures("loggers")
def test_lines_that_nobody_reads_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_LINES", 100)
    pipe = Pipe(monkeypatch)
    with logging_to_stderr(logging.INFO):
        began = time.monotonic()
        for number in range(2000):
            log(logging.INFO, "a line", number=number, filling="x" * 1000)
        assert time.monotonic() - began < 5
        lines = pipe.lines(until="were dropped count=")
        sent = 2000
        while f" number={sent - 1} " not in lines[-1]:  # the newest was dropped, or is on its way
            log(logging.INFO, "a line", number=sent, filling="read again")
            sent += 1
            lines += pipe.lines(until="\n")
    written = sum(" a line " in line for line in lines)
    dropped = [line for line in lines if " WARNING log lines were dropped count=" in line]
    assert 100 <= written < 1000
    assert sum(int(line.rpartition("=")[2]) for line in dropped) == sent - written


@pytest.mark.usefixtures("loggers")
def test_the_end_waits_for_a_reader_only_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe(monkeypatch)
    began = time.monotonic()
    with logging_to_stderr(logging.INFO):
        for _ in range(20_000):
            log(logging.INFO, "a line", filling="x" * 100)
    os.write(pipe.fileno(), b"the last words of the process" * 10_000)
    assert time.monotonic() - began < 10


def test_a_server_whose_log_nobody_reads_answers_and_ends() -> None:
    command = [
        sys.executable,
        "-m",
        "megavm",
        "serve",
        "stories",
        "--port",
        "0",
        "--machine",
        "cpu",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            said = b""
            while b" ready " not in said:
                said += os.read(process.stderr.fileno(), 65536)
            port = int(said.partition(b"127.0.0.1:")[2].split()[0])
            # Each request is a line of more than 300 bytes; a pipe holds 64 KiB.
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            for _ in range(600):
                connection.request("GET", "/v1/models/" + "x" * 300)
                assert connection.getresponse().read()
            connection.close()
            process.terminate()
            killer = threading.Timer(30, process.kill)
            killer.start()
            assert process.wait() == 0
            killer.cancel()
        finally:
            process.kill()
