"""`megavm serve` as a process: what it says, what it refuses, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import Process, started

STUCK = """
import logging, sys, time
from megavm.server.run import serve
from megavm.server.settings import Settings
load = lambda progress: time.sleep(600)
sys.exit(serve(load, Settings(("stuck",)), "127.0.0.1", 0, logging.INFO))
"""
# `megavm serve` whose machine fails for good in its 20th run.
FAILING = """
import itertools, os, sys, torch
from megavm.cli import main
from megavm.scheduler.run.runner import Runner
from megavm.vm.machine import MachineFault, MachineLost
run, numbers = Runner.run, itertools.count()
how = os.environ["HOW"]
def fail(*arguments):
    if next(numbers) >= 20:
        if how == "lost":
            raise MachineLost("the context is lost")
        if how == "fault":
            raise MachineFault("worker 0 gave up")
        torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]  # an assertion on the GPU
    run(*arguments)
Runner.run = fail
sys.exit(main(sys.argv[1:]))
"""


def post(connection: http.client.HTTPConnection, **body: Any) -> http.client.HTTPResponse:
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    return connection.getresponse()


def test_a_server_says_what_it_serves_and_ends_when_it_is_told_to() -> None:
    with started("--served-model-name", "tiny", MEGAVM_API_KEY="secret") as server:
        ready = server.wait_for(" ready ")
        for part in (
            "url=http://127.0.0.1:",
            "model=tiny",
            "machine=cpu",
            "kv_tokens=16384",
            "kv_blocks=1024",
            "context=1024",
        ):
            assert part in ready
        assert "loading phase=" in server.said
        connection = server.connect()
        response = post(connection, prompt="x")
        assert (response.status, bool(response.read())) == (401, True)
        assert "server" not in {name.lower() for name, _ in response.getheaders()}
        connection.close()
        assert server.end(signal.SIGTERM) == 0
        assert "secret" not in server.said
        assert "Traceback" not in server.said


def test_at_the_default_address_only_names_of_this_machine_are_answered() -> None:
    with started("--allowed-host", "proxy.example") as server:
        server.wait_for(" listening ")
        connection = server.connect()
        for host, status in (("evil.example", 403), ("proxy.example", 200), ("localhost:1", 200)):
            connection.request("GET", "/health", headers={"host": host})
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
        connection.close()
    with started("--host", "0.0.0.0") as server:
        server.wait_for(" listening ")
        connection = server.connect()
        connection.request("GET", "/health", headers={"host": "anything.example"})
        assert connection.getresponse().status == 200
        connection.close()


def test_sigterm_lets_requests_end_and_takes_no_new_ones() -> None:
    with started() as server:
        server.wait_for(" ready ")
        connection, other = server.connect(), server.connect()
        # Greedily: of sampled tokens some end within a character, and have no event of their own.
        endless = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
        response = post(connection, prompt="Once upon", stream=True, **endless)
        assert response.readline().startswith(b"data: {")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(" draining ")
        refused = post(other, prompt="Once upon")
        assert refused.status == 503
        assert json.loads(refused.read())["error"]["code"] == "draining"
        other.request("GET", "/health")
        health = other.getresponse()
        assert (health.status, json.loads(health.read())) == (503, {"status": "draining"})
        content = response.read()
        assert content.count(b"data: {") == 899
        assert content.endswith(b"data: [DONE]\n\n")
        connection.close()
        other.close()
        assert server.end() == 0


@pytest.mark.parametrize("again", [False, True], ids=["in_time", "by_a_second_signal"])
def test_requests_that_do_not_end_in_time_are_told_so(again: bool) -> None:
    with started("--shutdown-timeout", "60" if again else "0.2") as server:
        server.wait_for(" ready ")
        connections = [server.connect() for _ in range(2)]
        fields = {"prompt": ["Once upon"] * 16, "n": 8, "max_tokens": 1000, "ignore_eos": True}
        response = post(connections[0], **fields, stream=True)
        assert response.readline().startswith(b"data: {")
        connections[1].request(
            "POST", "/v1/completions", json.dumps(fields), {"content-type": "application/json"}
        )
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(" draining ")
        if again:
            server.process.send_signal(signal.SIGTERM)
        *_, error, done, nothing = response.read().split(b"\n\n")
        assert json.loads(error[len(b"data: ") :])["error"]["code"] == "draining"
        assert (done, nothing) == (b"data: [DONE]", b"")
        whole = connections[1].getresponse()
        assert whole.status == 503
        assert json.loads(whole.read())["error"]["code"] == "draining"
        for connection in connections:
            connection.close()
        assert server.end() == 0
        assert "Traceback" not in server.said


def test_a_shutdown_waits_for_no_recording_and_for_no_body() -> None:
    with started() as server:
        server.wait_for(" ready ")
        recording, reading = server.connect(), server.connect()
        fields = json.dumps({"steps": 9, "timeout": 600})
        recording.request("POST", "/v1/profile", fields, {"content-type": "application/json"})
        reading.putrequest("POST", "/v1/completions")
        reading.putheader("content-type", "application/json")
        reading.putheader("content-length", "9")
        reading.endheaders(b"{")
        time.sleep(0.2)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for connection in (recording, reading):
            answer = connection.getresponse()
            assert answer.status == 503
            assert json.loads(answer.read())["error"]["code"] == "draining"
            connection.close()
        assert server.end() == 0
        assert time.monotonic() - began < 15  # else the shutdown timeout, 30 s, and more
        assert "Traceback" not in server.said


def test_a_killed_server_can_be_started_again_at_its_port() -> None:
    with started() as server:
        server.wait_for(" ready ")
        connection = server.connect()
        answer = post(connection, prompt="Once", max_tokens=900, ignore_eos=True, stream=True)
        assert answer.readline().startswith(b"data: {")
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
        connection.close()
    with started("--port", str(connection.port)) as server:
        server.wait_for(" ready ")
        again = server.connect()
        assert again.port == connection.port
        answer = post(again, prompt="Once", max_tokens=3)
        assert json.load(answer)["usage"]["completion_tokens"] == 3
        again.close()


def test_ctrl_c_ends_a_server_as_it_ends_every_command() -> None:
    with started("--quiet") as server:
        server.wait_for(" ready ")
        assert server.end(signal.SIGINT) == 130
        assert len(server.said.splitlines()) == 1


def test_a_signal_ends_a_server_whose_model_does_not_come() -> None:
    server = Process(program=("-c", STUCK))
    try:
        server.wait_for(" listening ")
        assert server.end(signal.SIGINT) == 130
        assert "loading was given up" in server.said
        assert "Traceback" not in server.said
    finally:
        server.process.kill()


@pytest.mark.parametrize("how", ["lost", "assertion"])
def test_a_lost_machine_ends_the_process_after_everybody_was_told(
    request: pytest.FixtureRequest, how: str
) -> None:
    machine, said = "cpu", "the context is lost"
    if how == "assertion":
        request.getfixturevalue("cuda_machine")
        machine, said = "cuda", "the process's CUDA context is lost"
    arguments = ("serve", "stories", "--port", "0", "--machine", machine, "--max-num-seqs", "1")
    server = Process(*arguments, program=("-c", FAILING), HOW=how)
    try:
        server.wait_for(" ready ")
        connections = [server.connect() for _ in range(2)]
        fields = {"max_tokens": 900, "ignore_eos": True}
        stream = post(connections[0], prompt="Once upon", stream=True, **fields)
        assert stream.readline().startswith(b"data: {")
        # This one waits until the first is over.
        body = json.dumps({"prompt": "The fox", **fields})
        connections[1].request(
            "POST", "/v1/completions", body, {"content-type": "application/json"}
        )
        *_, error, done, nothing = stream.read().split(b"\n\n")
        assert said in json.loads(error[len(b"data: ") :])["error"]["message"]
        assert (done, nothing) == (b"data: [DONE]", b"")
        whole = connections[1].getresponse()
        assert (whole.status, said in json.loads(whole.read())["error"]["message"]) == (500, True)
        begin = time.monotonic()
        for connection in connections:
            connection.close()
        assert server.end() == 2
        assert time.monotonic() - begin < 15
        assert "CRITICAL ending " in server.said
        error_line = server.said.splitlines()[-1]
        assert error_line.startswith("megavm: error: the machine stopped: ")
        assert said in error_line
        assert "Traceback" not in server.said
    finally:
        server.process.kill()


def test_a_machine_that_fails_again_and_again_ends_the_process() -> None:
    arguments = ("serve", "stories", "--port", "0", "--machine", "cpu")
    server = Process(*arguments, program=("-c", FAILING), HOW="fault")
    try:
        server.wait_for(" ready ")
        for _ in range(5):
            connection = server.connect()
            answer = post(connection, prompt="Once upon", max_tokens=40, ignore_eos=True)
            # 503: the server knows it before the handler of the last one has begun to wait.
            assert answer.status in (500, 503)
            assert "worker 0 gave up" in json.loads(answer.read())["error"]["message"]
            connection.close()
        assert server.end() == 2
        assert server.said.count("ERROR the machine stopped ") == 5
        assert server.said.splitlines()[-1] == (
            "megavm: error: the machine stopped: worker 0 gave up"
        )
        assert "Traceback" not in server.said
    finally:
        server.process.kill()


def engine_process(server: Process) -> int:
    """The id of the server's only child."""
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_an_engine_whose_process_is_killed_ends_the_server_after_everybody_was_told() -> None:
    with started() as server:
        server.wait_for(" ready ")
        connections = [server.connect() for _ in range(2)]
        fields = {"prompt": "Once upon", "max_tokens": 900, "ignore_eos": True}
        stream = post(connections[0], **fields, stream=True)
        assert stream.readline().startswith(b"data: {")
        connections[1].request(
            "POST", "/v1/completions", json.dumps(fields), {"content-type": "application/json"}
        )
        time.sleep(0.1)
        os.kill(engine_process(server), signal.SIGKILL)
        said = "the engine's process has ended: SIGKILL"
        *_, error, done, nothing = stream.read().split(b"\n\n")
        assert json.loads(error[len(b"data: ") :])["error"]["message"] == said
        assert (done, nothing) == (b"data: [DONE]", b"")
        whole = connections[1].getresponse()
        assert (whole.status, json.loads(whole.read())["error"]["message"]) == (500, said)
        for connection in connections:
            connection.close()
        assert server.end() == 2
        assert server.said.splitlines()[-1] == f"megavm: error: {said}"
        assert "Traceback" not in server.said


