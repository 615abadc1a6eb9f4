"""How many connections there may be, how long they wait for a request, and what else is refused."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import resource
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from server_process import Process
from serving import Response as Answer
from serving import wait_until
from starlette.requests import Request
from starlette.responses import Response

from megavm.server.connections import possible_connections
from megavm.server.engine.transport import EngineThread
from megavm.server.logs import LineFormatter
from megavm.server.run import Server, listen
from megavm.server.settings import Settings

HALF_HEAD = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
HALF_BODY = (
    b"POST /read HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: 99\r\n\r\n{"
)


async def _read_body(request: Request) -> Response:
    await request.body()
    return Response()


async def _echo(request: Request) -> Response:
    return Response(await request.body())


class Running:
    """A server in a thread, whose model is being loaded until the end."""

    def __init__(self, listener: socket.socket | None = None, **settings: Any) -> None:
        self._go_on = threading.Event()
        listener = listener or listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.server = Server(EngineThread(self._load), Settings(("stuck",), **settings), listener)
        app = self.server.config.app
        assert isinstance(app, FastAPI)
        app.add_route("/read", _read_body, methods=["POST"])
        app.add_route("/echo", _echo, methods=["POST"])
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)

    def _load(self, progress: Any) -> Any:
        self._go_on.wait(60)
        raise ValueError("the test is over")

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

    def get(self, path: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())

    def end(self) -> None:
        self._go_on.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)


@contextlib.contextmanager
def running(listener: socket.socket | None = None, **settings: Any) -> Iterator[Running]:
    server = Running(listener, **settings)
    try:
        yield server
    finally:
        server.end()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    content = b""
    while part := connection.recv(4096):
        content += part
    return content


# Time.


def test_headers_that_do_not_end_are_not_waited_for() -> None:
    with running(header_timeout=0.4) as server:
        with server.connect(HALF_HEAD) as connection:
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b"connection: close" in head
            assert json.loads(body)["error"]["code"] == "header_timeout"
        wait_until(lambda: server.num_connections == 0)


def test_single_bytes_of_headers_do_not_extend_the_time() -> None:
    with running(header_timeout=0.5) as server, server.connect(HALF_HEAD) as connection:
        began = time.monotonic()
        connection.settimeout(0.05)
        while True:
            with contextlib.suppress(TimeoutError, BrokenPipeError):
                connection.sendall(b"x")
                if connection.recv(4096).startswith(b"HTTP/1.1 408"):
                    break
            assert time.monotonic() - began < 10
        assert time.monotonic() - began > 0.4


def test_a_silent_connection_is_closed_without_an_answer() -> None:
    with running(header_timeout=0.3) as server, server.connect() as connection:
        assert read_all(connection) == b""


def test_the_next_request_of_a_connection_has_the_same_time() -> None:
    with running(header_timeout=0.4) as server, server.connect() as connection:
        for _ in range(3):
            connection.sendall(HALF_HEAD + b"\r\n")
            received = b""
            while b'{"status"' not in received:
                received += connection.recv(4096)
            assert b"200 OK" in received
            time.sleep(0.3)
        time.sleep(0.4)  # idle between requests: that is the time of keep-alive
        connection.sendall(HALF_HEAD)
        assert b"408" in read_all(connection)


def test_a_request_is_not_limited_by_the_time_of_its_headers() -> None:
    with running(header_timeout=0.2) as server, server.connect(HALF_BODY) as connection:
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):
            connection.recv(4096)


def test_a_client_that_reads_nothing_is_left_after_the_request_timeout() -> None:
    with running(request_timeout=1.0) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:  # until the server reads no more, as its answers are not read
                connection.sendall((b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n") * 1000)
        wait_until(lambda: server.num_connections == 0)


# Number.


def test_more_connections_than_allowed_are_answered_503() -> None:
    with running(max_connections=3) as server:
        busy = [server.connect(HALF_BODY) for _ in range(3)]
        wait_until(lambda: server.num_connections == 3)
        time.sleep(1.1)  # connections with a request are not closed, whatever their age
        for _ in range(3):
            refused = server.get("/health")
            assert refused.status == 503
            assert refused.error["code"] == "too_many_connections"
            assert refused.error["message"] == "The server has 3 connections and takes no more."
            assert refused.headers["connection"] == "close"
            assert refused.headers["retry-after"] == "1"
        busy.pop().close()
        wait_until(lambda: server.num_connections == 2)
        assert server.get("/health").status == 200
        wait_until(lambda: server.num_connections == 2)
        counted = server.get("/metrics").content
        assert b'http_requests_total{route="other",status="503"} 3.0' in counted
        for connection in busy:
            connection.close()


def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest() -> None:
    with running(max_connections=3) as server:
        busy = server.connect(HALF_BODY)
        wait_until(lambda: server.num_connections == 1)
        oldest = server.connect()
        wait_until(lambda: server.num_connections == 2)
        younger = server.connect(HALF_HEAD)
        wait_until(lambda: server.num_connections == 3)
        assert server.get("/health").status == 503  # they may just be about to send
        time.sleep(1.1)
        assert server.get("/health").status == 200
        assert read_all(oldest) == b""
        younger.sendall(b"\r\n")
        assert b"200 OK" in younger.recv(4096)
        for connection in (busy, oldest, younger):
            connection.close()


def test_connections_are_fewer_than_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    caplog.handler.setFormatter(LineFormatter())
    assert possible_connections(500) == 500
    assert caplog.text == ""
    assert possible_connections(8192) == 768
    assert "max_connections=8192 possible=768 open_files=1024" in caplog.text
    limits.append((1024, 4096))
    assert possible_connections(8192) == 4096 - 256
    assert limits[-1] == (4096, 4096)
    limits.append((1024, resource.RLIM_INFINITY))
    assert possible_connections(8192) == 8192
    assert limits[-1] == (65536, resource.RLIM_INFINITY)
    limits.append((16, 16))
    assert possible_connections(8192) == 8


# Descriptors.


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptor left."""

    failures = 0

    def accept(self) -> Any:
        if self.failures < 5:
            self.failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_without_descriptors_logs_that_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.handler.setFormatter(LineFormatter())
    listener = Exhausted(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    with running(listener) as server:
        assert server.get("/health").status == 200
        assert listener.failures == 5
    lines = [line for line in caplog.text.splitlines() if "cannot accept" in line]
    assert len(lines) == 1
    assert lines[0].endswith('ERROR cannot accept connections count=1 cause="Too many open files"')
    assert all(record.levelno < logging.CRITICAL for record in caplog.records)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from megavm.cli import main
sys.exit(main(["serve", "stories", "--port", "0", "--machine", "cpu"]))
"""


def test_1100_silent_connections_leave_a_server_with_1024_descriptors_alive() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this test needs 1,100 descriptors of its own")
    server = Process("1024", "1024", program=("-c", LIMITED))
    silent: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        server.wait_for(" ready ")
        probe = server.connect()
        for _ in range(1100):
            silent.append(socket.create_connection((probe.host, probe.port), timeout=30))
        time.sleep(1.2)
        for _ in range(5):
            probe.request("GET", "/health")
            answer = probe.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
            probe.close()
        assert server.end(2) == 130
        assert "WARNING fewer connections than asked for" in server.said
        assert server.said.count("\n") < 20
    finally:
        server.process.kill()
        for connection in silent:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    server = Process("256", "2000", program=("-c", LIMITED))
    try:
        server.wait_for(" listening ")
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == ["2000", "2000"]
    finally:
        server.process.kill()
        server.end()


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    paths = (str(directory / "cert.pem"), str(directory / "key.pem"))
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext"
    names = "subjectAltName=IP:127.0.0.1"
    command = ["openssl", *words.split(), names, "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def get_health(port: int, certificate: str) -> tuple[int, Any]:
    context = ssl.create_default_context(cafile=certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_a_certificate_makes_it_https(certificate: tuple[str, str]) -> None:
    files: dict[str, Any] = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
    with running(header_timeout=0.5, **files) as server:
        assert server.server._url == f"https://127.0.0.1:{server.port}"
        assert get_health(server.port, certificate[0]) == (200, {"status": "loading"})
        with server.connect() as silent:
            assert read_all(silent) == b""
        with server.connect(HALF_HEAD + b"\r\n") as plain, contextlib.suppress(ConnectionError):
            assert b"HTTP" not in read_all(plain)
        wait_until(lambda: not server.server._connections.waiting)


def test_connections_without_a_handshake_count_and_make_room(certificate: tuple[str, str]) -> None:
    files: dict[str, Any] = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True))
    with running(max_connections=2, **files) as server:
        silent = [server.connect() for _ in range(2)]
        wait_until(lambda: len(server.server._connections.waiting) == 2)
        status, body = get_health(server.port, certificate[0])
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        time.sleep(1.1)
        assert get_health(server.port, certificate[0])[0] == 200
        assert read_all(silent[0]) == b""
        for connection in silent:
            connection.close()


def test_a_certificate_that_cannot_be_used_is_named(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    def refused(certfile: str, keyfile: str | None) -> str:
        settings = Settings(("x",), ssl_certfile=certfile, ssl_keyfile=keyfile)
        with (
            listen("127.0.0.1", 0) as listener,
            pytest.raises(OSError, match="cannot use") as failure,
        ):
            Server(EngineThread(lambda progress: pytest.fail("it began")), settings, listener)
        return str(failure.value)

    missing = str(tmp_path / "missing.pem")
    assert (
        refused(missing, None) == f"cannot use the certificate {missing}: No such file or directory"
    )
    assert f"{certificate[0]} with the key {missing}: No such file" in refused(
        certificate[0], missing
    )
    assert refused(certificate[0], certificate[0]).startswith("cannot use the certificate")


# Other protocols, and what is none.


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_is_ignored(offer: bytes) -> None:
    # Java's client offers HTTP/2 with every request.
    head = (
        b"POST /echo HTTP/1.1\r\nhost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"HTTP2-Settings: AAEAAEAA\r\nUpgrade: " + offer + b"\r\ncontent-length: 4\r\n\r\n"
    )
    with running() as server:
        for parts in ([head + b"body"], [head, b"body"]):
            with server.connect() as connection:
                for _ in range(2):  # the connection stays as it is
                    for part in parts:
                        connection.sendall(part)
                        time.sleep(0.05)
                    answer = http.client.HTTPResponse(connection)
                    answer.begin()
                    assert (answer.status, answer.read()) == (200, b"body")
        wait_until(lambda: server.num_connections == 0)


def test_what_is_not_http_gets_an_error_object() -> None:
    with running() as server, server.connect(b"HELLO\r\n\r\n") as connection:
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
