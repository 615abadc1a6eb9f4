"""The event loop's end of the engine: generations in, tokens out.

All tokens of a step wake the event loop once, for however many requests. The plain tokens of
streams, which are most, do not wake it: see `EngineClient.write_plain`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from megavm.server.engine.generation import Generation, Part
from megavm.server.engine.messages import (
    Abort,
    Accepted,
    Answer,
    AskMetrics,
    Broken,
    Command,
    Event,
    Loaded,
    Loading,
    ModelFacts,
    NotLoaded,
    PlainPart,
    Record,
    Refused,
    Stop,
    StopRecording,
    Submit,
    Tokens,
    WholePart,
)
from megavm.server.errors import ApiError, failed
from megavm.server.event_streams import EventStreams

if TYPE_CHECKING:
    from megavm.server._event_writer import Stream
    from megavm.server.engine.metrics import EngineSnapshot

_JOIN_SECONDS: Final = 30.0
_RECORD_SECONDS: Final = 60.0  # to measure what the machine can give, and to write the trace


class Transport(Protocol):
    """Carries messages to an EngineCore and back."""

    def start(self, emit: Callable[[Event], None]) -> None:
        """Let the core load its model; `emit` gets its events, in a thread of the transport."""
        ...

    def send(self, command: Command) -> None:
        """Have the core obey a command; returns at once."""
        ...

    def give_up(self) -> None:
        """End loading as soon as possible."""
        ...

    def join(self, seconds: float) -> None:
        """Wait for the core's end after `Stop`; see to it that it comes within `seconds`."""
        ...


class EngineEnded(RuntimeError):
    """The engine has stopped for good. The process should end so that a supervisor restarts it."""


