"""The engine's thread: commands between steps, one wake-up per step, faults that reach requests."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import toy_runner as toy

from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.sequence import Delta
from megavm.server.engine_loop import EngineLoop, Generation
from megavm.server.errors import ApiError, unavailable

Result = TypeVar("Result")


class Steps:
    """Counts steps and their seconds."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def step(self, deltas: Sequence[Delta], seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


def run(test: Callable[[EngineLoop, Any], Awaitable[Result]], **options: Any) -> Result:
    """Run a test with an engine loop around a toy runner; in the end nothing may be held."""

    async def body() -> Result:
        runner = toy.ToyRunner(**options)
        engine = Engine(runner, eos_token_ids=(5,), new_decoder=toy.ToyDecoder)
        engine_loop = EngineLoop(engine, Steps())
        try:
            async with asyncio.timeout(20):
                return await test(engine_loop, runner)
        finally:
            await engine_loop.stop()
            assert not engine_loop._thread.is_alive()
            if engine_loop.broken is None:
                assert engine.blocks.num_held == 0
                assert engine_loop.num_sequences == 0
                assert not engine_loop._owners
            engine.close()

    return asyncio.run(body())


def generation(*prompts: list[int], whole: bool = False, **params: Any) -> Generation:
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **params}
    arrays = [np.array(prompt, dtype=np.int32) for prompt in prompts or ([1, 2, 3],)]
    return Generation(arrays, SamplingParams(**params), whole)


async def tokens(made: Generation) -> dict[int, list[int]]:
    """The tokens of each sequence, to their end."""
    found: dict[int, list[int]] = {}
    while batch := await made.next_batch():
        for index, delta in batch:
            found.setdefault(index, []).extend(delta.token_ids)
    return found


async def idle(engine_loop: EngineLoop) -> None:
    while engine_loop.num_sequences:
        await asyncio.sleep(0.001)


def test_sequences_are_numbered_by_prompt_and_continuation() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> dict[int, list[int]]:
        made = generation([1], [2, 3], n=2, temperature=1.0, seed=4)
        engine_loop.submit(made)
        assert engine_loop.num_sequences == 4
        found = await tokens(made)
        engine_loop.close(made)
        await idle(engine_loop)
        assert [list(r.prompt) for r in made.requests] == [[1], [2, 3]]
        return found

    found = run(test)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(len(ids) == 8 for ids in found.values())
    assert len({tuple(ids) for ids in found.values()}) == 4


def test_an_ended_request_is_freed_without_a_garbage_collection() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> list[weakref.ref[Any]]:
        made = generation([1], [2, 3], n=2)
        engine_loop.submit(made)
        await tokens(made)
        engine_loop.close(made)
        await idle(engine_loop)
        await engine_loop.call(lambda: None)  # the thread has forgotten it
        return [weakref.ref(made), *map(weakref.ref, made.requests)]

    gc.disable()
    try:
        assert [freed() for freed in run(test)] == [None] * 3
    finally:
        gc.enable()


def test_last_deltas_of_a_request_may_come_in_different_steps() -> None:
    """One sequence may end while the plan of the next step fails another: its delta comes then."""

    async def test(engine_loop: EngineLoop, runner: Any) -> dict[int, list[int]]:
        step, late = engine_loop.engine.step, list[Delta]()

        def delayed_step() -> list[Delta]:
            deltas = [*late, *step()]
            late[:] = [d for d in deltas if d.finish_reason and d.index == 1 and d not in late]
            return [delta for delta in deltas if delta not in late]

        engine_loop.engine.step = delayed_step  # type: ignore[method-assign]
        made, other = generation([1], n=2), generation([2, 3])
        engine_loop.submit(made)
        found = asyncio.create_task(tokens(made))
        while engine_loop.num_sequences > 1:
            await asyncio.sleep(0.001)
        engine_loop.submit(other)
        await tokens(other)
        await found
        for each in (made, other):
            engine_loop.close(each)
        await idle(engine_loop)
        return found.result()

    assert [len(ids) for ids in run(test).values()] == [8, 8]


