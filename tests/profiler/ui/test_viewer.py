"""The server of the page and the saved page, without a browser."""

from __future__ import annotations

import base64
import gzip
import http.client
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import synthetic_trace
from ui.page import served

from megavm.profiler.trace import TraceError
from megavm.profiler.viewer import make_server, save_html


def ask(
    port: int, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers["Content-Type"], body


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / 'a <b> "c".megatrace'
    path.write_bytes(bytes(range(256)) * 5000)
    return path


def test_server_gives_page_and_trace_with_their_types(trace: Path) -> None:
    with served(trace) as port:
        status, kind, body = ask(port, "/")
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert b'<meta name="trace" content="a &lt;b&gt; &quot;c&quot;.megatrace">' in body
        assert ask(port, "/trace/0") == (200, "application/octet-stream", trace.read_bytes())
        assert ask(port, "/trace/0", "HEAD") == (200, "application/octet-stream", b"")


@pytest.mark.parametrize(
    "path", ["/trace/1", "/favicon.ico", "/../pyproject.toml", "/trace/", "/x"]
)
def test_server_gives_nothing_else(trace: Path, path: str) -> None:
    with served(trace) as port:
        assert ask(port, path)[0] == 404


def test_server_refuses_requests_for_other_hosts(trace: Path) -> None:
    with served(trace) as port:
        assert ask(port, "/trace/0", host=f"attacker.example:{port}")[0] == 403
        assert ask(port, "/", host=f"localhost:{port}")[0] == 200


def test_server_says_what_is_wrong_in_one_sentence(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^cannot read .*missing.megatrace: No such file"):
        make_server([tmp_path / "missing.megatrace"])
    with pytest.raises(TraceError, match=r"^cannot read .*: Is a directory"):
        make_server([tmp_path])
    with pytest.raises(TraceError, match=r"^port 70000 is not between 0 and 65535"):
        make_server([trace], port=70000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TraceError, match=f"^cannot listen at 127.0.0.1:{port}: "):
            make_server([trace], port=port)


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a",), "{}/a.megatrace is"), (("a", "b"), "{0}/a.megatrace and {0}/b.megatrace are")],
)
def test_command_serves_until_it_is_interrupted(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    traces = [tmp_path / f"{name}.megatrace" for name in names]
    for trace in traces:
        synthetic_trace(workers=1, steps=1, layers=1).save(trace)
    command = [sys.executable, "-m", "megavm", "trace", "view", *map(str, traces), "--no-open"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    where = re.escape(said.format(tmp_path)) + r" at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends\)"
    found = re.fullmatch(where, line.strip())
    assert found is not None, line
    assert ask(int(found[1]), "/")[0] == 200
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=20)[1]
    assert process.returncode in (0, 130)
    assert "Traceback" not in rest


def test_saved_page_has_the_trace_and_its_name_escaped(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    save_html(trace, out)
    found = re.search(
        r'<script type="application/octet-stream" data-name="([^"]*)">([^<]*)</script>',
        out.read_text("utf-8"),
    )
    assert found is not None
    assert found[1] == "a &lt;b&gt; &quot;c&quot;.megatrace"
    assert gzip.decompress(base64.b64decode(found[2])) == trace.read_bytes()


def test_saving_says_what_is_wrong(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^cannot write .*nowhere"):
        save_html(trace, tmp_path / "nowhere" / "out.html")
    with pytest.raises(TraceError, match=r"^cannot read "):
        save_html(tmp_path / "missing", tmp_path / "out.html")