class EngineClient:
    """Talks to an engine.

    Construct it in the thread of the event loop, and call all methods there. `report` is called
    with every phase of loading.

    Attributes:
        broken: why the engine has stopped for good; None while it runs.
        ended: set after the engine has stopped for good.
    """

    def __init__(self, transport: Transport, report: Callable[[Loading], None]) -> None:
        self.broken: str | None = None
        self.ended = asyncio.Event()
        self._gone = False  # whether there is nobody any more who answers
        self._unwanted = False  # whether its end is no accident
        self._has_model = False
        self._transport = transport
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._streams = EventStreams()
        self._loaded: asyncio.Future[ModelFacts | None] = self._loop.create_future()
        self._keys = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._recordings: set[int] = set()  # keys of those that will be traces
        # The thread in which parts arrive and the event loop share these.
        self._lock = threading.Lock()
        self._generations: dict[int, Generation] = {}  # by key, until all sequences have ended
        self._unfinished = 0  # sequences
        self._open: dict[Generation, int] = {}  # keys of generations that are not closed
        # Those with restricted tokens that are not queued yet. They may end before the event loop
        # hears that they are.
        self._compiling: dict[int, Generation] = {}
        transport.start(self._on_event)

    async def loaded(self) -> ModelFacts | None:
        """Wait until the model is loaded; None if loading was given up.

        Raises:
            Exception: why it could not be loaded.
        """
        return await asyncio.shield(self._loaded)

    def give_up(self) -> None:
        """End loading as soon as possible."""
        self._unwanted = True
        self._transport.give_up()

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run or wait."""
        return self._unfinished

    def submit(self, generation: Generation) -> None:
        """Queue a generation. The caller must `close` it."""
        key = next(self._keys)
        with self._lock:
            self._unfinished += generation.num_sequences
            self._generations[key] = generation
        self._open[generation] = key
        if generation.params.restricts:
            self._compiling[key] = generation
        prompts = tuple(generation.prompts)
        self._transport.send(Submit(key, prompts, generation.params, generation.arrived))

    def close(self, generation: Generation) -> None:
        """Forget a generation; its unfinished sequences are aborted before the next step."""
        if not generation.closed:
            generation.closed = True
            key = self._open.pop(generation)
            if generation.unfinished:
                self._transport.send(Abort(key))

    async def write_plain(
        self, generation: Generation, connection: asyncio.Transport, head: str, tail: str
    ) -> None:
        """Have plain parts of a generation written to its connection until another kind comes.

        Their events are `head`, the text in JSON, and `tail`. The generation has one sequence. All
        batches from `next_batch` must have been written; it goes on with what is not plain.
        """
        if generation.failed:
            return
        stream = self._streams.open(connection, head, tail)
        try:
            self._lend(generation, stream)
            await generation.arrival()
        finally:
            await self._streams.end(stream, connection)

    def _lend(self, generation: Generation, stream: Stream) -> None:
        with self._lock:
            parts = generation.take_plain()
            if parts is None:
                return
            generation.stream = stream
            generation.written += sum(len(part.token_ids) for part in parts)
            texts = [piece for part in parts for piece in part.pieces]
            self._streams.write([stream] * len(texts), texts)

    def fail_all(self, error: ApiError) -> None:
        """End every generation with an error."""
        for generation in self._open:
            generation.fail(error)

    def end_recordings(self, error: ApiError) -> None:
        """End `record` with an error, which it raises."""
        for key in self._recordings:
            if not self._answers[key].done():
                self._answers[key].set_exception(error)

    async def metrics(self) -> EngineSnapshot:
        """The engine's metrics.

        Raises:
            EngineEnded: the model is not loaded, or the engine's process has ended.
        """
        snapshot: EngineSnapshot = await self._ask(AskMetrics)
        return snapshot

    async def record(self, steps: int, timeout: float) -> bytes:
        """A trace file of the next steps; of fewer if `timeout` seconds pass before.

        Raises:
            ValueError: the machine cannot trace.
            ShortRunning: no step ran.
            TimeoutError: the engine does not answer.
            EngineEnded: the engine's process has ended.
            ApiError: see `end_recordings`.
        """
        try:
            async with asyncio.timeout(timeout + _RECORD_SECONDS):
                trace: bytes = await self._ask(Record, steps, timeout)
                return trace
        except (asyncio.CancelledError, TimeoutError, ApiError):
            self._transport.send(StopRecording())
            raise

    async def _ask(self, question: type[AskMetrics | Record], *arguments: Any) -> Any:
        if self._gone or not self._has_model:
            raise EngineEnded(self.broken or "the engine is not there")
        key = next(self._keys)
        answer = self._answers[key] = self._loop.create_future()
        if question is Record:
            self._recordings.add(key)
        try:
            self._transport.send(question(key, *arguments))
            return await answer
        finally:
            self._recordings.discard(key)
            del self._answers[key]

    async def close_all(self) -> None:
        """End the engine after the running step. Nothing may be submitted afterwards."""
        self._unwanted = True
        self._transport.send(Stop())
        await asyncio.to_thread(self._transport.join, _JOIN_SECONDS)
        self._streams.close()

    # Events.

    def _on_event(self, event: Event) -> None:
        """Take an event, in the transport's thread."""
        if isinstance(event, Tokens):
            self._deliver(event.parts)
        else:
            self._tell(self._handle, event)

    def _deliver(self, parts: Sequence[PlainPart | WholePart]) -> None:
        woken: dict[Generation, None] = {}
        streams: list[Stream] = []
        texts: list[str] = []
        with self._lock:
            for part in parts:
                key, index = part[:2]
                generation = self._generations[key]
                if len(part) == 4:
                    if (stream := generation.stream) is not None:
                        generation.written += len(part[2])
                        texts += part[3]
                        streams += [stream] * len(part[3])
                        continue
                elif (read := part[8]) is not None:
                    generation.read[index // generation.params.n] = read
                generation.stream = None
                new = Part(*part[2:8])
                if new.finish_reason is not None:
                    self._count_ended(key, 1)
                if generation.add(index, new):
                    woken[generation] = None
            if streams:
                self._streams.write(streams, texts)
        if woken:
            self._tell(_wake, list(woken))

    def _count_ended(self, key: int, sequences: int) -> None:
        generation = self._generations[key]
        self._unfinished -= sequences
        generation.unfinished -= sequences
        if not generation.unfinished:
            del self._generations[key]

    def _handle(self, event: Event) -> None:
        """Take an event, in the thread of the event loop."""
        match event:
            case Loading():
                self._report(event)
            case Loaded():
                self._has_model = True
                self._loaded.set_result(event.facts)
            case NotLoaded(None):
                self._loaded.set_result(None)
            case NotLoaded(Exception() as error):
                self._loaded.set_exception(error)
            case Accepted():
                self._compiling.pop(event.key).accept()
            case Refused():
                self._refuse(event)
            case Answer():
                self._settle(event)
            case Broken():
                self._break(event)

    def _refuse(self, refused: Refused) -> None:
        with self._lock:
            generation = self._generations[refused.key]
            self._count_ended(refused.key, refused.sequences)
        error, waits = refused.error, self._compiling.pop(refused.key, None) is not None
        if waits and isinstance(error, ValueError):
            generation.accept(error)
        elif error is not None:
            generation.fail(failed(f"{type(error).__name__}: {error}"))

    def _settle(self, answer: Answer) -> None:
        future = self._answers.get(answer.key)
        if future is None or future.done():  # the waiting task was cancelled
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    def _break(self, broken: Broken) -> None:
        if broken.gone:
            self._gone = True
            with self._lock:
                self._generations.clear()
                self._unfinished = 0
            self._compiling.clear()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(EngineEnded(broken.cause))
            if not self._loaded.done():
                if self._unwanted:
                    self._loaded.set_result(None)
                else:
                    self._loaded.set_exception(EngineEnded(broken.cause))
            if self._unwanted or not self._has_model:
                return
        if self.broken is None:
            self.broken = broken.cause
        self.fail_all(failed(self.broken))
        self.ended.set()

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call `callback` in the event loop's thread."""
        with suppress(RuntimeError):  # the event loop has ended: no handler is left to notify
            self._loop.call_soon_threadsafe(callback, *arguments)


def _wake(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.wake()
