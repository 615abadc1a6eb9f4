"""Keys, queue, time, origins, pages, and what is written to the log."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import RunningServer, assert_idle, running, serving, wait_until

from megavm import LLM
from megavm.scheduler.engine.prompt_limits import PromptLimits
from megavm.scheduler.llama.hub import resolve
from megavm.server.auth import ApiKeys
from megavm.server.hosts import AllowedHosts
from megavm.server.logs import LineFormatter
from megavm.server.settings import Settings

PROMPT = "Once upon a time"
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_requests_pipelined_is_noticed(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    ask = head + f"content-length: {len(body)}\r\n\r\n".encode() + body
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(ask * 3)
            wait_until(lambda: server.engine.num_running == 1)
        assert_idle(server)
        # Neither of the others ran, and nobody wrote to a connection that was closed.
        assert server.metric("request_success_total", finished_reason="length") == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("origin", ["foo", "https://a.example/", "https://", "a.example:1"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the origin {origin!r} must be *")):
        Settings(("a",), allowed_origins=(origin,))
    assert Settings(("a",), allowed_origins=("*", "https://a.example:1", "http://[::1]:3"))


def test_a_request_may_take_as_long_as_it_wants() -> None:
    with serving({"request_timeout": float("inf")}) as server:
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


# Keys.


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with serving({"api_keys": ("first", "second")}) as server:
        for key in ("first", "second"):
            assert server.client(api_key=key).models.list()
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client(api_key="third").models.list()
        assert refused.value.code == "invalid_api_key"
        for header in ({}, {"authorization": "first"}, {"authorization": "Basic first"}):
            for path in ("/v1/completions", "/tokenize", "/v1/nothing"):
                response = server.send("POST", path, b"{", **header)
                assert response.status == 401
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics", "/version", "/ping"):
            assert server.get(path).status == 200


def test_keys_are_compared_whole() -> None:
    keys = ApiKeys(["secret"])
    assert keys.allow(b"Bearer secret")
    assert keys.allow(b"bearer  secret ")
    for wrong in (b"", b"Bearer", b"Bearer ", b"Bearer secre", b"Bearer secret2", b"Bearer \xff"):
        assert not keys.allow(wrong)
    assert ApiKeys([]).allow(b"")


# Hosts.


def test_a_host_is_a_name_of_the_server_localhost_or_an_address() -> None:
    hosts = AllowedHosts(("Example.com", "*.example.org"))
    for host in (
        "",
        "localhost",
        "localhost:8000",
        "LOCALHOST.:80",
        "app.localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.1.7",
        "example.com:443",
        "a.b.example.org",
    ):
        assert hosts.allow(host), host
    for host in (
        "evil.example",
        "evil.example:8000",
        "example.com.evil.example",
        "notexample.org",
        "example.org",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "[::1].evil.example",
        "localhost:8000:80",
        "a/b",
    ):
        assert not hosts.allow(host), host
    for everything in (AllowedHosts(None), AllowedHosts(("*",))):
        assert everything.allow("evil.example")
    assert not AllowedHosts(()).allow("example.com")


def test_a_page_of_another_name_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megavm.server")
    caplog.handler.setFormatter(LineFormatter())
    with serving({"allowed_hosts": ("example.com",)}) as server:
        for path in ("/", "/health", "/metrics", "/v1/models", "/v1/completions"):
            response = server.get(path, host="evil.example:8000")
            assert response.status == 403
            assert response.error["code"] == "host_not_allowed"
            assert "'evil.example:8000'" in response.error["message"]
        assert server.get("/v1/models", host="example.com").status == 200
        assert server.get("/v1/models").status == 200
        wait_until(lambda: caplog.text.count("--allowed-host NAME") == 3)


# The queue and the time.


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server that takes four sequences, two of which run."""
    with serving({"max_queue": 2, "max_n": 3}, max_num_seqs=2) as server:
        yield server
        assert_idle(server)


@contextlib.contextmanager
def occupied(server: RunningServer, sequences: int) -> Iterator[None]:
    """As many requests that do not end by themselves."""
    connections = [server.open("/v1/completions", **ENDLESS) for _ in range(sequences)]
    try:
        wait_until(lambda: server.service.engine.num_sequences == sequences)
        yield
    finally:
        for connection in connections:
            connection.close()
        assert_idle(server)


def test_a_full_queue_says_when_to_come_again(small: RunningServer) -> None:
    with occupied(small, 4):
        with pytest.raises(openai.RateLimitError) as full:
            small.client().completions.create(model="stories", prompt=PROMPT)
        assert full.value.response.headers["retry-after"] == "1"
        assert full.value.code == "queue_full"
    with occupied(small, 3):
        assert small.post("/v1/completions", {"prompt": PROMPT, "n": 2}).status == 429
        assert small.post("/v1/completions", {"prompt": [PROMPT] * 2}).status == 429
    small.client().completions.create(model="stories", prompt=PROMPT, n=3)


