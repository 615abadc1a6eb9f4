"""What an engine counts for `/metrics`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from megavm.scheduler.engine.engine import Engine
    from megavm.scheduler.engine.sequence import Delta, Request


def _decades(low: int, high: int) -> tuple[float, ...]:
    """1, 2 and 5 times the powers of ten from 10**low, up to 10**high."""
    steps = (float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 2, 5))
    return (*steps, float(f"1e{high}"))


SECONDS: Final = _decades(-4, 3)  # from 0.1 ms
TOKENS: Final = _decades(0, 5)


class Histogram:
    """Counts of values by size. One thread may observe while others read.

    `observe` is called for every token and takes a fraction of a microsecond, a tenth of the time
    of prometheus_client's histogram.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it) of each bucket, as Prometheus expects."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


@dataclass(frozen=True)
class EngineSnapshot:
    """The metrics of an engine at one moment, by name.

    Attributes:
        gauges, counters: values.
        finished: completions that ended, by what ended them.
        histograms: buckets (Histogram.buckets) and sum.
        sizes: labels of the KV cache.
    """

    gauges: dict[str, float]
    counters: dict[str, float]
    finished: dict[str, int]
    histograms: dict[str, tuple[list[tuple[str, float]], float]]
    sizes: dict[str, str]


class EngineMetrics:
    """Metrics of an engine's steps; see loop.Observer."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(SECONDS),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_queue_time_seconds": Histogram(SECONDS),
            "request_prefill_time_seconds": Histogram(SECONDS),
            "request_decode_time_seconds": Histogram(SECONDS),
            "request_inference_time_seconds": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_generation_tokens": Histogram(TOKENS),
            "request_max_num_generation_tokens": Histogram(TOKENS),
            "request_params_n": Histogram(TOKENS),
            "request_params_max_tokens": Histogram(TOKENS),
            "iteration_tokens_total": Histogram(TOKENS),
            "step_seconds": Histogram(SECONDS),
        }
        self._latency = self.histograms["inter_token_latency_seconds"]
        self._last: dict[tuple[Request, int], float] = {}  # time of each sequence's last token
        self._ended: dict[Request, int] = {}  # sequences that have ended, of requests that have not

    def step(self, deltas: Sequence[Delta], seconds: float) -> None:
        """Count the deltas of one step."""
        self.busy_seconds += seconds
        now, last, tokens = time.perf_counter(), self._last, 0
        # (time of the last token, tokens since) -> sequences: in a large batch most are alike.
        alike: dict[tuple[float, int], int] = {}
        for delta in deltas:
            key, count = (delta.request, delta.index), len(delta.token_ids)
            tokens += count
            before = last.get(key)
            if before is not None and count:
                alike[before, count] = alike.get((before, count), 0) + 1
            elif count:
                tokens += len(delta.request.prompt)
            if delta.finish_reason is None:
                last[key] = now
            else:
                last.pop(key, None)
                self._end(delta)
        for (before, count), sequences in alike.items():
            self._latency.observe((now - before) / count, count * sequences)
        if tokens:
            self.histograms["step_seconds"].observe(seconds)
            self.histograms["iteration_tokens_total"].observe(tokens)

    def _end(self, delta: Delta) -> None:
        assert delta.finish_reason is not None
        self.finished[delta.finish_reason] += 1
        request, times = delta.request, delta.request.times
        observe = self._observe
        observe("request_generation_tokens", len(request.sequences[delta.index].output))
        observe("e2e_request_latency_seconds", times.finished - times.arrived)
        ended = self._ended.pop(request, 0) + 1
        if ended < request.params.n:
            self._ended[request] = ended
            return
        first = request.sequences[0]
        observe("request_prompt_tokens", len(request.prompt))
        most = max(len(sequence.output) for sequence in request.sequences)
        observe("request_max_num_generation_tokens", most)
        observe("request_params_n", request.params.n)
        observe("request_params_max_tokens", request.params.max_tokens or first.max_output)
        if times.admitted:
            observe("request_queue_time_seconds", times.admitted - times.arrived)
        if times.first_token:
            observe("time_to_first_token_seconds", times.first_token - times.arrived)
            observe("request_prefill_time_seconds", times.first_token - times.admitted)
            observe("request_decode_time_seconds", times.finished - times.first_token)
            observe("request_inference_time_seconds", times.finished - times.admitted)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def snapshot(self, engine: Engine) -> EngineSnapshot:
        """All metrics of an engine now. Any thread may call this."""
        counters, prefix, blocks = engine.counters, engine.blocks.counters, engine.blocks
        host = counters.plan_seconds + counters.collect_seconds
        return EngineSnapshot(
            gauges={
                "num_requests_running": engine.num_running,
                "num_requests_waiting": engine.num_waiting,
                "kv_cache_usage_perc": blocks.num_held / blocks.num_blocks,
                "host_share": host / self.busy_seconds if self.busy_seconds else 0.0,
            },
            counters={
                "prompt_tokens": counters.prompt_tokens,
                "generation_tokens": counters.output_tokens,
                "num_preemptions": engine.planner.preemptions,
                "prefix_cache_queries": prefix.queries * blocks.block_size,
                "prefix_cache_hits": prefix.hits * blocks.block_size,
                "engine_launches": counters.launches,
                "engine_late_launches": counters.late_launches,
                "engine_steps": counters.steps,
                "engine_faults": counters.faults,
                "engine_busy_seconds": self.busy_seconds,
                "engine_plan_seconds": counters.plan_seconds,
                "engine_run_seconds": counters.run_seconds,
                "engine_collect_seconds": counters.collect_seconds,
            },
            finished=dict(self.finished),
            histograms={
                name: (histogram.buckets(), histogram.sum)
                for name, histogram in self.histograms.items()
            },
            sizes={"block_size": str(blocks.block_size), "num_gpu_blocks": str(blocks.num_blocks)},
        )