UNWAITED = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "megavm", *sys.argv[1:]])
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_children_may_be_ignored_by_whoever_starts_a_server(signal_number: int) -> None:
    """SIGCHLD stays ignored in what is started; then nobody can wait for a child."""
    arguments = ("serve", "stories", "--port", "0", "--machine", "cpu")
    server = Process(*arguments, program=("-c", UNWAITED))
    try:
        server.wait_for(" ready ")
        if signal_number == signal.SIGTERM:
            assert server.end(signal.SIGTERM) == 0
            return
        connection = server.connect()
        stream = post(connection, prompt="Once", max_tokens=900, ignore_eos=True, stream=True)
        assert stream.readline().startswith(b"data: {")
        os.kill(engine_process(server), signal.SIGKILL)
        assert b"the engine's process has ended" in stream.read()
        connection.close()
        assert server.end() == 2
    finally:
        server.process.kill()


DYING = """
import os, signal, sys
from megavm.cli import main
from megavm.server import service
class Dying(service.ServedModel):
    def __init__(self, facts):
        os.kill(facts.process, signal.SIGKILL)
        super().__init__(facts)
service.ServedModel = Dying
sys.exit(main(sys.argv[1:]))
"""


def test_an_engine_whose_process_is_killed_when_it_has_loaded_ends_the_server() -> None:
    arguments = ("serve", "stories", "--port", "0", "--machine", "cpu")
    server = Process(*arguments, program=("-c", DYING))
    try:
        assert server.end() == 2
        said = "megavm: error: the engine's process has ended: SIGKILL"
        assert server.said.splitlines()[-1] == said
    finally:
        server.process.kill()


