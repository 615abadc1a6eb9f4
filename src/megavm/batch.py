"""The requests of a batch: queued bit by bit, their deltas collected into results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megavm.outputs import CompletionOutput, Logprob, RequestOutput
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.scheduler.engine.restriction import Restriction
from megavm.scheduler.engine.sequence import Delta, Request
from megavm.scheduler.engine.step import Ints


class Prompt(NamedTuple):
    """A checked prompt and what was asked for; ``text`` is None if it came as token ids."""

    text: str | None
    tokens: Ints
    params: SamplingParams
    restriction: Restriction | None


class Batch:
    """The requests of one call of ``LLM.generate``, queued bit by bit beside the first steps.

    To queue a request takes 20 us, for which the machine would wait, and there may be thousands.
    ``tokens_ahead``: of prompts that should wait for a seat. ``logprobs``: see Collector.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        tokens_ahead: int,
        logprobs: Callable[[TokenLogprobs], dict[int, Logprob]],
    ) -> None:
        self.collectors: list[Collector] = []  # one for each request queued so far
        self._engine = engine
        self._prompts = prompts
        self._tokens_ahead = tokens_ahead
        self._logprobs = logprobs
        self._arrived = time.perf_counter()
        self._waiting: deque[Request] = deque()  # requests that have had no seat yet
        self._tokens = 0  # length of the waiting prompts together
        self._ended = 0  # collectors that have their result, all before the next one

    @property
    def ended(self) -> bool:
        """Whether all results are there."""
        while self._ended < len(self.collectors):
            if self.collectors[self._ended].result is None:
                return False
            self._ended += 1
        return self._ended == len(self._prompts)

    def queue(self) -> list[Collector]:
        """Queue as many requests as should wait, and return their collectors."""
        first = len(self.collectors)
        while len(self.collectors) < len(self._prompts) and not self._enough():
            prompt = self._prompts[len(self.collectors)]
            request = self._engine.queue(
                prompt.tokens, prompt.params, restriction=prompt.restriction
            )
            request.times.arrived = self._arrived
            self._waiting.append(request)
            self._tokens += len(prompt.tokens)
            self.collectors.append(Collector(request, prompt.text, self._logprobs))
        return self.collectors[first:]

    def _enough(self) -> bool:
        if self._engine.lost:
            return False  # requests that nothing can run end all together
        while self._waiting:
            times = self._waiting[0].times
            if not (times.admitted or times.finished):  # some end without a seat
                break
            self._tokens -= len(self._waiting.popleft().prompt)
        return self._tokens >= self._tokens_ahead


class Collector:
    """Collects the deltas of one request; ``result`` is set when its last sequence has ended.

    ``text``: the prompt as text, or None.
    """

    def __init__(
        self,
        request: Request,
        text: str | None,
        logprobs: Callable[[TokenLogprobs], dict[int, Logprob]],
    ) -> None:
        self.request = request
        self.result: RequestOutput | None = None
        self._missing = request.params.n  # sequences that have not ended
        self._text = text
        self._logprobs = logprobs
        self._pieces: list[list[str]] = [[] for _ in range(request.params.n)]
        wanted = request.params.logprobs is not None
        self._outputs = [
            CompletionOutput(i, logprobs=[] if wanted else None) for i in range(request.params.n)
        ]

    def add(self, delta: Delta) -> None:
        output = self._outputs[delta.index]
        output.token_ids += delta.token_ids
        self._pieces[delta.index] += delta.pieces
        if output.logprobs is not None:
            output.logprobs += map(self._logprobs, delta.logprobs)
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            output.error = delta.error
            output.text = "".join(self._pieces[delta.index])
            self._missing -= 1
            if not self._missing:
                # Sequences refer to their request: else only a garbage collection frees them.
                self.request.sequences = ()
                self.result = self._result()

    def _result(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._text,
            prompt_token_ids=self.request.prompt.tolist(),
            outputs=self._outputs,
            timings=self._timings(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        entries = self.request.prompt_logprobs
        if entries is None:
            return None
        return [None if entry is None else self._logprobs(entry) for entry in entries]

    def _timings(self) -> dict[str, float]:
        times = self.request.times
        tokens = sum(len(output.token_ids) for output in self._outputs)
        decoding = times.finished - times.first_token
        # The step of the prompt chooses the first token of each sequence, so decoding excludes it.
        decoded = tokens - len(self._outputs)
        return {
            "queue_seconds": max(times.admitted - times.arrived, 0.0),
            "time_to_first_token_seconds": max(times.first_token - times.arrived, 0.0),
            "total_seconds": times.finished - times.arrived,
            "output_tokens": tokens,
            "output_tokens_per_second": decoded / decoding if decoded > 0 < decoding else 0.0,
            "cached_prompt_tokens": self.request.cached_tokens,
        }
