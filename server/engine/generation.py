"""The sequences of one HTTP request, as the event loop sees them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megavm.scheduler.engine.restriction import is_error_of_request
from megavm.server.engine.messages import PromptRead
from megavm.server.errors import ApiError, bad_request, failed

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams
    from megavm.scheduler.engine.logprobs import TokenLogprobs
    from megavm.scheduler.engine.sequence import FinishReason
    from megavm.scheduler.engine.step import Ints
    from megavm.server._event_writer import Stream


@dataclass(slots=True)
class Part:
    """What one launch added to one sequence; see sequence.Delta."""

    token_ids: list[int]
    pieces: list[str]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it has only text: it is not the last one, and there are no log-probabilities."""
        return self.finish_reason is None and not self.logprobs


Batch = list[tuple[int, Part]]


class Generation:
    """`params.n` continuations of each prompt of a request.

    Continuation c of prompt p has the index p * n + c. Use it in the event loop's thread. `whole`:
    wake the event loop only when all sequences have ended. `blamed`: names the request's field that
    is the cause of an error, given its message.

    Attributes:
        prompts: token ids of each prompt, as `PromptLimits.validate` returns them.
        params: parameters of all prompts.
        read: what is known of each prompt, since its first part.
        arrived: time of creation, by `time.perf_counter`.
        written: tokens of plain parts that did not pass `next_batch` (EngineClient.write_plain).
        stream: where plain parts are written now.
        closed: whether nobody waits for it any more.
    """

    def __init__(
        self,
        prompts: Sequence[Ints],
        params: SamplingParams,
        whole: bool,
        blamed: Callable[[str], str | None] = lambda message: None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.read = [PromptRead(0, None)] * len(prompts)
        self.arrived = time.perf_counter()
        self.num_sequences = len(prompts) * params.n
        self.unfinished = self.num_sequences  # counted where parts arrive
        self.written = 0
        self.stream: Stream | None = None
        self.closed = False
        self._whole = whole
        self._blamed = blamed
        self._missing = self.num_sequences  # counted by the event loop
        self._coming: deque[tuple[int, Part]] = deque()
        self._arrival = asyncio.Event()
        self._accepted: asyncio.Future[None] | None = None
        self._error: ApiError | None = None

    @property
    def failed(self) -> bool:
        """Whether `next_batch` raises an error, now or after the parts that have arrived."""
        return self._error is not None

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended and `next_batch` has returned all their parts."""
        return not self._missing

    async def accepted(self) -> None:
        """Wait until a request with restricted tokens is queued.

        Raises:
            ValueError: its restriction is not possible.
            ApiError: the generation failed.
        """
        self._accepted = asyncio.get_running_loop().create_future()
        if self._error is not None:
            raise self._error
        await self._accepted

    async def next_batch(self) -> Batch:
        """The (index, part) pairs since the last call; [] when all sequences have ended.

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
            index, part = self._coming.popleft()
            if part.error is not None:
                self._error = self._error or self._failure(part.error)
                continue
            self._missing -= part.finish_reason is not None
            batch.append((index, part))
        return batch

    def _failure(self, error: str) -> ApiError:
        """The answer to an error of a sequence: 400 if a client should not repeat the request."""
        if is_error_of_request(error):
            return bad_request(error, self._blamed(error))
        return failed(error)

    # For EngineClient: where parts arrive, with its lock.

    def add(self, index: int, part: Part) -> bool:
        """Append a part; returns whether the event loop must be woken."""
        self._coming.append((index, part))
        return not (self.closed or (self._whole and self.unfinished))

    def take_plain(self) -> list[Part] | None:
        """The parts that `next_batch` has not returned; None, and they stay, if one is not plain.

        The event loop must not call `next_batch` meanwhile.
        """
        if self.closed or not all(part.is_plain for _, part in self._coming):
            return None
        return [self._coming.popleft()[1] for _ in range(len(self._coming))]

    # For EngineClient: in the event loop's thread.

    def wake(self) -> None:
        """Let `next_batch` check for new parts."""
        self._arrival.set()

    def accept(self, error: ValueError | None = None) -> None:
        """Let `accepted` return, or raise `error`."""
        if self._accepted is None or self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(error)

    def fail(self, error: ApiError) -> None:
        """End the generation with an error, after the parts that have arrived."""
        self._error = self._error or error
        self._arrival.set()
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_exception(error)