def test_what_can_never_fit_is_not_asked_to_come_again(small: RunningServer) -> None:
    assert small.post("/v1/completions", {"prompt": PROMPT, "n": 4}).error["param"] == "n"
    assert small.post("/v1/completions", {"prompt": [PROMPT] * 5}).error["param"] == "prompt"
    response = small.post("/v1/completions", {"prompt": [PROMPT] * 3, "n": 2})
    assert "6 completions at once, 4 are possible" in response.error["message"]
    assert response.status == 400


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with serving({"request_timeout": 0.3}) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        for part in (
            b"content-length: 99\r\n\r\n{",
            b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(head + part)
                assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert_idle(server)


def test_a_request_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"request_timeout": 0.5}) as server:
        monkeypatch.setattr(server.engine.runner, "run", _slow(server))
        response = server.post("/v1/completions", ENDLESS)
        assert response.status == 408
        assert response.error["code"] == "request_timeout"
        assert response.headers["x-should-retry"] == "false"
        events = server.stream("/v1/completions", **ENDLESS)
        assert events[-1]["error"]["code"] == "request_timeout"
        assert all("choices" in event for event in events[:-1])
        assert_idle(server)


def _slow(server: RunningServer) -> Any:
    original = server.engine.runner.run

    def run(*arguments: Any) -> None:
        time.sleep(0.05)
        original(*arguments)

    return run


# A client that goes away or does not read.


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks_within_one_step(
    server: RunningServer, stream: bool
) -> None:
    engine = server.engine
    connection = server.open("/v1/completions", **ENDLESS, stream=stream, n=3)
    wait_until(lambda: engine.num_running == 3)
    steps: list[int] = []
    abort = server.core.loop._abort

    def note_step(key: int) -> None:
        steps.append(engine.counters.launches)
        abort(key)
        assert engine.blocks.num_held == 0
        steps.append(engine.counters.launches)

    server.core.loop._abort = note_step  # type: ignore[method-assign]
    try:
        connection.close()
        wait_until(lambda: len(steps) == 2)
    finally:
        server.core.loop._abort = abort  # type: ignore[method-assign]
    assert steps[0] == steps[1]
    assert_idle(server)


def test_a_client_that_does_not_read_holds_up_nobody(server: RunningServer) -> None:
    fields = {**ENDLESS, "max_tokens": 200, "stream": True}
    connections = [server.open("/v1/completions", **fields) for _ in range(3)]
    for _ in range(3):
        answer = server.complete(max_tokens=20, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 20
    # Its tokens are generated all the same, and wait for it.
    wait_until(lambda: not server.engine.has_work)
    for connection in connections:
        content = b""
        while b"data: [DONE]\n\n" not in content:
            part = connection.recv(1 << 20)
            assert part
            content += part
        assert content.count(b"data: {") == 200
        connection.close()
    assert_idle(server)


def test_half_a_request_holds_up_nobody(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
        )
        assert server.complete(max_tokens=2)


def test_a_request_with_two_lengths_is_refused_and_ends_the_connection(
    server: RunningServer,
) -> None:
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(smuggled)
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head + smuggled)
        received = b""
        while part := connection.recv(4096):
            received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in received
    assert received.count(b"HTTP/1.1") == 1


# While there is no model.


def test_a_server_answers_while_its_model_is_loaded() -> None:
    go_on = threading.Event()

    def load(progress: Any) -> LLM:
        progress("reading weights", 3, 10)
        assert go_on.wait(30)
        return LLM("stories", dtype="float32")

    with running(load) as server:
        assert server.get("/health").status == 200
        wait_until(lambda: "progress" in server.get("/ready").json)
        wait_until(lambda: server.get("/ready").json["progress"] == "reading weights (3 of 10)")
        assert server.get("/ready").status == 503
        assert server.get("/metrics").status == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/profile"):
            response = server.post(path, {})
            assert response.status == 503
            assert response.headers["x-should-retry"] == "false"
            assert response.error["code"] == "loading"
            assert "reading weights" in response.error["message"]
        with pytest.raises(openai.InternalServerError, match="loaded"):
            server.client().models.list()
        go_on.set()
        wait_until(lambda: server.get("/ready").status == 200)
        assert server.client().models.list()


def test_programs_of_usual_sizes_are_there_before_the_first_request() -> None:
    with serving(max_num_seqs=6, max_num_batched_tokens=200) as server:
        runner: Any = server.engine.runner
        buckets = set(runner.programs.compiled)
        for rows in range(1, 65):
            assert runner.programs.bucket(rows, 1, 1, sampled=True) in buckets
        for batch in range(1, 7):
            assert runner.programs.bucket(batch, batch, 1, decode=True, sampled=True) in buckets


def test_garbage_collections_are_rare_in_a_server_that_is_ready() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700)
    try:
        with serving():
            wait_until(lambda: gc.get_threshold()[0] == 10_000)
            assert gc.get_freeze_count() > 10_000
    finally:
        gc.set_threshold(*before)


