"""examples/ray_serve.py: two replicas behind Ray Serve, where ray is installed."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from serving import Response, RunningServer, wait_until

from megavm import LLM, SamplingParams

ray: Any = pytest.importorskip("ray", reason="ray is not installed")
serve: Any = pytest.importorskip("ray.serve", reason='ray is installed without "ray[serve]"')

EXAMPLES = Path(__file__).parents[2] / "examples"
REPLICA = "x-replica-id"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
STORY = "Once upon a time there was a little fox who lived in a big forest with his mother. "
PROMPTS = [f"{name} said: {STORY}" for name in ("Tom", "Lily", "Ben", "Mia", "Sam", "Anna")]
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_replicas": 2,
    "health_check_period": 0.5,
    "shutdown_timeout": 60,
    "allowed_hosts": ("test",),
}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The module of the example, which Ray's processes can import too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one to the home
        yield importlib.import_module("ray_serve")
    del sys.modules["ray_serve"]


@pytest.fixture(scope="module")
def server(example: Any) -> Iterator[RunningServer]:
    """Two replicas; at the end no process of Ray may be left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # of sockets, whose paths must be short
    try:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=str(directory),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(example)
        yield RunningServer(port, *[cast(Any, None)] * 3)
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        try:
            wait_until(lambda: not processes(directory))
        finally:
            for process in processes(directory):
                os.kill(process, signal.SIGKILL)
            shutil.rmtree(directory, ignore_errors=True)


def deploy(example: Any) -> None:
    """Deploy the example with replicas that can be made to fail."""
    with pytest.MonkeyPatch.context() as patch:
        failing = example.Replica.options(failing_replica(example.Replica.func_or_class))
        patch.setattr(example, "Replica", failing)
        application = example.app(example.Arguments(**ARGUMENTS))
    serve.run(application, name="megavm")


def failing_replica(replica: type) -> type:
    class Failing(replica):  # type: ignore[misc]
        def fail(self) -> str:
            """Lose the machine at the next step."""
            from megavm.vm.machine import MachineLost

            def lose(*arguments: object) -> None:
                raise MachineLost("the machine is lost")

            self._engine.core.llm.runner.run = lose
            return cast(str, self._id)

    return Failing