def test_an_engine_whose_process_is_killed_while_it_loads_is_no_model() -> None:
    server = Process(program=("-c", STUCK))
    try:
        server.wait_for(" listening ")
        os.kill(engine_process(server), signal.SIGKILL)
        assert server.end() != 0
        assert "the engine's process has ended: SIGKILL" in server.said
    finally:
        server.process.kill()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engines_process_ends_with_its_server(signal_number: int) -> None:
    with started() as server:
        server.wait_for(" ready ")
        child = engine_process(server)
        connection = server.connect()
        answer = post(connection, prompt="Once", max_tokens=900, ignore_eos=True, stream=True)
        assert answer.readline().startswith(b"data: {")
        # A supervisor may tell both; the server decides when its engine ends.
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGINT)
        assert answer.readline() == b"\n"
        server.process.send_signal(signal_number)
        if signal_number == signal.SIGTERM:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        server.process.wait(60)
        end = time.monotonic() + 10
        while is_alive(child):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_an_engine_that_does_not_answer_keeps_nothing_but_its_requests_waiting() -> None:
    with started("--request-timeout", "3") as server:
        server.wait_for(" ready ")
        child, connection = engine_process(server), server.connect()
        os.kill(child, signal.SIGSTOP)
        begin = time.monotonic()
        assert post(connection, prompt="Once", max_tokens=3).status == 408
        connection.close()
        connection = server.connect()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode()
        assert "megavm:http_requests_total" in lines
        assert "engine_launches" not in lines
        connection.close()
        assert time.monotonic() - begin < 20
        os.kill(child, signal.SIGCONT)
        connection = server.connect()
        assert post(connection, prompt="Once", max_tokens=3).status == 200
        connection.close()
        assert server.end(signal.SIGTERM) == 0


def is_alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_metrics_tell_of_both_processes() -> None:
    with started() as server:
        server.wait_for(" ready ")
        connection = server.connect()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        own, engine = (
            float(values[f"{of}process_resident_memory_bytes"]) for of in ("", "engine_")
        )
        # The process that answers clients has neither torch nor a model.
        assert 20e6 < own < 150e6 < engine
        connection.close()


def refused(*arguments: str) -> str:
    """The one line of a command that does not even begin."""
    process = Process(*arguments)
    assert process.end() == 2
    line = process.said.splitlines()[-1]
    assert line.startswith("megavm: error: ")
    assert "Traceback" not in process.said
    return line


def test_what_cannot_be_served_is_refused_in_one_sentence() -> None:
    assert "no/such/model" in refused("no/such/model", "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("stories", "--port", port)
        assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in line
