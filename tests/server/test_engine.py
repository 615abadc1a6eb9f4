"""An engine behind a server: commands between steps, one wake-up per step, faults that end it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import toy_runner as toy

from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.sequence import Delta, Request
from megavm.server.engine.client import EngineClient
from megavm.server.engine.generation import Generation
from megavm.server.engine.loop import EngineLoop
from megavm.server.engine.messages import Abort, Command, Event, Stop, Submit
from megavm.server.errors import ApiError, unavailable

Result = TypeVar("Result")


class Steps:
    """Counts steps and their seconds."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def step(self, deltas: Sequence[Delta], seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


class ToyTransport:
    """A loop around a toy engine in a thread, without a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps = Steps()

    def start(self, emit: Callable[[Event], None]) -> None:
        self.loop = EngineLoop(self.engine, self.steps, emit)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def send(self, command: Command) -> None:
        match command:
            case Submit():
                self.loop.submit(command)
            case Abort():
                self.loop.abort(command.key)
            case Stop():
                self.loop.stop()
            case _:
                raise AssertionError(command)

    def give_up(self) -> None:
        raise AssertionError("nothing is loaded")

    def join(self, seconds: float) -> None:
        self.thread.join(seconds)


Test = Callable[[EngineClient, ToyTransport], Awaitable[Result]]


def run(test: Test[Result], **options: Any) -> Result:
    """Run a test with a client and a toy engine; in the end nothing may be held."""

    async def body() -> Result:
        runner = toy.ToyRunner(**options)
        engine = Engine(runner, eos_token_ids=(5,), new_decoder=toy.ToyDecoder)
        transport = ToyTransport(engine)
        client = EngineClient(transport, lambda loading: None)
        try:
            async with asyncio.timeout(20):
                return await test(client, transport)
        finally:
            await client.close_all()
            assert not transport.thread.is_alive()
            if client.broken is None:
                assert engine.blocks.num_held == 0
                assert client.num_sequences == 0
                assert not client._generations
                assert not transport.loop._owners
                assert not transport.loop._requests
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


async def assert_next_runs(client: EngineClient) -> None:
    """The next request gets all its tokens, and nothing is left."""
    made = generation()
    client.submit(made)
    assert len((await tokens(made))[0]) == 8
    client.close(made)
    await idle(client)


async def idle(client: EngineClient) -> None:
    while client.num_sequences:
        await asyncio.sleep(0.001)


def test_sequences_are_numbered_by_prompt_and_continuation() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> dict[int, list[int]]:
        made = generation([1], [2, 3], n=2, temperature=1.0, seed=4)
        client.submit(made)
        assert client.num_sequences == 4
        found = await tokens(made)
        client.close(made)
        await idle(client)
        return found

    found = run(test)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(len(ids) == 8 for ids in found.values())
    assert len({tuple(ids) for ids in found.values()}) == 4


def test_an_ended_request_is_freed_without_a_garbage_collection() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> list[weakref.ref[Any]]:
        queue, requests = engine.engine.queue, list[weakref.ref[Any]]()

        def note(*arguments: Any, **named: Any) -> Request:
            request = queue(*arguments, **named)
            requests.append(weakref.ref(request))
            return request

        engine.engine.queue = note  # type: ignore[method-assign]
        made = generation([1], [2, 3], n=2)
        client.submit(made)
        await tokens(made)
        client.close(made)
        await idle(client)
        await asyncio.wrap_future(engine.loop.call(lambda: None))  # the thread has forgotten it
        return [weakref.ref(made), *requests]

    gc.disable()
    try:
        assert [freed() for freed in run(test)] == [None] * 3
    finally:
        gc.enable()


def test_last_deltas_of_a_request_may_come_in_different_steps() -> None:
    """One sequence may end while the plan of the next step fails another: its delta comes then."""

    async def test(client: EngineClient, engine: ToyTransport) -> dict[int, list[int]]:
        step, late = engine.engine.step, list[Delta]()

        def delayed_step() -> list[Delta]:
            deltas = [*late, *step()]
            late[:] = [d for d in deltas if d.finish_reason and d.index == 1 and d not in late]
            return [delta for delta in deltas if delta not in late]

        engine.engine.step = delayed_step  # type: ignore[method-assign]
        made, other = generation([1], n=2), generation([2, 3])
        client.submit(made)
        found = asyncio.create_task(tokens(made))
        while client.num_sequences > 1:
            await asyncio.sleep(0.001)
        client.submit(other)
        await tokens(other)
        await found
        for each in (made, other):
            client.close(each)
        await idle(client)
        return found.result()

    assert [len(ids) for ids in run(test).values()] == [8, 8]


def test_a_step_wakes_the_event_loop_once_however_many_wait() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> tuple[int, int]:
        calls = 0
        tell = client._tell

        def count(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            tell(*arguments)

        client._tell = count  # type: ignore[assignment]
        many = [generation([i]) for i in range(4)]
        for one in many:
            client.submit(one)
        await asyncio.gather(*map(tokens, many))
        for one in many:
            client.close(one)
        await idle(client)
        return calls, engine.steps.count

    calls, steps = run(test)
    assert calls <= steps


def test_what_is_wanted_whole_wakes_nobody_before_its_end() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> int:
        wakes = 0
        made = generation([1], [2], whole=True)
        wake = made.wake

        def count() -> None:
            nonlocal wakes
            wakes += 1
            wake()

        made.wake = count  # type: ignore[method-assign]
        client.submit(made)
        assert [len(ids) for ids in (await tokens(made)).values()] == [8, 8]
        client.close(made)
        await idle(client)
        return wakes

    assert run(test) == 1


def test_closing_aborts_and_an_early_close_never_begins() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        begun, never = generation(max_tokens=None), generation(max_tokens=None)
        client.submit(begun)
        await begun.next_batch()
        client.close(begun)
        client.submit(never)
        client.close(never)
        client.close(never)
        await idle(client)
        assert not never._coming or never._coming[0][1].finish_reason == "abort"

    run(test)


def test_a_fault_of_the_machine_reaches_its_requests_and_others_go_on() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        first = generation()
        client.submit(first)
        with pytest.raises(ApiError, match="the machine stopped: worker 0 gave up") as error:
            await tokens(first)
        assert error.value.status == 500
        client.close(first)
        await assert_next_runs(client)

    run(test, faults=(2,))


def test_an_error_of_a_step_reaches_its_requests_and_others_go_on() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        first = generation()
        client.submit(first)
        with pytest.raises(ApiError, match="a bug in the runner"):
            await tokens(first)
        client.close(first)
        await assert_next_runs(client)
        assert client.broken is None

    run(test, bugs=(2,))


def test_an_engine_that_fails_again_and_again_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        def step() -> None:
            raise KeyError("always")

        monkeypatch.setattr(engine.engine, "step", step)
        made = generation()
        client.submit(made)
        with pytest.raises(ApiError, match="the engine failed: KeyError: 'always'"):
            await tokens(made)
        assert client.broken is not None
        # Commands are still carried out: nobody waits forever.
        assert engine.loop.call(lambda: 5).result(10) == 5

    run(test)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_request_that_the_engine_refuses_fails_alone(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        queue, calls = engine.engine.queue, 0

        def refuse(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise kind("no")
            return queue(*arguments, **named)

        monkeypatch.setattr(engine.engine, "queue", refuse)
        made = generation([1], [2], [3], max_tokens=None)
        client.submit(made)
        with pytest.raises(ApiError, match=f"{kind.__name__}: no"):
            await tokens(made)
        client.close(made)
        await idle(client)

    run(test)


def test_all_can_be_ended_with_an_error() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        many = [generation([i], max_tokens=None) for i in range(3)]
        for one in many:
            client.submit(one)
        await many[0].next_batch()
        client.fail_all(unavailable("The end.", "draining"))
        for one in many:
            with pytest.raises(ApiError, match=r"The end\."):
                await tokens(one)
            client.close(one)
        await idle(client)

    run(test, max_model_len=1000, num_blocks=1000)


def test_functions_are_called_in_the_thread_between_steps() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        assert engine.loop.call(threading.get_ident).result(10) == engine.thread.ident
        with pytest.raises(ZeroDivisionError):
            engine.loop.call(lambda: 1 // 0).result(10)

    run(test)


def test_the_time_with_work_is_counted_whole_and_the_time_without_is_not() -> None:
    """Commands between two steps keep the machine waiting as much as the steps do."""

    async def test(client: EngineClient, engine: ToyTransport) -> float:
        for _ in range(2):
            made = generation()
            client.submit(made)
            engine.loop.call(lambda: time.sleep(0.2))  # the engine has the request by then
            await tokens(made)
            client.close(made)
            await idle(client)
            await asyncio.sleep(0.5)
        return engine.steps.seconds

    assert 0.4 <= run(test) < 0.9


def test_a_condition_is_looked_at_after_every_step() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        seen: list[int] = []

        def done() -> bool:
            seen.append(engine.steps.count)
            return len(seen) == 3

        def wait(timeout: float, done: Callable[[], bool] = done) -> asyncio.Future[bool]:
            ended = threading.Event()
            return asyncio.ensure_future(
                asyncio.to_thread(engine.loop.until, lambda: None, done, ended, timeout)
            )

        made = generation()
        waiting = wait(10)
        await asyncio.sleep(0.05)
        client.submit(made)
        assert await waiting
        await tokens(made)
        client.close(made)
        await idle(client)
        assert len(seen) == 3
        assert not await wait(0.05, lambda: True)  # there is no step

    run(test)


def test_an_error_of_a_condition_is_told_to_who_waits_and_to_nobody_else() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        def done() -> bool:
            raise OSError("nothing to look at")

        waiting = asyncio.ensure_future(
            asyncio.to_thread(engine.loop.until, lambda: None, done, threading.Event(), 10)
        )
        await asyncio.sleep(0.05)
        for _ in range(6):
            made = generation()
            client.submit(made)
            await tokens(made)  # no step has failed
            client.close(made)
        with pytest.raises(OSError, match="nothing to look at"):
            await waiting

    run(test)


def test_an_ended_wait_for_a_condition_looks_at_it_no_more() -> None:
    async def test(client: EngineClient, engine: ToyTransport) -> None:
        ended, seen = threading.Event(), list[int]()

        def done() -> bool:
            seen.append(1)
            return False

        waiting = asyncio.ensure_future(
            asyncio.to_thread(engine.loop.until, lambda: None, done, ended, 10)
        )
        await asyncio.sleep(0.05)
        ended.set()
        assert await waiting
        made = generation()
        client.submit(made)
        await tokens(made)
        client.close(made)
        await idle(client)
        assert not seen

    run(test)
