"""StepQueue: when plans begin and end."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest

from megavm.scheduler.engine.step import Plan, Step
from megavm.scheduler.engine.step_queue import StepQueue

NOTHING = np.zeros(0, dtype=np.int32)
NUMBERS = itertools.count(1)


def plan() -> Plan:
    return Plan(Step(NOTHING, NOTHING, NOTHING, 0), next(NUMBERS), (), 0)  # none is like another


class Executor:
    """Notes its calls. Plans in ``complete`` have ended when they have begun.

    A plan in ``alone`` waits for the one in progress, one in ``slow`` for something else, and one
    in ``late`` until the one in progress is ended.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Plan]] = []
        self.in_progress: list[Plan] = []
        self.complete: list[Plan] = []
        self.alone: list[Plan] = []
        self.slow: list[Plan] = []
        self.late: list[Plan] = []

    def can_begin(self, plan: Plan, *, ending: bool = False) -> bool:
        if plan in self.late and self.in_progress and not ending:
            return False
        return plan not in self.slow and not (plan in self.alone and self.in_progress)

    def begin(self, plan: Plan) -> bool:
        assert len(self.in_progress) < 2
        assert not (plan in self.alone and self.in_progress)
        self.calls.append(("begin", plan))
        if plan in self.complete:
            return False
        self.in_progress.append(plan)
        return True

    def end(self, plan: Plan) -> None:
        self.calls.append(("end", plan))
        assert self.in_progress.pop(0) is plan


def test_plans_begin_behind_each_other() -> None:
    queue, executor = StepQueue(), Executor()
    first, second, third = plan(), plan(), plan()
    queue.submit(executor, first)
    queue.submit(executor, second)
    assert executor.calls == [("begin", first), ("begin", second)]
    assert queue.wait() is first
    queue.submit(executor, third)
    assert executor.calls[2:] == [("end", first), ("begin", third)]
    assert [queue.wait(), queue.wait()] == [second, third]
    assert executor.calls[4:] == [("end", second), ("end", third)]
    assert queue.pending == 0


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_plan_that_the_caller_has_begun_is_only_completed(unfinished: bool) -> None:
    queue, executor = StepQueue(), Executor()
    first = plan()
    executor.complete += [first] * (not unfinished)
    queue.submit(executor, first, executor.begin(first))
    assert queue.wait() is first
    assert executor.calls == [("begin", first), ("end", first)][: 1 + unfinished]


@pytest.mark.parametrize(
    ("kind", "order"),
    [("alone", ["end first", "begin second"]), ("late", ["begin second", "end first"])],
)
def test_a_plan_that_needs_the_end_of_another_begins_before_that_is_returned(
    kind: str, order: list[str]
) -> None:
    """Behind the end, or right before it if it needs only to be certain."""
    queue, executor = StepQueue(), Executor()
    first, second = plan(), plan()
    getattr(executor, kind).append(second)
    queue.submit(executor, first)
    queue.submit(executor, second)
    assert executor.calls == [("begin", first)]
    assert queue.wait() is first
    calls = {"end first": ("end", first), "begin second": ("begin", second)}
    assert executor.calls[1:] == [calls[name] for name in order]
    assert queue.wait() is second


def test_a_plan_whose_beginning_takes_long_does_not_delay_the_results_of_another() -> None:
    queue, executor = StepQueue(), Executor()
    first, second, third = plan(), plan(), plan()
    executor.slow.append(second)
    queue.submit(executor, first)
    queue.submit(executor, second)
    assert queue.wait() is first
    queue.submit(executor, third)
    assert executor.calls == [("begin", first), ("end", first)], "the third may not overtake"
    assert queue.wait() is second
    order = [("begin", second), ("begin", third), ("end", second)]
    assert executor.calls[2:] == order


def test_plans_return_in_order_when_the_machine_never_runs() -> None:
    queue, executor = StepQueue(), Executor()
    plans = [plan() for _ in range(5)]
    executor.complete = plans
    for one in plans:
        queue.submit(executor, one)
    assert queue.pending == 5
    assert [queue.wait() for _ in plans] == plans
    assert executor.calls == [("begin", one) for one in plans]


@pytest.mark.parametrize("method", ["can_begin", "begin", "end"])
def test_after_an_interrupt_all_plans_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    queue, executor = StepQueue(), Executor()

    def interrupt(plan: Plan, **options: bool) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, method, interrupt)

    def run() -> None:
        queue.submit(executor, plan())
        queue.wait()

    with pytest.raises(KeyboardInterrupt):
        run()
    assert queue.pending == 0


def test_a_plan_in_progress_does_not_keep_its_executor_alive() -> None:
    queue, executor = StepQueue(), Executor()
    queue.submit(executor, plan())
    gone = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert gone() is None
    finally:
        gc.enable()
    queue.close()
    assert queue.pending == 0
