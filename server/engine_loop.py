"""The thread that owns the engine, and its communication with the event loop.

Request handlers run in one asyncio event loop. The engine runs in its own thread, and only this
thread calls its methods. The event loop puts commands into a queue; the engine's thread executes
them between two steps. All results of a step wake the event loop once, for however many requests.

The plain tokens of streams, which are most, do not wake it: see `EngineLoop.write_plain`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from megavm.server.errors import ApiError, failed
from megavm.server.event_streams import EventStreams
from megavm.server.logs import log, logger

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams
    from megavm.scheduler.engine.engine import Engine
    from megavm.scheduler.engine.restriction import Restriction
    from megavm.scheduler.engine.sequence import Delta, Request
    from megavm.scheduler.engine.step import Ints
    from megavm.server._event_writer import Stream

# The engine counts as broken after this many failed launches in a row. After a single fault the
# machine runs the next request. The limit is above 3, because OpenAI's client sends a failing
# request three times.
_MAX_FAULTS: Final = 5
_JOIN_SECONDS: Final = 30.0

Batch = list[tuple[int, "Delta"]]
Result = TypeVar("Result")


class Observer(Protocol):
    """Receives the deltas of every step, in the engine's thread (metrics.EngineMetrics)."""

    def step(self, deltas: Sequence[Delta], seconds: float) -> None:
        """One step has ended, `seconds` after the last one, or after a request came to none."""
        ...


class EngineEnded(RuntimeError):
    """The engine has stopped for good. The process should end so that a supervisor restarts it.

    Attributes:
        lost: whether the machine is lost; its resources cannot be released then.
    """

    def __init__(self, cause: str, lost: bool) -> None:
        super().__init__(cause)
        self.lost = lost