def test_a_step_wakes_the_event_loop_once_however_many_wait() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> tuple[int, int]:
        calls = 0
        tell = engine_loop._tell

        def count(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            tell(*arguments)

        engine_loop._tell = count  # type: ignore[assignment]
        many = [generation([i]) for i in range(4)]
        for one in many:
            engine_loop.submit(one)
        await asyncio.gather(*map(tokens, many))
        for one in many:
            engine_loop.close(one)
        await idle(engine_loop)
        steps: Any = engine_loop._observer
        return calls, steps.count

    calls, steps = run(test)
    assert calls <= steps


def test_what_is_wanted_whole_wakes_nobody_before_its_end() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> int:
        wakes = 0
        made = generation([1], [2], whole=True)
        wake = made.wake

        def count() -> None:
            nonlocal wakes
            wakes += 1
            wake()

        made.wake = count  # type: ignore[method-assign]
        engine_loop.submit(made)
        assert [len(ids) for ids in (await tokens(made)).values()] == [8, 8]
        engine_loop.close(made)
        await idle(engine_loop)
        return wakes

    assert run(test) == 1


def test_closing_aborts_and_an_early_close_never_begins() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        begun, never = generation(max_tokens=None), generation(max_tokens=None)
        engine_loop.submit(begun)
        await begun.next_batch()
        engine_loop.close(begun)
        engine_loop.submit(never)
        engine_loop.close(never)
        engine_loop.close(never)
        await idle(engine_loop)
        assert never.requests == []

    run(test)


def test_a_fault_of_the_machine_reaches_its_requests_and_others_go_on() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        first = generation()
        engine_loop.submit(first)
        with pytest.raises(ApiError, match="the machine stopped: worker 0 gave up") as error:
            await tokens(first)
        assert error.value.status == 500
        engine_loop.close(first)
        second = generation()
        engine_loop.submit(second)
        assert len((await tokens(second))[0]) == 8
        engine_loop.close(second)
        await idle(engine_loop)

    run(test, faults=(2,))


def test_an_error_of_a_step_reaches_its_requests_and_others_go_on() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        first = generation()
        engine_loop.submit(first)
        with pytest.raises(ApiError, match="a bug in the runner"):
            await tokens(first)
        engine_loop.close(first)
        second = generation()
        engine_loop.submit(second)
        assert len((await tokens(second))[0]) == 8
        engine_loop.close(second)
        await idle(engine_loop)
        assert engine_loop.broken is None

    run(test, bugs=(2,))


def test_an_engine_that_fails_again_and_again_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        def step() -> None:
            raise KeyError("always")

        monkeypatch.setattr(engine_loop.engine, "step", step)
        made = generation()
        engine_loop.submit(made)
        with pytest.raises(ApiError, match="the engine failed: KeyError: 'always'"):
            await tokens(made)
        assert engine_loop.broken is not None
        # Commands are still carried out: nobody waits forever.
        assert await engine_loop.call(lambda: 5) == 5

    run(test)


def test_a_request_that_the_engine_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        queue, calls = engine_loop.engine.queue, 0

        def refuse(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("no")
            return queue(*arguments, **named)

        monkeypatch.setattr(engine_loop.engine, "queue", refuse)
        made = generation([1], [2], [3], max_tokens=None)
        engine_loop.submit(made)
        with pytest.raises(ApiError, match="RuntimeError: no"):
            await tokens(made)
        engine_loop.close(made)
        await idle(engine_loop)

    run(test)


def test_all_can_be_ended_with_an_error() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        many = [generation([i], max_tokens=None) for i in range(3)]
        for one in many:
            engine_loop.submit(one)
        await many[0].next_batch()
        engine_loop.fail_all(unavailable("The end.", "draining"))
        for one in many:
            with pytest.raises(ApiError, match=r"The end\."):
                await tokens(one)
            engine_loop.close(one)
        await idle(engine_loop)

    run(test, max_model_len=1000, num_blocks=1000)


def test_functions_are_called_in_the_thread_between_steps() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        assert await engine_loop.call(threading.get_ident) == engine_loop._thread.ident
        with pytest.raises(ZeroDivisionError):
            await engine_loop.call(lambda: 1 // 0)

    run(test)


def test_the_time_with_work_is_counted_whole_and_the_time_without_is_not() -> None:
    """Commands between two steps keep the machine waiting as much as the steps do."""

    async def test(engine_loop: EngineLoop, runner: Any) -> float:
        steps = cast(Steps, engine_loop._observer)
        for _ in range(2):
            made = generation()
            engine_loop.submit(made)
            engine_loop.call(lambda: time.sleep(0.2))  # the engine has the request by then
            await tokens(made)
            engine_loop.close(made)
            await idle(engine_loop)
            await asyncio.sleep(0.5)
        return steps.seconds

    assert 0.4 <= run(test) < 0.9


def test_a_condition_is_looked_at_after_every_step() -> None:
    async def test(engine_loop: EngineLoop, runner: Any) -> None:
        seen: list[int] = []

        def done() -> bool:
            seen.append(runner.runs)
            return len(seen) == 3

        made = generation()
        waiting = asyncio.create_task(engine_loop.until(lambda: None, done, 10))
        await asyncio.sleep(0.05)
        engine_loop.submit(made)
        await waiting
        await tokens(made)
        engine_loop.close(made)
        await idle(engine_loop)
        assert len(seen) == 3
        with pytest.raises(TimeoutError):
            await engine_loop.until(lambda: None, lambda: True, 0.05)

    run(test)
