"""StepThread: when executed plans are returned."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megavm.scheduler.engine.step import Plan, Step
from megavm.scheduler.engine.step_thread import StepThread

Work = Callable[[Plan, Callable[[], None], Callable[[], None]], object]

NOTHING = np.zeros(0, dtype=np.int32)


def plan() -> Plan:
    return Plan(Step(NOTHING, NOTHING, NOTHING, 0), 1, (), 0)


class Executor:
    """Calls ``work`` when a plan begins; it returns whether the plan is in progress then."""

    def __init__(self, work: Work = lambda plan, settle, started: None) -> None:
        self.work = work
        self.calls: list[tuple[str, Plan]] = []

    def begin(self, plan: Plan, settle: Callable[[], None], started: Callable[[], None]) -> bool:
        self.calls.append(("begin", plan))
        return bool(self.work(plan, settle, started))

    def end(self, plan: Plan) -> None:
        self.calls.append(("end", plan))


NOTHING_TO_DO = Executor()


@pytest.fixture
def thread() -> Iterator[StepThread]:
    made = StepThread()
    yield made
    made.close()


def test_a_plan_with_none_behind_it_is_returned_at_once(thread: StepThread) -> None:
    only = plan()
    thread.submit(NOTHING_TO_DO, only)
    assert thread.wait() is only
    assert thread.pending == 0


def test_a_plan_is_returned_when_the_machine_runs_the_next_one(thread: StepThread) -> None:
    queued, preparing, may_start, may_end = (threading.Event() for _ in range(4))

    def wait_for_queue(plan: Plan, settle: object, started: object) -> None:
        queued.wait(10)

    def run(plan: Plan, settle: object, started: Callable[[], None]) -> None:
        preparing.set()
        may_start.wait(10)
        started()
        may_end.wait(10)

    first, second = plan(), plan()
    thread.submit(Executor(wait_for_queue), first)
    thread.submit(Executor(run), second)
    queued.set()
    assert preparing.wait(10)
    # The host's work for it would delay the launch.
    assert not thread._submitted[0].returned.is_set()
    may_start.set()
    assert thread.wait() is first
    may_end.set()
    assert thread.wait() is second


def test_a_plan_in_progress_ends_when_the_next_one_has_begun(thread: StepThread) -> None:
    executor = Executor(lambda plan, settle, started: True)
    first, second, third = plan(), plan(), plan()
    thread.submit(executor, first)
    thread.submit(executor, second)
    assert thread.wait() is first
    thread.submit(executor, third)
    assert thread.wait() is second
    order = [("begin", first), ("begin", second), ("end", first), ("begin", third)]
    assert executor.calls == [*order, ("end", second)]
    assert thread.wait() is third  # though nothing comes behind it
    assert executor.calls[5:] == [("end", third)]


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_plan_that_the_caller_has_begun_is_only_completed(
    thread: StepThread, unfinished: bool
) -> None:
    executor = Executor(lambda plan, settle, started: unfinished)
    for _ in range(2):
        executor.calls.clear()
        first, second = plan(), plan()
        begun = executor.begin(first, lambda: None, lambda: None)
        thread.submit(executor, first, begun)
        thread.submit(executor, second)
        assert [thread.wait(), thread.wait()] == [first, second]
        ends = [("end", first), ("end", second)] if unfinished else []
        assert executor.calls == [("begin", first), ("begin", second), *ends]


def test_a_plan_in_progress_ends_first_if_the_next_one_needs_its_end(thread: StepThread) -> None:
    def settle_first(plan: Plan, settle: Callable[[], None], started: Callable[[], None]) -> bool:
        settle()
        started()
        return True

    executor = Executor(settle_first)
    first, second = plan(), plan()
    thread.submit(executor, first)
    thread.submit(executor, second)
    assert [thread.wait(), thread.wait()] == [first, second]
    order = [("begin", first), ("begin", second), ("end", first), ("end", second)]
    assert executor.calls == order


def test_plans_return_in_order_when_the_machine_never_runs(thread: StepThread) -> None:
    plans = [plan() for _ in range(5)]
    for one in plans:
        thread.submit(NOTHING_TO_DO, one)
    assert [thread.wait() for _ in plans] == plans


@pytest.mark.parametrize("unfinished", [False, True])
def test_close_returns_all_plans(unfinished: bool) -> None:
    made = StepThread()
    executor = Executor(lambda plan, settle, started: unfinished)
    plans = [plan() for _ in range(3)]
    for one in plans:
        made.submit(executor, one)
    made.close()
    assert [made.wait() for _ in plans] == plans
    assert [one for call, one in executor.calls if call == "end"] == plans * unfinished


def test_a_plan_in_progress_does_not_keep_its_executor_alive() -> None:
    made = StepThread()
    executor = Executor(lambda plan, settle, started: True)
    made.submit(executor, plan())
    gone = weakref.ref(executor)
    thread = made._thread
    del executor
    for _ in range(100):
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    del made
    thread.join(10)
    assert not thread.is_alive()
