"""StepThread: when executed plans are returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megavm.scheduler.engine.step import Plan, Step
from megavm.scheduler.engine.step_thread import StepThread

NOTHING = np.zeros(0, dtype=np.int32)


def plan() -> Plan:
    return Plan(Step(NOTHING, NOTHING, NOTHING, 0), 1, (), 0)


def nothing(plan: Plan, started: Callable[[], None]) -> None: ...


@pytest.fixture
def thread() -> Iterator[StepThread]:
    made = StepThread()
    yield made
    made.close()


def test_a_plan_with_none_behind_it_is_returned_at_once(thread: StepThread) -> None:
    only = plan()
    thread.submit(nothing, only)
    assert thread.wait() is only
    assert thread.pending == 0


def test_a_plan_is_returned_when_the_machine_runs_the_next_one(thread: StepThread) -> None:
    queued, preparing, may_start, may_end = (threading.Event() for _ in range(4))

    def wait_for_queue(plan: Plan, started: Callable[[], None]) -> None:
        queued.wait(10)

    def run(plan: Plan, started: Callable[[], None]) -> None:
        preparing.set()
        may_start.wait(10)
        started()
        may_end.wait(10)

    first, second = plan(), plan()
    thread.submit(wait_for_queue, first)
    thread.submit(run, second)
    queued.set()
    assert preparing.wait(10)
    assert thread._done.empty()  # the host's work for it would delay the launch
    may_start.set()
    assert thread.wait() is first
    may_end.set()
    assert thread.wait() is second


def test_plans_return_in_order_when_the_machine_never_runs(thread: StepThread) -> None:
    plans = [plan() for _ in range(5)]
    for one in plans:
        thread.submit(nothing, one)
    assert [thread.wait() for _ in plans] == plans


def test_close_returns_all_plans() -> None:
    made = StepThread()
    plans = [plan() for _ in range(3)]
    for one in plans:
        made.submit(nothing, one)
    made.close()
    assert [made.wait() for _ in plans] == plans
