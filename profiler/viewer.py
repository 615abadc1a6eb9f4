"""Shows traces in a browser: serves the viewer page with a trace, or saves both as one file.

The page (`profiler/ui`) parses the trace itself. A trace without a summary, such as one that an
older version recorded, gets it on the way.
"""

from __future__ import annotations

import base64
import gzip
import html
import os
import socket
import sys
import webbrowser
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from megavm.profiler.output import open_output
from megavm.profiler.trace import TraceError
from megavm.profiler.trace_file import with_summary

PAGE: Final = Path(__file__).parent / "ui" / "dist" / "index.html"
_CHUNK: Final = 1 << 20


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name != "nt"


class _Handler(BaseHTTPRequestHandler):
    """`/` is the page, `/trace/<n>` the n-th trace. Other paths give 404."""

    protocol_version = "HTTP/1.1"
    server_version = "megavm"
    sys_version = ""

    def __init__(self, host: str, page: bytes, traces: Sequence[Path], *arguments: object) -> None:
        self._host, self._page, self._traces = host, page, traces
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if not self._is_for_us():
            self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", b"wrong host\n")
            return
        path = self.path.partition("?")[0]
        traces = {f"/trace/{i}": trace for i, trace in enumerate(self._traces)}
        if path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self._page)
        elif path in traces:
            self._send_file(traces[path])
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not found\n")

    do_HEAD = do_GET

    def _is_for_us(self) -> bool:
        """Whether the Host header names the address of this server.

        Prevents DNS rebinding: a page of another site whose name resolves to this computer must not
        read traces.
        """
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        return self._host not in ("127.0.0.1", "::1", "localhost") or name in (
            "127.0.0.1",
            "localhost",
            "[::1]",
        )

    def _head(self, status: HTTPStatus, kind: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._head(status, kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, path: Path) -> None:
        try:
            begin, rest = with_summary(path)
            with path.open("rb") as file:
                left = os.fstat(file.fileno()).st_size - rest
                self._head(HTTPStatus.OK, "application/octet-stream", len(begin) + left)
                file.seek(rest)
                if self.command != "HEAD":
                    self.wfile.write(begin)
                while self.command != "HEAD" and left > 0:
                    part = file.read(min(_CHUNK, left))
                    if not part:
                        self.close_connection = True
                        break
                    self.wfile.write(part)
                    left -= len(part)
        except OSError as error:
            if not isinstance(error, ConnectionError):
                self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal belongs to the command."""


def server_page(record_url: str) -> str:
    """The page for a server that records traces of itself when it is asked at ``record_url``.

    Raises TraceError when the page is not installed.
    """
    meta = f'<meta name="record" content="{html.escape(record_url)}">\n'
    return _page_with(meta, before="<title>")


def make_server(
    paths: Sequence[str | os.PathLike[str]], host: str = "127.0.0.1", port: int = 0
) -> ThreadingHTTPServer:
    """A server of the page with traces; it does not serve yet. Port 0 takes a free port.

    Raises TraceError when a file cannot be read, the page is not installed, or the address is not
    available.
    """
    traces = [_check(path) for path in paths]
    page = _page_with("".join(_meta(path) for path in traces), before="<title>")
    if not 0 <= port <= 65535:
        raise TraceError(f"port {port} is not between 0 and 65535")
    server = type("_Server6", (_Server,), {"address_family": socket.AF_INET6})
    kind: type[_Server] = server if ":" in host else _Server
    try:
        return kind((host, port), partial(_Handler, host, page.encode(), traces))
    except OSError as error:
        raise TraceError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error


def serve(
    path: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = True,
    *,
    compare: str | os.PathLike[str] | None = None,
) -> None:
    """Serve the page with a trace, or with two below each other, until Ctrl-C.

    Raises TraceError when a file cannot be read or the address is not available.
    """
    paths = [path] if compare is None else [path, compare]
    with make_server(paths, host, port) as server:
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{server.server_address[1]}/"
        names = " and ".join(os.fspath(each) for each in paths)
        what = f"{names} {'is' if compare is None else 'are'} at {url}"
        print(f"{what} (Ctrl-C ends)", file=sys.stderr, flush=True)
        if open_browser:
            _open(url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _open(url: str) -> None:
    """Show the page in a graphical browser; a text browser would take over the terminal."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(url)


def save_html(
    trace_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    compare: str | os.PathLike[str] | None = None,
) -> None:
    """Write one HTML file with the page and a trace in it, or two below each other.

    Raises TraceError when a trace cannot be read or the file cannot be written.
    """
    paths = [trace_path] if compare is None else [trace_path, compare]
    elements = "".join(map(_element, map(_check, paths)))
    page = _page_with(elements, before="<script>")
    try:
        with open_output(out_path, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
    except OSError as error:
        raise TraceError(
            f"cannot write {os.fspath(out_path)}: {error.strerror or error}"
        ) from error


def _check(path: str | os.PathLike[str]) -> Path:
    trace = Path(path)
    try:
        with trace.open("rb") as file:
            file.read(8)
    except OSError as error:
        raise TraceError(f"cannot read {trace}: {error.strerror or error}") from error
    return trace.resolve()


def _page_with(elements: str, *, before: str) -> str:
    try:
        page = PAGE.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"the page is not installed: {PAGE} is missing") from error
    at = page.index(before)
    return page[:at] + elements + page[at:]


def _meta(path: Path) -> str:
    return f'<meta name="trace" content="{html.escape(path.name)}">\n'


def _element(path: Path) -> str:
    begin, rest = with_summary(path)
    packed = base64.b64encode(gzip.compress(begin + path.read_bytes()[rest:], 6, mtime=0)).decode()
    name = html.escape(path.name)
    return f'<script type="application/octet-stream" data-name="{name}">{packed}</script>\n'
