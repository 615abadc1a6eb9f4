"""Faults, interrupts and bugs: which requests end, and that nothing stays held."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import toy_runner as toy
from engine_runs import Results, alone, assert_idle, gather, greedy, make_engine, run_all

from megavm.scheduler.engine import engine as engine_module
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.restriction import Restriction
from megavm.vm.machine import MachineFault


@pytest.mark.parametrize("fault", range(6))
@pytest.mark.parametrize("steps", [1, 3])
def test_a_fault_ends_what_runs_and_nothing_else(fault: int, steps: int, overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_seqs=2, faults=(fault,), max_num_batched_tokens=8)
    engine = make_engine(runner, overlap=overlap, steps_per_launch=steps)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3, 4, 5, 6, 7]]
    for prompt in prompts:
        engine.add(prompt, greedy(max_tokens=14))
    results = run_all(engine)
    failed = [i for i in range(4) if results[i, 0].finish_reason == "error"]
    assert failed == [0, 1]
    for i in range(4):
        if i in failed:
            assert results[i, 0].error == "the machine stopped: worker 0 gave up"
        else:
            assert results[i, 0].outcome() == alone(prompts[i], greedy(max_tokens=14), 0, runner)
    assert engine.counters.faults == 1
    engine.add([1, 2, 3], greedy(max_tokens=14))
    assert run_all(engine)[4, 0].outcome() == alone([1, 2, 3], greedy(max_tokens=14), 0, runner)
    assert_idle(engine)


def test_a_request_that_has_not_run_when_a_fault_comes_waits_again() -> None:
    runner = toy.ToyRunner(max_num_batched_tokens=8, faults=(0,))
    engine = make_engine(runner)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    requests = [engine.add(prompt, greedy(max_tokens=8), i) for i, prompt in enumerate(prompts)]
    first = engine.plan()
    second = engine.plan()  # before the first has run
    assert first is not None
    assert second is not None
    assert [s.request.id for s in second.admitted] == [1, 2, 3]
    engine.executor.execute(first)
    engine.executor.execute(second)
    results: Results = {}
    gather(results, engine.collect(first))
    assert list(results) == [(0, 0)]
    assert results[0, 0].error == "the machine stopped: worker 0 gave up"
    assert [s.request.id for s in engine.planner.waiting] == [1, 2, 3]
    assert requests[1].times.admitted == 0
    gather(results, engine.collect(second))
    run_all(engine, results)
    for i in (1, 2, 3):
        assert results[i, 0].outcome() == alone(prompts[i], greedy(max_tokens=8), 0, runner)
    assert_idle(engine)


def test_a_lost_machine_ends_what_runs_and_what_waits(overlap: bool) -> None:
    engine = make_engine(toy.ToyRunner(max_num_seqs=2, lost=3), overlap=overlap)
    for i in range(5):
        engine.add([1, 2, i], greedy(max_tokens=12, n=2))
    results = run_all(engine)
    assert len(results) == 10
    assert {r.error for r in results.values()} == {"the machine stopped: the context is lost"}
    assert engine.lost
    assert engine.counters.faults == 1
    assert_idle(engine)


@pytest.mark.parametrize("run", range(4))
def test_an_interrupt_ends_what_runs_and_is_raised(run: int, overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_seqs=2, interrupts=(run,))
    engine = make_engine(runner, overlap=overlap)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for prompt in prompts:
        engine.add(prompt, greedy(max_tokens=12))
    results: Results = {}
    with pytest.raises(KeyboardInterrupt):
        run_all(engine, results)
    run_all(engine, results)
    for i in range(2):
        assert results[i, 0].error == "the machine stopped: the run was interrupted"
    assert results[2, 0].outcome() == alone(prompts[2], greedy(max_tokens=12), 0, runner)
    assert_idle(engine)


def check_interrupted(engine: Engine, prompt: list[int], runner: toy.ToyRunner) -> None:
    """The request of this prompt has ended, the next one runs as if it had not been there."""
    results = run_all(engine)
    assert results[0, 0].error == "the machine stopped: the run was interrupted"
    engine.add(prompt, greedy())
    assert run_all(engine)[1, 0].outcome() == alone(prompt, greedy(), 0, runner)
    assert_idle(engine)
    assert not runner.launches


def owner(engine: Engine, method: str) -> Any:
    """The one of the engine and its executor that has a method."""
    return engine if hasattr(engine, method) else engine.executor


@pytest.mark.parametrize("method", ["execute", "collect"])
def test_an_interrupt_between_planning_and_running_leaves_nothing_that_was_not_computed(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner, overlap=False)
    prompt = list(range(1, 14))

    def interrupt(plan: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner(engine, method), method, interrupt)
        engine.add(prompt, greedy())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check_interrupted(engine, prompt, runner)


# Without queues a launch has ended when it has begun.
@pytest.mark.parametrize(
    ("method", "queues"),
    [("begin", False), ("begin", True), ("end", True), ("collect", False), ("collect", True)],
)
def test_an_interrupt_of_a_launch_that_the_caller_runs_leaves_nothing_that_was_not_computed(
    monkeypatch: pytest.MonkeyPatch, method: str, queues: bool
) -> None:
    runner = toy.ToyRunner(queues=queues)
    engine = make_engine(runner)
    prompt = list(range(1, 14))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner(engine, method), method, interrupt)
        engine.add(prompt, greedy(max_tokens=1))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check_interrupted(engine, prompt, runner)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize(
    ("method", "after"),
    [
        *[("collect", False), ("_start", False)],  # their result would be lost
        *itertools.product(["plan", "_submit", "can_begin", "begin", "end"], [False, True]),
        *itertools.product(["_give_masks"], [False, True]),
    ],
)
@pytest.mark.parametrize("words", [(), ((39, 39),)], ids=["plain", "masks"])
@pytest.mark.parametrize("queues", [False, True])
def test_an_error_anywhere_in_a_step_loses_no_token_and_hangs_nothing(
    monkeypatch: pytest.MonkeyPatch,
    queues: bool,
    words: tuple[tuple[int, ...], ...],
    method: str,
    after: bool,
    call: int,
    error: type[BaseException],
) -> None:
    """The request goes on as it should or ends with an error, and the next one runs."""
    runner = toy.ToyRunner(queues=queues)
    engine = make_engine(runner)
    prompt, numbers = list(range(1, 14)), itertools.count(1)
    original = getattr(owner(engine, method), method)

    def fail(*arguments: Any, **options: Any) -> Any:
        caller = threading.current_thread() is threading.main_thread()
        fails = caller and next(numbers) == call
        result = original(*arguments, **options) if after or not fails else None
        if fails:
            raise error
        return result

    # With words to avoid, every step has a mask that depends on the one before.
    engine.add(prompt, greedy(max_tokens=12), restriction=Restriction(bad_words=words))
    results: Results = {}
    with monkeypatch.context() as patch:
        patch.setattr(owner(engine, method), method, fail)
        with contextlib.suppress(error):
            run_all(engine, results)
    run_all(engine, results)
    if results[0, 0].finish_reason == "error":
        assert (results[0, 0].error or "").startswith("the machine stopped: ")
    else:
        assert results[0, 0].outcome() == alone(prompt, greedy(max_tokens=12), 0, runner)
    engine.add(prompt, greedy())
    assert run_all(engine)[1, 0].outcome() == alone(prompt, greedy(), 0, runner)
    assert_idle(engine)
    assert not runner.launches


def test_an_interrupt_while_the_thread_starts_hangs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner)

    def interrupt() -> None:
        raise KeyboardInterrupt

    engine.add([1, 2, 3], greedy(max_tokens=12))
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "StepThread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check_interrupted(engine, [1, 2, 3], runner)


def test_a_bug_in_the_runner_is_raised_after_cleaning_up(overlap: bool) -> None:
    engine = make_engine(toy.ToyRunner(bugs=(2,)), overlap=overlap)
    engine.add([1, 2, 3], greedy())
    results: Results = {}
    with pytest.raises(KeyError, match="a bug in the runner"):
        run_all(engine, results=results)
    run_all(engine, results=results)
    assert results[0, 0].finish_reason == "error"
    assert results[0, 0].error == "the machine stopped: KeyError: 'a bug in the runner'"
    assert_idle(engine)


def test_a_fault_during_logits_is_raised_and_leaves_a_working_engine() -> None:
    runner = toy.ToyRunner(faults=(0,))
    engine = make_engine(runner)
    with pytest.raises(MachineFault, match="worker 0 gave up"):
        engine.logits([1, 2, 3])
    assert_idle(engine)
    np.testing.assert_array_equal(engine.logits([1])[0], toy.toy_logits([1], 40))
