"""The thread that owns the engine, and how the event loop talks to it.

Handlers of requests live in one asyncio event loop; the engine lives in a thread of its own, which
alone calls its methods. Commands go into a queue and are carried out between two steps. What a step
brings goes back in one piece, with one wake-up of the event loop however many requests it is for.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from megavm.server.errors import ApiError, failed
from megavm.server.logs import log, logger

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams
    from megavm.scheduler.engine.engine import Engine
    from megavm.scheduler.engine.sequence import Delta, Request
    from megavm.scheduler.engine.step import Ints

# Launches in a row that fail before the engine counts as broken. One is no reason: the machine runs
# the next request. OpenAI's client sends a request that fails three times.
_MAX_FAULTS: Final = 5
_JOIN_SECONDS: Final = 30.0

Batch = list[tuple[int, "Delta"]]
Result = TypeVar("Result")


class Observer(Protocol):
    """Is told, in the engine's thread, what every step has brought (metrics.EngineMetrics)."""

    def step(self, deltas: Sequence[Delta], seconds: float) -> None:
        """One step has ended; it took `seconds`."""
        ...


class EngineEnded(RuntimeError):
    """The engine does not run any more; the process should end, so that another takes its place.

    Attributes:
        lost: whether the machine is lost, so that nothing of it can be given back.
    """

    def __init__(self, cause: str, lost: bool) -> None:
        super().__init__(cause)
        self.lost = lost


