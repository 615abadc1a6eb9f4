"""The loop that drives an engine: requests in, the tokens of every step out."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from megavm.server.engine.messages import (
    Accepted,
    Broken,
    Event,
    PlainPart,
    PromptRead,
    Refused,
    Submit,
    Tokens,
    WholePart,
)
from megavm.server.logs import log, logger

if TYPE_CHECKING:
    from megavm.scheduler.engine.engine import Engine
    from megavm.scheduler.engine.restriction import Restriction
    from megavm.scheduler.engine.sequence import Delta, Request

# The engine counts as broken after this many failed launches in a row. After a single fault the
# machine runs the next request. The limit is above 3, because OpenAI's client sends a failing
# request three times.
_MAX_FAULTS: Final = 5

Result = TypeVar("Result")


class Observer(Protocol):
    """Receives the deltas of every step, in the engine's thread (metrics.EngineMetrics)."""

    def step(self, deltas: Sequence[Delta], seconds: float) -> None:
        """One step has ended, `seconds` after the last one, or after a request came to none."""
        ...


@dataclass(eq=False)
class _Owner:
    """What a request belongs to."""

    key: int
    first: int  # index of its first sequence
    unfinished: int  # sequences whose last delta has not come
    read: bool = False  # whether PromptRead was sent


class EngineLoop:
    """Drives an engine in the thread that calls `run`, and tells `emit` what happens.

    Any thread may call the other methods. What they ask for is done between two steps.

    Attributes:
        broken: why the engine has stopped for good; None while it runs.
    """

    def __init__(self, engine: Engine, observer: Observer, emit: Callable[[Event], None]) -> None:
        self.engine = engine
        self.broken: str | None = None
        self._observer = observer
        self._emit = emit
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._owners: dict[Hashable, _Owner] = {}  # by the id of a request
        self._requests: dict[int, list[Request]] = {}  # those that have not ended, by key
        self._calls: set[Future[Any]] = set()  # that have not been answered
        self._over = False  # whether nobody carries out commands any more
        self._after_step: Callable[[], None] | None = None
        self._since = time.perf_counter()  # end of the last step, or when its first request came

    def submit(self, submit: Submit, restriction: Restriction | None = None) -> None:
        """Queue the requests of a key, with prompts from `PromptLimits.validate`.

        `restriction`: what their parameters say about the tokens that may be chosen, compiled.
        """
        self._commands.put(lambda: self._add(submit, restriction))

    def abort(self, key: int) -> None:
        """End what is left of the requests of a key; the next step has their last deltas."""
        self._commands.put(lambda: self._abort(key))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Call a function in the engine's thread between two steps; a future of its result.

        The future is cancelled when `run` has ended.
        """
        future: Future[Result] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            self._calls.discard(future)

        self._calls.add(future)
        self._commands.put(command)
        if self._over:
            future.cancel()
        return future

    def until(
        self,
        begin: Callable[[], None],
        done: Callable[[], bool],
        ended: threading.Event,
        timeout: float,
    ) -> bool:
        """Call `begin`, then `done` after every step until it returns true, and set `ended`.

        Both are called in the engine's thread. Also ends when `ended` is set, or after `timeout`
        seconds. Returns whether `ended` is set. Only one such wait at a time is possible. Raises
        what they raise.
        """
        failed: list[Exception] = []

        def after_step() -> None:
            over = True
            try:
                over = done()
            except Exception as error:  # no error of the step
                failed.append(error)
            if over:
                self._after_step = None
                ended.set()

        def start() -> None:
            begin()
            self._after_step = after_step

        def stop() -> None:
            self._after_step = None

        self.call(start).result()
        try:
            found = ended.wait(timeout)
        finally:
            self.call(stop).result()
        if failed:
            raise failed[0]
        return found

    def stop(self) -> None:
        """End `run` after the running step. Nothing may be submitted afterwards."""
        self._commands.put(None)

    # The engine's thread.

    def run(self) -> None:
        """Make steps until `stop`. When the engine has stopped for good, only obey commands."""
        try:
            self._run()
        finally:
            self._over = True
            for future in list(self._calls):
                future.cancel()

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
        self._emit(Broken(self.broken))
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
        if deltas:
            self._emit(Tokens([self._part(delta) for delta in deltas]))
        if self._after_step is not None:
            self._after_step()

    def _part(self, delta: Delta) -> PlainPart | WholePart:
        """What the event loop needs of a delta; forgets a request that has ended."""
        request = delta.request
        owner, read = self._owners[request.id], None
        index = owner.first + delta.index
        if delta.finish_reason is None and not delta.logprobs and owner.read:
            return owner.key, index, delta.token_ids, delta.pieces
        if not owner.read:
            owner.read = True
            read = PromptRead(request.cached_tokens, request.prompt_logprobs)
        if delta.finish_reason is not None:
            owner.unfinished -= 1
            if not owner.unfinished:
                self._forget(request, owner)
        return (
            owner.key,
            index,
            delta.token_ids,
            delta.pieces,
            delta.logprobs,
            delta.finish_reason,
            delta.stop_reason,
            delta.error,
            read,
        )

    def _forget(self, request: Request, owner: _Owner) -> None:
        # Sequences refer to their request: without this, only a garbage collection frees them.
        request.sequences = ()
        del self._owners[request.id]
        requests = self._requests[owner.key]
        requests.remove(request)
        if not requests:
            del self._requests[owner.key]

    def _add(self, submit: Submit, restriction: Restriction | None) -> None:
        params = submit.params
        requests: list[Request] = []
        try:
            for i, prompt in enumerate(submit.prompts):
                request = self.engine.queue(prompt, params, restriction=restriction)
                self._owners[request.id] = _Owner(submit.key, i * params.n, params.n)
                request.times.arrived = submit.arrived
                requests.append(request)
                self._requests[submit.key] = requests
            if params.restricts:
                self._emit(Accepted(submit.key))
        except Exception as error:
            logger.exception("the engine refused a request")
            missing = (len(submit.prompts) - len(requests)) * params.n
            self._emit(Refused(submit.key, missing, error))
            self._abort(submit.key)

    def _abort(self, key: int) -> None:
        for request in self._requests.get(key, ()):
            self.engine.abort(request.id)
