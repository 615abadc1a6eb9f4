"""An engine in a process of its own answers as one in a thread of the server's process does."""

from __future__ import annotations

import http.client
import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import Process, started
from serving import RunningServer

from megavm import LLM
from megavm.profiler.trace_file import read
from megavm.server.engine.core import EngineCore
from megavm.server.engine.messages import Answer, AskMetrics, Loaded, NotLoaded, Stop
from megavm.server.engine.transport import _portable
from megavm.vm.cuda.driver import CudaError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 12}
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once upon a time", **GREEDY}),
    (COMPLETIONS, {"prompt": "Once upon a time", **GREEDY, "stream": True}),
    (COMPLETIONS, {"prompt": ["Once", "The fox"], "n": 2, "seed": 5, "max_tokens": 9}),
    (COMPLETIONS, {"prompt": "The fox", **GREEDY, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": "The fox", **GREEDY, "logprobs": 1, "stream": True}),
    (COMPLETIONS, {"prompt": "The fox", **GREEDY, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "The fox", "seed": 3, "best_of": 3, "max_tokens": 5}),
    (COMPLETIONS, {"prompt": "Once upon a time", **GREEDY, "stop": ["was", "."]}),
    (COMPLETIONS, {"prompt": "A number:", **GREEDY, "guided_regex": "[0-9]{3}"}),
    (COMPLETIONS, {"prompt": "Say", **GREEDY, "guided_choice": ["yes", "no"], "stream": True}),
    (COMPLETIONS, {"prompt": "Once", **GREEDY, "logit_bias": {"300": 100}}),
    (COMPLETIONS, {"prompt": "Once", **GREEDY, "guided_regex": "((("}),
    (COMPLETIONS, {"prompt": "Once", **GREEDY, "allowed_token_ids": [10**6]}),
    (COMPLETIONS, {"prompt": "Once", "guided_regex": "[0-9]", "allowed_token_ids": [300]}),
    (COMPLETIONS, {"prompt": [1] * 5000}),
    (COMPLETIONS, {"prompt": "Once", "max_tokens": -1}),
    (CHAT, {"messages": MESSAGES, **GREEDY, "stream": True}),
    (CHAT, {"messages": MESSAGES, **GREEDY, "response_format": {"type": "json_object"}}),
    ("/v1/messages", {"messages": MESSAGES, **GREEDY, "model": "stories"}),
    ("/v1/responses", {"input": "Tell me a story", "temperature": 0, "max_output_tokens": 9}),
    ("/tokenize", {"prompt": "Once upon a time"}),
]
# What differs from answer to answer.
CHANGING = {"id", "created", "created_at", "completed_at", "item_id", "response_id"}


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """The same server as ``server``, with an engine in a process."""
    options = ("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    with started(*options) as running:
        running.wait_for(" ready ")
        yield running
        assert running.end(15) == 0
        assert "Traceback" not in running.said


def ask(server: Process, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    connection = server.connect()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def comparable(content: bytes) -> list[Any]:
    """The objects of an answer or a stream, without what changes."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in CHANGING}
        return [strip(v) for v in value] if isinstance(value, list) else value

    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n") if b"{" in line]
    return [strip(json.loads(line)) for line in lines]


def test_both_answer_alike(process: Process, server: RunningServer) -> None:
    for path, body in REQUESTS:
        there, here = ask(process, path, body), server.post(path, body)
        assert there[0] == here.status, (path, body, there, here)
        assert comparable(there[1]) == comparable(here.content), (path, body)
        assert comparable(there[1])


def test_a_trace_comes_from_the_other_process(process: Process, tmp_path: Path) -> None:
    answers: list[tuple[int, bytes]] = []
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(ask(process, COMPLETIONS, body)))
    thread.start()
    status, content = ask(process, "/v1/profile", {"steps": 3, "timeout": 20})
    thread.join()
    assert (status, answers[0][0]) == (200, 200), content
    path = tmp_path / "trace.megatrace"
    path.write_bytes(content)
    trace = read(path)
    assert len(trace.step_number) >= 3
    assert trace.machine["bandwidth"] > 0
    status, content = ask(process, "/v1/profile", {"steps": 3, "timeout": 0.1})
    assert (status, json.loads(content)["error"]["code"]) == (408, "profile_empty")


def test_a_recording_whose_client_leaves_makes_room_for_the_next(process: Process) -> None:
    connection = process.connect()
    body = json.dumps({"steps": 3, "timeout": 600})
    connection.request("POST", "/v1/profile", body, {"content-type": "application/json"})
    assert connection.sock is not None
    connection.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.getresponse()
    assert ask(process, "/v1/profile", {"steps": 1, "timeout": 0.1})[0] == 409
    connection.close()
    for _ in range(100):
        status, _ = ask(process, "/v1/profile", {"steps": 1, "timeout": 0.05})
        if status != 409:
            break
    assert status == 408


def test_a_recording_is_not_ended_by_the_one_before(process: Process) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            body = {"prompt": ["Once"] * 4, "n": 2, "max_tokens": 300, "ignore_eos": True}
            ask(process, COMPLETIONS, body)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            connection = process.connect()
            body = json.dumps({"steps": 10_000, "timeout": 600})
            connection.request("POST", "/v1/profile", body, {"content-type": "application/json"})
            time.sleep(0.05)
            connection.close()
            while (found := ask(process, "/v1/profile", {"steps": 3, "timeout": 20}))[0] == 409:
                pass
            assert found[0] == 200, found
    finally:
        stop.set()
        thread.join()


class Local(Exception):
    def __init__(self, first: int, *, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


def test_errors_arrive_as_they_are() -> None:
    class Here(ValueError):
        """It cannot be found by its name."""

    def sent(error: Exception) -> Exception:
        try:
            raise error
        except Exception as caught:
            event = pickle.loads(pickle.dumps(_portable(NotLoaded(caught))))
        assert isinstance(event, NotLoaded)
        assert event.error is not None
        assert "test_engine_process.py" in event.error.__notes__[0]
        return event.error

    error = sent(CudaError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc"))
    assert (type(error), str(error)) == (
        CudaError,
        "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY",
    )
    local = sent(Local(1, second=2))
    assert isinstance(local, Local)
    assert (str(local), local.second) == ("1 and 2", 2)
    here = sent(Here("no such thing"))
    assert (type(here), str(here)) == (ValueError, "Here: no such thing")
    held = sent(RuntimeError("it holds", threading.Lock()))
    assert type(held) is RuntimeError


def test_clients_that_leave_while_a_grammar_is_compiled_leave_nothing(process: Process) -> None:
    for number in range(20):
        connection = process.connect()
        body = {"prompt": "Once", "guided_regex": f"(a|b{number}){{1,400}}", "max_tokens": 400}
        connection.request(
            "POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"}
        )
        connection.close()
    connection = http.client.HTTPConnection(process.connect().host, process.connect().port)
    for _ in range(600):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        held = [line for line in text.splitlines() if line.startswith("megavm:num_requests_")]
        if all(line.endswith(" 0.0") for line in held):
            break
    connection.close()
    assert len(held) == 2
    assert all(line.endswith(" 0.0") for line in held)
    assert ask(process, COMPLETIONS, {"prompt": "Once", **GREEDY})[0] == 200


def test_metrics_that_are_asked_for_at_the_end_are_answered() -> None:
    loaded, events = threading.Event(), list[Any]()

    def note(event: Any) -> None:
        events.append(event)
        if isinstance(event, Loaded):
            loaded.set()

    core = EngineCore(lambda progress: LLM("stories", machine="cpu", workers=1), note)
    thread = threading.Thread(target=core.run)
    thread.start()
    assert loaded.wait(60)
    core.handle(AskMetrics(1))
    core.handle(Stop())
    thread.join(60)
    core.handle(AskMetrics(2))
    first, last = (e for e in events if isinstance(e, Answer))
    assert (first.key, first.error) == (1, None)
    assert (last.key, str(last.error)) == (2, "the engine has ended")
