"""Collects the deltas of a request into one result."""

from __future__ import annotations

from collections.abc import Callable

from megavm.outputs import CompletionOutput, Logprob, RequestOutput
from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.scheduler.engine.sequence import Delta, Request


class Collector:
    """Collects the deltas of one request.

    ``missing`` counts its unfinished sequences. ``text``: the prompt as text, or None.
    """

    def __init__(
        self,
        request: Request,
        text: str | None,
        logprobs: Callable[[TokenLogprobs], dict[int, Logprob]],
    ) -> None:
        self.request = request
        self.missing = request.params.n
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
        self._pieces[delta.index].append(delta.text)
        if output.logprobs is not None:
            output.logprobs += map(self._logprobs, delta.logprobs)
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            output.error = delta.error
            output.text = "".join(self._pieces[delta.index])
            self.missing -= 1
            if not self.missing:
                # Sequences refer to their request: else only a garbage collection frees them.
                self.request.sequences = ()

    def result(self) -> RequestOutput:
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