def test_a_server_that_is_to_end_gives_up_loading() -> None:
    begun = threading.Event()

    def load(progress: Any) -> LLM:
        begun.set()
        for done in range(3000):
            progress("reading weights", done, 3000)
            time.sleep(0.01)
        raise AssertionError("nobody has stopped it")

    with running(load) as server:
        assert begun.wait(30)
        asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop).result(30)
        assert server.get("/health").status == 503
    assert server.service.failure is None


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tmp_path: Path) -> None:
    for file in Path(resolve("stories")).iterdir():
        if file.name not in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(file, tmp_path)
    with running(lambda progress: LLM(tmp_path)) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        answer = server.complete(prompt=[5, 6], max_tokens=2, logprobs=1, return_token_ids=True)
        choice = answer["choices"][0]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        events = server.stream("/v1/completions", prompt=[5, 6], max_tokens=2, ignore_eos=True)
        assert len(events) == 2
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": [5], "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            assert server.post(path, body).status == 400
        for field, value in (
            ("structured_outputs", {"regex": "a"}),
            ("guided_regex", "a"),
            ("bad_words", ["fox"]),
            ("stop", ["fox"]),
        ):
            error = server.post("/v1/completions", {"prompt": [5], field: value}).error
            assert "tokenizer" in error["message"]
            assert str(tmp_path) not in error["message"]
            if field != "bad_words":
                assert error["param"] == field


def test_a_model_that_cannot_be_loaded_is_said_to_be() -> None:
    def load(progress: Any) -> LLM:
        raise ValueError("no such model")

    with running(load) as server:
        wait_until(lambda: server.get("/health").status == 503)
        response = server.post("/v1/completions", {"prompt": "x"})
        assert response.error["code"] == "failed"
        assert "no such model" in response.error["message"]


# Pages, origins and the document.


def test_pages(server: RunningServer) -> None:
    page = server.get("/profiler")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<html" in page.content
    assert b"https://cdn" not in page.content
    for path in ("/", "/profiler", "/metrics", "/version", "/health"):
        assert server.get(path).status == 200
        head = server.send("HEAD", path)
        assert (head.status, head.content) == (200, b"")


def test_other_origins_are_let_in_only_if_they_are_named(server: RunningServer) -> None:
    origin = {"origin": "http://example.com"}
    assert "access-control-allow-origin" not in server.get("/v1/models", **origin).headers
    with serving({"allowed_origins": ("http://example.com",), "api_keys": ("k",)}) as other:
        response = other.get("/v1/models", authorization="Bearer k", **origin)
        assert response.headers["access-control-allow-origin"] == "http://example.com"
        asked = {"access_control_request_method": "POST", **origin}
        assert other.send("OPTIONS", "/v1/completions", **asked).status == 200
        refused = other.get("/v1/models", origin="http://example.org", authorization="Bearer k")
        assert "access-control-allow-origin" not in refused.headers


def test_the_openapi_document_has_the_bodies(server: RunningServer) -> None:
    document = server.get("/openapi.json").json
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert schema["required"] == ["prompt"]
    assert {"echo", "logprobs", "top_k", "seed"} <= set(schema["properties"])


def test_versions_are_told(server: RunningServer) -> None:
    import megavm

    assert server.get("/version").json == {"version": megavm.__version__}
    assert server.get("/ping").json == server.get("/health").json == {"status": "ready"}


# The log.


def test_a_request_is_one_line_without_its_prompt(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megavm.server")
    caplog.handler.setFormatter(LineFormatter())
    secret = "the secret words"
    body = {"prompt": secret, "max_tokens": 3, "ignore_eos": True, "new_field": 1}
    server.post("/v1/completions", body, x_request_id="abc")
    server.post("/v1/completions", {**body, "temperature": -1}, x_request_id='quo"te')
    wait_until(lambda: caplog.text.count(" request ") == 2)
    first, second = caplog.text.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO request id=abc ", first)
    for part in ("path=/v1/completions", "status=200", "completion_tokens=3", "ignored=new_field"):
        assert part in first
    assert r'id="quo\"te"' in second
    assert "status=400" in second
    assert secret not in caplog.text


def test_prompts_are_logged_if_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="megavm.server")
    caplog.handler.setFormatter(LineFormatter())
    with serving({"log_prompts": True}) as server:
        server.complete(prompt="some words\nmore", max_tokens=1)
        server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "said"}], "max_tokens": 1},
        )
        wait_until(lambda: caplog.text.count(" request ") == 2)
    assert r'prompt="some words\nmore"' in caplog.text
    assert "said" in caplog.text


def test_a_fault_of_the_server_is_a_500_and_a_traceback_in_the_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(PromptLimits, "validate", broken)
    with pytest.raises(openai.InternalServerError):
        server.client().completions.create(model="stories", prompt=PROMPT)
    assert "KeyError: 'broken'" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"model_names": ()},
        {"api_keys": ("",)},
        {"allowed_hosts": ("",)},
        {"ssl_keyfile": "key.pem"},
        {"allowed_hosts": ("http://example.com",)},
        {"allowed_hosts": ("*example.com",)},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"request_timeout": 0.0},
        {"request_timeout": float("nan")},
        {"header_timeout": 0.0},
        {"max_connections": 0},
        {"shutdown_timeout": -1.0},
    ],
)
def test_settings_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        Settings(**{"model_names": ("x",), **given})