class Generation:
    """What one HTTP request generates: `params.n` continuations of each of its prompts.

    Continuation c of prompt p has the index p * n + c. To be used in the event loop's thread.

    Attributes:
        prompts: token ids.
        params: of all prompts.
        requests: the engine's, by prompt; complete when the first delta is there.
        arrived: when it was made, by `time.perf_counter`.
    """

    def __init__(self, prompts: Sequence[Ints], params: SamplingParams, whole: bool) -> None:
        self.prompts = prompts
        self.params = params
        self.requests: list[Request] = []
        self.arrived = time.perf_counter()
        self.num_sequences = len(prompts) * params.n
        self._whole = whole
        self._unfinished = self.num_sequences  # as the engine's thread knows
        self._missing = self.num_sequences  # as the event loop knows
        self._coming: deque[tuple[int, Delta]] = deque()
        self._arrival = asyncio.Event()
        self._error: ApiError | None = None
        self.closed = False

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended and their deltas were taken."""
        return not self._missing

    async def next_batch(self) -> Batch:
        """What has been generated since the last call; [] when all sequences have ended.

        Raises:
            ApiError: it cannot go on.
        """
        while self._missing:
            batch = self._take()
            if batch:
                return batch
            if self._error is not None:
                raise self._error
            self._arrival.clear()
            await self._arrival.wait()
        return []

    def _take(self) -> Batch:
        batch = []
        for _ in range(len(self._coming)):
            index, delta = self._coming.popleft()
            if delta.error is not None:
                self._error = self._error or failed(delta.error)
                continue
            self._missing -= delta.finish_reason is not None
            batch.append((index, delta))
        return batch

    # For the engine's thread.

    def add(self, index: int, delta: Delta) -> bool:
        """Take a delta; whether the event loop should be told."""
        self._coming.append((index, delta))
        self._unfinished -= delta.finish_reason is not None
        return not (self.closed or (self._whole and self._unfinished))

    # For the event loop.

    def wake(self) -> None:
        """Let `next_batch` look again."""
        self._arrival.set()

    def fail(self, error: ApiError) -> None:
        """End it with an error, after what has arrived."""
        self._error = self._error or error
        self._arrival.set()


class EngineLoop:
    """Drives an engine in a thread. Methods are for the thread of the event loop it is made in.

    Attributes:
        broken: why the engine does not run any more, None as long as it does.
        ended: is set, in the thread of the event loop, when it does not.
    """

    def __init__(self, engine: Engine, observer: Observer) -> None:
        self.engine = engine
        self.broken: str | None = None
        self.ended = asyncio.Event()
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._generations: dict[Generation, None] = {}
        self._submitted = 0  # sequences; written by the event loop's thread alone
        self._finished = 0  # sequences; written by the engine's thread alone
        self._after_step: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="megavm-engine", daemon=True)
        self._thread.start()

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait."""
        return self._submitted - self._finished

    def submit(self, generation: Generation) -> None:
        """Queue a generation, whose prompts `Engine.validate` has made. `close` it in the end."""
        self._submitted += generation.num_sequences
        self._generations[generation] = None
        self._commands.put(lambda: self._add(generation))

    def close(self, generation: Generation) -> None:
        """Forget a generation; what has not ended is aborted before the next step."""
        if not generation.closed:
            generation.closed = True
            del self._generations[generation]
            self._commands.put(lambda: self._abort(generation))

    def fail_all(self, error: ApiError) -> None:
        """End every generation with an error."""
        for generation in self._generations:
            generation.fail(error)

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Call a function between two steps, in the engine's thread; its result or exception."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:
                self._tell(_settle, future, None, error)
            else:
                self._tell(_settle, future, result, None)

        self._commands.put(command)
        return future

    async def until(
        self, begin: Callable[[], None], done: Callable[[], bool], timeout: float
    ) -> None:
        """Call `begin`, then `done` after every step until it is true or `timeout` s are over.

        Both are called in the engine's thread. One such wait at a time is possible.

        Raises:
            TimeoutError: the time is over.
        """
        reached = asyncio.Event()

        def after_step() -> None:
            if done():
                self._after_step = None
                self._tell(reached.set)

        def start() -> None:
            begin()
            self._after_step = after_step

        def stop() -> None:
            self._after_step = None

        await self.call(start)
        try:
            async with asyncio.timeout(timeout):
                await reached.wait()
        finally:
            await self.call(stop)

    async def stop(self) -> None:
        """End the thread after the step that runs. Nothing may be submitted afterwards."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    # The engine's thread.

    def _run(self) -> None:
        counters, failures = self.engine.counters, 0
        while self.broken is None:
            launches, faults = counters.launches, counters.faults
            failure = ""
            try:
                if not self._carry_out():
                    return
                self._step()
            except Exception as error:
                # The engine has cleaned up after itself; requests hear of it with the next step.
                logger.exception("a step of the engine failed")
                failure = f"the engine failed: {type(error).__name__}: {error}"
            else:
                if counters.faults > faults:
                    failure = f"the machine stopped: {self.engine.last_fault}"
                    log(logging.ERROR, "the machine stopped", cause=self.engine.last_fault)
            if failure:
                failures += 1
            elif counters.launches > launches:
                failures = 0
            # What fails again and again will not get better.
            if self.engine.lost or failures == _MAX_FAULTS:
                self.broken = failure
        self._tell(self.fail_all, failed(self.broken))
        self._tell(self.ended.set)
        while (command := self._commands.get()) is not None:
            command()

    def _carry_out(self) -> bool:
        """Carry out what is in the queue, waiting if there is nothing else to do; False: end."""
        commands = self._commands
        while not (self.engine.has_work and commands.empty()):
            command = commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        begin = time.perf_counter()
        deltas = self.engine.step()
        self._observer.step(deltas, time.perf_counter() - begin)
        told: dict[Generation, None] = {}
        for delta in deltas:
            generation, first = cast(tuple[Generation, int], delta.request.id)
            self._finished += delta.finish_reason is not None
            if generation.add(first + delta.index, delta):
                told[generation] = None
        if told:
            self._tell(_wake, list(told))
        if self._after_step is not None:
            self._after_step()

    def _add(self, generation: Generation) -> None:
        if generation.closed:
            self._finished += generation.num_sequences
            return
        params = generation.params
        try:
            for i, prompt in enumerate(generation.prompts):
                request = self.engine.add(prompt, params, id=(generation, i * params.n))
                request.times.arrived = generation.arrived
                generation.requests.append(request)
        except Exception as error:
            logger.exception("the engine refused a request")
            missing = len(generation.prompts) - len(generation.requests)
            self._finished += missing * params.n
            self._abort(generation)
            self._tell(generation.fail, failed(f"{type(error).__name__}: {error}"))

    def _abort(self, generation: Generation) -> None:
        for request in generation.requests:
            self.engine.abort(request.id)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call something in the event loop's thread."""
        with suppress(RuntimeError):  # the event loop has ended: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, *arguments)


def _wake(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.wake()


def _settle(future: asyncio.Future[Result], result: Result, error: BaseException | None) -> None:
    if future.done():  # whoever waited has been cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
