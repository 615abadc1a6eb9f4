"""Schedules: when requests are sent, how many at once, and when no more."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_server import FIRST_SECONDS, GAP_SECONDS, FakeServer

from megavm.loadgen.client import Target, open_session
from megavm.loadgen.run import Load, Result, run, wait_ready
from megavm.loadgen.workload import Prompt

PROMPT = Prompt([11, 12], 2, 3)
SECONDS = FIRST_SECONDS + 2 * GAP_SECONDS  # what an answer to PROMPT takes


def in_session(what: Callable[[Any], Awaitable[Any]]) -> Any:
    async def inside() -> Any:
        async with open_session() as session:
            return await what(session)

    return asyncio.run(inside())


def load(server: FakeServer, count: int | None, how: Load, model: str = "steady") -> Result:
    prompts = itertools.repeat(PROMPT) if count is None else [PROMPT] * count
    result: Result = in_session(lambda s: run(s, Target(server.url, model), prompts, how))
    return result


def test_at_most_so_many_requests_are_under_way(server: FakeServer) -> None:
    result = load(server, 10, Load(max_concurrency=3))
    assert (result.sent, len(result.outcomes), result.peak_concurrency) == (10, 10, 3)
    assert server.most_at_once <= 4  # one that has its last token may not have ended
    assert result.seconds >= 4 * SECONDS
    assert all(outcome.failure is None for outcome in result.outcomes)


def test_without_a_limit_all_are_sent_at_once(server: FakeServer) -> None:
    result = load(server, 40, Load())
    assert result.peak_concurrency == 40
    assert result.seconds < 20 * SECONDS


def test_no_request_begins_after_the_duration(server: FakeServer) -> None:
    result = load(server, None, Load(max_concurrency=2, duration=0.5))
    assert 2 <= result.sent <= 2 * (1 + 0.5 / SECONDS)
    assert len(result.outcomes) == result.sent
    assert 0.5 <= result.seconds < 5


def test_requests_are_sent_at_their_times(server: FakeServer) -> None:
    how = Load(rate=60, seed=3)
    result = load(server, 40, how)
    sent = sorted(outcome.started for outcome in result.outcomes)
    due = list(itertools.islice(how.arrivals(), 40))
    late = [a - sent[0] - b for a, b in zip(sent, due, strict=True)]
    assert abs(statistics.median(late)) < 0.05
    assert statistics.median(outcome.waited for outcome in result.outcomes) < 0.05


def test_a_wait_for_a_slot_is_told(server: FakeServer) -> None:
    result = load(server, 6, Load(rate=1000, max_concurrency=1))
    last = result.outcomes[-1]
    assert last.waited > 4 * SECONDS > last.ttft


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = list(itertools.islice(Load(rate=10, burstiness=burstiness).arrivals(), 20001))
    intervals = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.mean(intervals)
    assert mean == pytest.approx(0.1, rel=0.05)
    # A gamma distribution's coefficient of variation.
    assert statistics.stdev(intervals) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    def times(seed: int) -> list[float]:
        return list(itertools.islice(Load(rate=5, seed=seed).arrivals(), 9))

    assert times(1) == times(1) != times(2)


def test_cancelled_it_returns_the_results_so_far(server: FakeServer) -> None:
    async def interrupt(session: Any) -> Result:
        prompts = [PROMPT, PROMPT, *[replace(PROMPT, output_tokens=500)] * 2]
        how = Load(max_concurrency=2)
        task = asyncio.create_task(run(session, Target(server.url, "steady"), prompts, how))
        while len(server.bodies) < 4:
            await asyncio.sleep(0.02)
        task.cancel()
        return await task

    result: Result = in_session(interrupt)
    assert result.interrupted
    assert (result.sent, len(result.outcomes)) == (4, 2)


def test_a_client_that_is_busy_with_other_things_notices(server: FakeServer) -> None:
    async def disturbed(session: Any) -> Result:
        async def block() -> None:
            while True:
                time.sleep(0.03)
                await asyncio.sleep(0.001)

        task = asyncio.create_task(block())
        try:
            return await run(session, Target(server.url, "steady"), [PROMPT] * 3, Load())
        finally:
            task.cancel()

    result: Result = in_session(disturbed)
    assert max(result.lags) > 0.015


def test_the_server_is_waited_for(server: FakeServer) -> None:
    server.loading = 2
    began = time.perf_counter()
    target = in_session(lambda s: wait_ready(s, Target(server.url, ""), PROMPT, 10))
    assert target.model == "steady"
    assert time.perf_counter() - began >= 1
    assert server.bodies[0]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("full", r"is not ready after 0.8 s \(429: The queue is full.\)"),
        ("detail", r"refuses a request \(400\): .*max_tokens is missing"),
        ("error_event", r"refuses a request \(bad stream\): worker 3 waits"),
    ],
)
def test_a_server_that_never_answers_is_given_up(server: FakeServer, model: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        in_session(lambda s: wait_ready(s, Target(server.url, model), PROMPT, 0.8))


def test_a_server_that_is_not_there_is_given_up() -> None:
    with pytest.raises(ValueError, match=r"127.0.0.1:9 is not ready after 0.6 s"):
        in_session(lambda s: wait_ready(s, Target("http://127.0.0.1:9", ""), PROMPT, 0.6))


def test_a_server_without_models_says_so(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "models", [])
    with pytest.raises(ValueError, match="lists no model: give --model"):
        in_session(lambda s: wait_ready(s, Target(server.url, ""), PROMPT, 5))
