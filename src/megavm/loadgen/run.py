"""Sends many requests on a schedule, and measures whether the client itself keeps up."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp

from megavm.loadgen.client import Outcome, Target, find_model, send
from megavm.loadgen.workload import Prompt

_RETRY_SECONDS: Final = 0.5
_TICK_SECONDS: Final = 0.01
_TICKS_PER_REPORT: Final = 20
# If the client's timer is later than this, measured latencies are no longer the server's.
LAG_LIMIT_SECONDS: Final = 0.005
NOT_READY: Final = ("429", "503", "no connection", "broken connection", "timeout")

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Load:
    """The schedule of requests.

    `rate`: requests per second; infinity sends without waiting. Intervals are gamma distributed
    with shape `burstiness` (1 is a Poisson process, less is burstier). `max_concurrency`: most
    requests in flight. `duration`: seconds after which no request begins.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    duration: float | None = None
    seed: int = 0

    def arrivals(self) -> Iterator[float]:
        """Seconds from the beginning to each request, endless; the same seed gives the same."""
        rng, at = random.Random(self.seed), 0.0
        while True:
            yield at
            if self.rate != math.inf:
                at += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))


@dataclass
class Result:
    """The result of a run. Times are seconds; `lags`: delays of the client's own timer."""

    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_concurrency: int = 0
    interrupted: bool = False
    lags: list[float] = field(default_factory=list)


async def run(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Iterable[Prompt],
    load: Load,
    report: Report = lambda done, sent: None,
) -> Result:
    """Send `prompts` on the schedule `load` and wait for their answers.

    When cancelled (Ctrl-C), drops requests in flight and returns the results so far.
    `report(done, sent)` is called a few times per second.
    """
    result = Result()
    # NOTE: a full garbage collection over many prompts takes milliseconds, which would be
    # attributed to the server.
    gc.collect()
    gc.freeze()
    began, cpu_began = time.perf_counter(), time.process_time()
    watch = asyncio.create_task(_watch(result, report))
    try:
        async with asyncio.TaskGroup() as requests:
            await _send_all(session, target, prompts, load, result, requests)
    except asyncio.CancelledError:
        result.interrupted = True
    finally:
        result.seconds = time.perf_counter() - began
        result.cpu_seconds = time.process_time() - cpu_began
        watch.cancel()
        gc.unfreeze()
    return result


async def _send_all(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Iterable[Prompt],
    load: Load,
    result: Result,
    requests: asyncio.TaskGroup,
) -> None:
    """Start a task for every prompt at its scheduled time, or later when a slot is free."""
    slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None

    async def one(prompt: Prompt, waited: float) -> None:
        result.outcomes.append(await send(session, target, prompt, waited=waited))
        if slots is not None:
            slots.release()

    began = time.perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(load.duration):
            for at, prompt in zip(load.arrivals(), prompts, strict=False):
                await asyncio.sleep(max(began + at - time.perf_counter(), 0))
                if slots is not None:
                    await slots.acquire()
                late = 0.0 if load.rate == math.inf else time.perf_counter() - began - at
                requests.create_task(one(prompt, max(late, 0.0)))
                result.sent += 1
                in_flight = result.sent - len(result.outcomes)
                result.peak_concurrency = max(result.peak_concurrency, in_flight)


async def _watch(result: Result, report: Report) -> None:
    """Measure the delay of the event loop, which adds to the measured latencies."""
    while True:
        due = time.perf_counter() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        result.lags.append(time.perf_counter() - due)
        if len(result.lags) % _TICKS_PER_REPORT == 0:
            report(len(result.outcomes), result.sent)


async def wait_ready(
    session: aiohttp.ClientSession, target: Target, probe: Prompt, limit: float
) -> Target:
    """Wait until the server answers a request for one token; returns the target with its model.

    Raises:
        ValueError: the server refuses the request, or is not ready after `limit` seconds.
    """
    end = time.perf_counter() + limit
    probe = replace(probe, output_tokens=1)
    while True:
        try:
            if not target.model:
                model = await find_model(session, target.base_url, target.api_key)
                target = replace(target, model=model)
            left = max(end - time.perf_counter(), _RETRY_SECONDS)
            hasty = replace(target, timeout=min(target.timeout, left))
            outcome = await send(session, hasty, probe)
            if outcome.failure is None:
                return target
            if outcome.failure not in NOT_READY:
                raise ValueError(
                    f"{target.url} refuses a request ({outcome.failure}): {outcome.message}"
                )
            reason = f"{outcome.failure}: {outcome.message}"
        except ConnectionError as error:
            reason = str(error)
        if time.perf_counter() + _RETRY_SECONDS > end:
            raise ValueError(f"{target.base_url} is not ready after {limit:g} s ({reason})")
        await asyncio.sleep(_RETRY_SECONDS)
