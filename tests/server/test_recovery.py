"""After a fault of the machine a server goes on: what ran gets the diagnosis, the rest is right."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from sabotage import Sabotage, impatient_machines
from serving import WAIT_SECONDS, Response, RunningServer, assert_idle, serving, wait_until

from megavm import LLM, SamplingParams
from megavm.scheduler.run.kernels import compile_kernels
from megavm.server.service import Service

PROMPTS = ["Once upon a time", "The little fox", "A big storm", "One fine day", "There was"]
DIAGNOSIS = r"the machine stopped: .*instruction \d+ waits for "
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"machine": "cpu", "workers": 2},
    "cuda": {"machine": "cuda"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of a model on each machine, of which two sequences run at a time."""
    if request.param == "cuda":
        request.getfixturevalue("cuda_machine")
    return {**OPTIONS[request.param], "max_num_seqs": 2}


@pytest.fixture(scope="module")
def server(options: dict[str, Any], right: list[str]) -> Iterator[RunningServer]:
    # NOTE: `right` comes first, so that the kernels of a GPU are compiled when the server starts.
    with impatient_machines(), serving(**options) as running_server:
        yield running_server
        assert_idle(running_server)


@pytest.fixture(scope="module")
def sabotage(server: RunningServer) -> Sabotage:
    return Sabotage(server.llm.runner)


@pytest.fixture(scope="module")
def right(options: dict[str, Any]) -> list[str]:
    """What an LLM whose machine never faulted makes of the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM("stories", dtype="float32", max_num_batched_tokens=64, **options) as llm:
        if options["machine"] == "cuda":  # a server compiles more of them before it is ready
            for sampled in (False, True):
                compile_kernels(llm.runner.config, llm.runner.dtype, sampled=sampled)
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def assert_well(server: RunningServer, right: list[str]) -> None:
    """It is, and says so."""
    assert (server.get("/health").status, server.get("/ready").status) == (200, 200)
    for prompt, text in zip(PROMPTS, right, strict=True):
        assert server.complete(prompt=prompt, **FIELDS)["choices"][0]["text"] == text


def test_a_fault_is_the_end_of_the_requests_in_flight_alone(
    server: RunningServer, sabotage: Sabotage, right: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    faults = server.metric("engine_faults_total")

    def send(prompt: str) -> Response:
        return server.post("/v1/completions", {"prompt": prompt, **FIELDS})

    with caplog.at_level(logging.ERROR), ThreadPoolExecutor(len(PROMPTS)) as threads:
        sabotage.fail(6)
        answers = list(threads.map(send, PROMPTS))
    failed = [answer for answer in answers if answer.status != 200]
    assert 1 <= len(failed) <= 2
    for answer in failed:
        assert answer.status == 500
        assert answer.error["type"] == "server_error"
        assert "the machine stopped: " in answer.error["message"]
        assert " waits for " in answer.error["message"]
    for answer, text in zip(answers, right, strict=True):
        if answer.status == 200:
            assert answer.json["choices"][0]["text"] == text
    assert server.metric("engine_faults_total") == faults + 1
    (record,) = [r for r in caplog.records if r.getMessage() == "the machine stopped"]
    assert " waits for " in record.fields["cause"]  # type: ignore[attr-defined]
    assert_well(server, right)


def test_a_stream_ends_with_the_diagnosis_and_the_next_is_right(
    server: RunningServer, sabotage: Sabotage, right: list[str]
) -> None:
    client = server.client()

    def stream() -> Iterator[str]:
        answer: Any = client.completions.create(
            model="stories",
            prompt=PROMPTS[0],
            stream=True,
            temperature=0,
            max_tokens=16,
            extra_body={"ignore_eos": True},
        )
        return (event.choices[0].text for event in answer)

    sabotage.fail(2)
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match=DIAGNOSIS):
        pieces.extend(stream())
    assert right[0].startswith("".join(pieces))
    assert len("".join(pieces)) < len(right[0])
    assert "".join(stream()) == right[0]
    assert_well(server, right)


def test_more_faults_than_may_come_in_a_row_may_come_one_by_one(
    server: RunningServer, sabotage: Sabotage, right: list[str]
) -> None:
    for _ in range(7):
        sabotage.fail(1)
        answer = server.post("/v1/completions", {"prompt": PROMPTS[0], **FIELDS})
        assert answer.status == 500
    assert_well(server, right)


def test_a_machine_that_fails_at_every_step_ends_the_engine(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, looked_at = Service.broken, threading.Event()

    async def broken_and_looked_at(self: Service) -> None:
        """The server ends at once without requests; here it answers some before."""
        await broken(self)
        await asyncio.to_thread(looked_at.wait, WAIT_SECONDS)

    monkeypatch.setattr(Service, "broken", broken_and_looked_at)
    with impatient_machines(), serving(**options) as server:
        Sabotage(server.llm.runner).fail(*range(100))
        engine = server.service.engine
        for _ in range(5):
            assert server.get("/health").status == 200
            answer = server.post("/v1/completions", {"prompt": PROMPTS[0], **FIELDS})
            assert answer.status == 500
        wait_until(lambda: engine.broken is not None)
        assert server.get("/health").json == {"status": "failed"}
        answer = server.post("/v1/completions", {"prompt": PROMPTS[0], **FIELDS})
        assert answer.status == 503
        assert "The server cannot go on: the machine stopped: " in answer.error["message"]
        looked_at.set()