def processes(directory: Path) -> list[int]:
    """Other processes that have a file of the directory open."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(f"{directory}/"):
                found.add(int(descriptor.parts[2]))
    return sorted(found - {os.getpid()})


def complete(server: RunningServer, prompt: str, tokens: int = 16, **headers: str) -> Response:
    fields = {"prompt": prompt, "max_tokens": tokens, **GREEDY}
    response = server.post("/v1/completions", fields, **headers)
    assert response.status == 200, response.content
    return response


def text_of(response: Response) -> str:
    return cast(str, response.json["choices"][0]["text"])


def generate(llm: LLM, prompt: str, tokens: int = 16) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return llm.generate(prompt, params)[0].outputs[0].text


def replicas(server: RunningServer) -> set[str]:
    """The replicas whose metrics the gateway returns."""
    lines = server.get("/metrics").content.decode().splitlines()
    names = [line for line in lines if line.startswith("megavm:num_requests_running{")]
    return {name.partition('replica="')[2].partition('"')[0] for name in names}


def test_answers_are_those_of_the_model_and_streams_too(server: RunningServer, llm: LLM) -> None:
    for prompt in PROMPTS[:2]:
        right = generate(llm, prompt)
        assert text_of(complete(server, prompt)) == right
        events = server.stream("/v1/completions", prompt=prompt, max_tokens=16, **GREEDY)
        assert len(events) == 16
        assert "".join(event["choices"][0]["text"] for event in events) == right


def test_a_stream_arrives_while_it_is_generated(server: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        fields = {"prompt": "Once", "max_tokens": 900, "stream": True, **GREEDY}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(fields), headers)
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        assert server.metric("num_requests_running") == 1
        content = response.read()
        assert content.count(b"data: {") == 899
        assert content.endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_frees_its_sequences(server: RunningServer) -> None:
    for stream in (True, False):
        fields = {"prompt": ["Once"] * 8, "n": 8, "max_tokens": 1000, "stream": stream}
        connection = server.open("/v1/completions", **fields, **GREEDY)
        wait_until(lambda: server.metric("num_requests_running") == 8)
        connection.close()
        wait_until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("num_requests_waiting") == 0


def test_other_endpoints_and_errors_are_those_of_a_replica(server: RunningServer) -> None:
    assert server.get("/health").json == {"status": "ready"}
    assert server.get("/v1/models").json["data"][0]["id"] == "stories"
    assert server.send("HEAD", "/health").status == 200
    assert server.get("/nothing").status == 404
    assert server.get("/health", host="example.com").status == 403
    refused = server.post("/v1/completions", {"prompt": "Once", "max_tokens": -1})
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")
    assert server.send("POST", "/v1/completions", b"x" * (5 << 20)).status == 413
    assert server.post("/v1/messages", {"max_tokens": 1}).anthropic_error["message"]


def test_a_session_stays_at_its_replica_and_sessions_spread(server: RunningServer) -> None:
    places: dict[str, str] = {}
    for i in range(12):
        prompt = f"Story {i}. {STORY}"
        first, second = complete(server, prompt), complete(server, prompt)
        assert first.headers[REPLICA] == second.headers[REPLICA]
        details = second.json["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= 16
        places[prompt] = first.headers[REPLICA]
    assert set(places.values()) == replicas(server)
    assert server.metric("prefix_cache_hits_total") >= 12 * 16
    named = {complete(server, prompt, x_session_id="me").headers[REPLICA] for prompt in places}
    assert len(named) == 1


def test_turns_of_a_conversation_belong_to_one_session(example: Any) -> None:
    def session(**fields: Any) -> str:
        return cast(str, example.session_of(json.dumps(fields).encode()))

    turn: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    further = [*turn, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Why?"}]
    other = [turn[0], {"role": "user", "content": "Goodbye"}]
    assert session(messages=turn) == session(messages=further) != session(messages=other)
    assert session(input=turn) == session(input=further)
    assert session(messages=turn[1:], system="a") != session(messages=turn[1:], system="b")
    assert session(input="Hello", instructions="a") == session(input="Hello", instructions="a")
    assert session(prompt="a" * 300) == session(prompt="a" * 400) != session(prompt="b" * 300)
    assert session(prompt=[1, 2, 3]) == session(prompt=[[1, 2, 3], [4]])
    assert session(prompt="a", prompt_cache_key="k") == session(prompt="b", prompt_cache_key="k")
    for body in (b"", b"{", b"[]", b"{}", b"[" * 100_000, b'{"messages": 3}', b'{"prompt": ""}'):
        assert isinstance(example.session_of(body), str)
    assert example.session_of(b"{}") == ""


def test_metrics_name_both_replicas(server: RunningServer) -> None:
    names = replicas(server)
    assert len(names) == 2
    content = server.get("/metrics").content.decode()
    assert content.count("# TYPE megavm:generation_tokens_total counter") == 1
    for name in names:
        assert server.metric("generation_tokens_total", replica=name) > 0
        assert server.metric("time_to_first_token_seconds_bucket", replica=name, le="+Inf") > 0


def test_a_replica_whose_engine_fails_is_replaced_while_the_other_answers(
    server: RunningServer, llm: LLM
) -> None:
    before = replicas(server)
    handle = serve.get_deployment_handle("Replica", "megavm").options(session_id="failing")
    failed = handle.fail.remote().result()
    named = {"x_session_id": "failing"}
    fields = {"prompt": "Once", "max_tokens": 4}
    broken = server.post("/v1/completions", fields, **named)
    assert broken.headers[REPLICA] == failed
    assert broken.status in (500, 503)
    assert "the machine is lost" in broken.error["message"]
    (well,) = before - {failed}
    session = next(
        name
        for name in map(str, range(100))
        if complete_at(server, name).headers.get(REPLICA) == well
    )
    right = generate(llm, "Once")
    while len(now := replicas(server)) < 2 or failed in now:
        assert text_of(complete(server, "Once", x_session_id=session)) == right
        time.sleep(0.1)
    assert well in now
    wait_until(lambda: server.post("/v1/completions", fields, **named).status == 200)


def complete_at(server: RunningServer, session: str) -> Response:
    return server.post("/v1/completions", {"prompt": "Once"}, x_session_id=session)


def test_replicas_that_end_answer_running_requests_first(server: RunningServer, llm: LLM) -> None:
    right = [generate(llm, prompt, 500) for prompt in PROMPTS]

    def stream(prompt: str) -> str:
        fields = {"prompt": prompt, "max_tokens": 500, **GREEDY}
        events = server.stream("/v1/completions", **fields)
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(len(PROMPTS) + 1) as threads:
        streams = [threads.submit(stream, prompt) for prompt in PROMPTS]
        wait_until(lambda: server.metric("num_requests_running") == len(PROMPTS))
        deleted = threads.submit(serve.delete, "megavm")
        wait_until(lambda: server.get("/health").status == 404)
        assert not all(future.done() for future in streams)
        assert [future.result() for future in streams] == right
        deleted.result()