class Generation:
    """The sequences of one HTTP request: `params.n` continuations of each of its prompts.

    Continuation c of prompt p has the index p * n + c. Use it in the event loop's thread. `whole`:
    wake the event loop only when all sequences have ended.

    Attributes:
        prompts: token ids of each prompt, as `Engine.validate` returns them.
        params: parameters of all prompts.
        restriction: what they say about the tokens that may be chosen, compiled.
        requests: the engine's requests by prompt; complete when the first delta arrives.
        arrived: time of creation, by `time.perf_counter`.
        written: tokens of plain deltas that did not pass `next_batch` (EngineLoop.write_plain).
        stream: where the engine's thread writes plain deltas now.
    """

    def __init__(
        self,
        prompts: Sequence[Ints],
        params: SamplingParams,
        whole: bool,
        restriction: Restriction | None = None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.restriction = restriction
        self.requests: list[Request] = []
        self.arrived = time.perf_counter()
        self.num_sequences = len(prompts) * params.n
        self.written = 0  # only the engine's thread writes this and the next
        self.stream: Stream | None = None
        self._whole = whole
        self._unfinished = self.num_sequences  # counted by the engine's thread
        self._missing = self.num_sequences  # counted by the event loop
        self._coming: deque[tuple[int, Delta]] = deque()
        self._arrival = asyncio.Event()
        self._error: ApiError | None = None
        self.closed = False

    @property
    def failed(self) -> bool:
        """Whether `next_batch` raises an error, now or after the deltas that have arrived."""
        return self._error is not None

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended and `next_batch` has returned all their deltas."""
        return not self._missing

    async def next_batch(self) -> Batch:
        """The (index, delta) pairs since the last call; [] when all sequences have ended.

        Raises:
            ApiError: the generation failed.
        """
        while self._missing:
            batch = self._take()
            if batch:
                return batch
            if self._error is not None:
                raise self._error
            await self.arrival()
        return []

    async def arrival(self) -> None:
        """Wait until `next_batch` has something to return or to raise."""
        while not (self._coming or self._error):
            self._arrival.clear()
            await self._arrival.wait()

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

    def take_plain(self) -> list[Delta] | None:
        """The deltas that `next_batch` has not returned; None, and they stay, if one is not plain.

        The event loop must not call `next_batch` meanwhile.
        """
        if self.closed or not all(is_plain(delta) for _, delta in self._coming):
            return None
        return [self._coming.popleft()[1] for _ in range(len(self._coming))]

    def add(self, index: int, delta: Delta) -> bool:
        """Append a delta; returns whether the event loop must be woken."""
        self._coming.append((index, delta))
        self._unfinished -= delta.finish_reason is not None
        return not (self.closed or (self._whole and self._unfinished))

    # For the event loop.

    def wake(self) -> None:
        """Let `next_batch` check for new deltas."""
        self._arrival.set()

    def fail(self, error: ApiError) -> None:
        """End the generation with an error, after the deltas that have arrived."""
        self._error = self._error or error
        self._arrival.set()


def is_plain(delta: Delta) -> bool:
    """Whether a delta has only text: it is not the last one, and there are no log-probabilities."""
    return delta.finish_reason is None and not delta.logprobs


@dataclass
class _Owner:
    """The generation of a request, and the index of its first sequence there."""

    generation: Generation
    first: int
    unfinished: int  # sequences whose last delta has not come


class EngineLoop:
    """Drives an engine in a thread.

    Construct it in the thread of the event loop, and call all methods there.

    Attributes:
        broken: why the engine has stopped for good; None while it runs.
        ended: set, in the thread of the event loop, after the engine has stopped for good.
    """

    def __init__(self, engine: Engine, observer: Observer) -> None:
        self.engine = engine
        self.broken: str | None = None
        self.ended = asyncio.Event()
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._streams = EventStreams()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._generations: dict[Generation, None] = {}
        self._owners: dict[Hashable, _Owner] = {}  # by the id of a request
        self._submitted = 0  # sequences; only the event loop's thread writes this
        self._finished = 0  # sequences; only the engine's thread writes this
        self._after_step: Callable[[], None] | None = None
        self._since = time.perf_counter()  # end of the last step, or when its first request came
        self._thread = threading.Thread(target=self._run, name="megavm-engine", daemon=True)
        self._thread.start()

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run or wait."""
        return self._submitted - self._finished

    def submit(self, generation: Generation) -> None:
        """Queue a generation with prompts from `Engine.validate`. The caller must `close` it."""
        self._submitted += generation.num_sequences
        self._generations[generation] = None
        self._commands.put(lambda: self._add(generation))

    def close(self, generation: Generation) -> None:
        """Forget a generation; its unfinished requests are aborted before the next step."""
        if not generation.closed:
            generation.closed = True
            del self._generations[generation]
            self._commands.put(lambda: self._abort(generation))

    async def write_plain(
        self, generation: Generation, connection: asyncio.Transport, head: str, tail: str
    ) -> None:
        """Have plain deltas of a generation written to its connection until another kind comes.

        Their events are `head`, the text in JSON, and `tail`. The generation has one sequence. All
        batches from `next_batch` must have been written; it goes on with what is not plain.
        """
        if generation.failed:
            return
        stream = self._streams.open(connection, head, tail)
        try:
            await self.call(lambda: self._lend(generation, stream))
            await generation.arrival()
        finally:
            await self._streams.end(stream, connection)

    def fail_all(self, error: ApiError) -> None:
        """End every generation with an error."""
        for generation in self._generations:
            generation.fail(error)

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Call a function in the engine's thread between two steps; a future of its result."""
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
        """Call `begin`, then call `done` after every step until it returns true.

        Both are called in the engine's thread. Only one such wait at a time is possible.

        Raises:
            TimeoutError: `done` did not return true within `timeout` seconds.
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
        """End the thread after the running step. Nothing may be submitted afterwards."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        self._streams.close()

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
                # The engine has cleaned up; the next step returns the errors of its requests.
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
            # Stop for good: repeated failures do not recover.
            if self.engine.lost or failures == _MAX_FAULTS:
                self.broken = failure
        self._tell(self.fail_all, failed(self.broken))
        self._tell(self.ended.set)
        while (command := self._commands.get()) is not None:
            command()

    def _carry_out(self) -> bool:
        """Execute the queued commands; wait for one if the engine has no work.

        Returns False when the thread should end.
        """
        commands = self._commands
        while not (self.engine.has_work and commands.empty()):
            waits = not self.engine.has_work
            command = commands.get()
            if waits:
                self._since = time.perf_counter()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        deltas = self.engine.step()
        before, self._since = self._since, time.perf_counter()
        self._observer.step(deltas, self._since - before)
        woken: dict[Generation, None] = {}
        streams: list[Stream] = []
        texts: list[str] = []
        for delta in deltas:
            owner = self._owners[delta.request.id]
            generation = owner.generation
            if (stream := generation.stream) is not None:
                if is_plain(delta):
                    generation.written += len(delta.token_ids)
                    texts += delta.pieces
                    streams += [stream] * len(delta.pieces)
                    continue
                generation.stream = None
            if delta.finish_reason is not None:
                self._finished += 1
                owner.unfinished -= 1
            if not owner.unfinished:
                # Sequences refer to their request: without this, only a garbage collection frees
                # them.
                delta.request.sequences = ()
                del self._owners[delta.request.id]
            if generation.add(owner.first + delta.index, delta):
                woken[generation] = None
        if streams:
            self._streams.write(streams, texts)
        if woken:
            self._tell(_wake, list(woken))
        if self._after_step is not None:
            self._after_step()

    def _add(self, generation: Generation) -> None:
        if generation.closed:
            self._finished += generation.num_sequences
            return
        params = generation.params
        try:
            for i, prompt in enumerate(generation.prompts):
                request = self.engine.queue(prompt, params, restriction=generation.restriction)
                self._owners[request.id] = _Owner(generation, i * params.n, params.n)
                request.times.arrived = generation.arrived
                generation.requests.append(request)
        except Exception as error:
            logger.exception("the engine refused a request")
            missing = len(generation.prompts) - len(generation.requests)
            self._finished += missing * params.n
            self._abort(generation)
            self._tell(generation.fail, failed(f"{type(error).__name__}: {error}"))

    def _lend(self, generation: Generation, stream: Stream) -> None:
        deltas = generation.take_plain()
        if deltas is None:
            return
        generation.stream = stream
        generation.written += sum(len(delta.token_ids) for delta in deltas)
        texts = [piece for delta in deltas for piece in delta.pieces]
        self._streams.write([stream] * len(texts), texts)

    def _abort(self, generation: Generation) -> None:
        for request in generation.requests:
            self.engine.abort(request.id)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call `callback` in the event loop's thread."""
        with suppress(RuntimeError):  # the event loop has ended: no handler is left to notify
            self._loop.call_soon_threadsafe(callback, *arguments)


def _wake(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.wake()


def _settle(future: asyncio.Future[Result], result: Result, error: BaseException | None) -> None:
    if future.done():  # the waiting task was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
