"""Metrics for Prometheus: vLLM's names with the prefix `megavm:`, and a few more."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from megavm.scheduler.engine.engine import Engine
    from megavm.scheduler.engine.sequence import Delta, Request

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "megavm:"
_INFINITY: Final = float("inf")


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


class EngineMetrics:
    """Metrics of an engine's steps; see engine_loop.Observer."""

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


class Metrics(Collector):
    """All metrics of a server, collected on request.

    `engine` returns the engine, or None before it is loaded.
    """

    def __init__(self, model_name: str, engine: Callable[[], Engine | None]) -> None:
        self.of_engine = EngineMetrics()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = engine
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._answers = Counter(
            f"{PREFIX}http_requests",
            "Answers, by route and status.",
            ("route", "status"),
            registry=self._registry,
        )
        self._registry.register(self)

    def count_answer(self, route: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine."""
        engine = self._engine()
        if engine is None:
            return
        yield from self._gauges(engine)
        yield from self._counters(engine)
        names, values = tuple(self._labels), tuple(self._labels.values())
        for name, histogram in self.of_engine.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, _HELP[name], labels=names)
            family.add_metric(values, histogram.buckets(), histogram.sum)
            yield family

    def _gauges(self, engine: Engine) -> Iterable[Metric]:
        counters, busy = engine.counters, self.of_engine.busy_seconds
        host = counters.plan_seconds + counters.collect_seconds
        blocks = engine.blocks
        values = {
            "num_requests_running": engine.num_running,
            "num_requests_waiting": engine.num_waiting,
            "kv_cache_usage_perc": blocks.num_held / blocks.num_blocks,
            "host_share": host / busy if busy else 0.0,
        }
        for name, value in values.items():
            yield self._family(GaugeMetricFamily, name, value)
        sizes = {"block_size": str(blocks.block_size), "num_gpu_blocks": str(blocks.num_blocks)}
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "Sizes of the KV cache.", labels=tuple(sizes)
        )
        info.add_metric(tuple(sizes.values()), 1)
        yield info

    def _counters(self, engine: Engine) -> Iterable[Metric]:
        counters, prefix = engine.counters, engine.blocks.counters
        values: dict[str, float] = {
            "prompt_tokens": counters.prompt_tokens,
            "generation_tokens": counters.output_tokens,
            "num_preemptions": engine.planner.preemptions,
            "prefix_cache_queries": prefix.queries * engine.blocks.block_size,
            "prefix_cache_hits": prefix.hits * engine.blocks.block_size,
            "engine_launches": counters.launches,
            "engine_late_launches": counters.late_launches,
            "engine_steps": counters.steps,
            "engine_faults": counters.faults,
            "engine_busy_seconds": self.of_engine.busy_seconds,
            "engine_plan_seconds": counters.plan_seconds,
            "engine_run_seconds": counters.run_seconds,
            "engine_collect_seconds": counters.collect_seconds,
        }
        for name, value in values.items():
            yield self._family(CounterMetricFamily, name, value)
        family = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Completions that ended, by what ended them.",
            labels=(*self._labels, "finished_reason"),
        )
        for reason, count in self.of_engine.finished.items():
            family.add_metric((*self._labels.values(), reason), count)
        yield family

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        value: float,
    ) -> Metric:
        family = kind(PREFIX + name, _HELP[name], labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family


_HELP: Final = {
    "num_requests_running": "Sequences that hold a slot.",
    "num_requests_waiting": "Sequences that wait for a slot or for KV blocks.",
    "kv_cache_usage_perc": "Share of the KV blocks that sequences hold, 0 to 1.",
    "host_share": "Time that planning and collecting took, over the time with work to do.",
    "prompt_tokens": "Tokens of prompts that were read.",
    "generation_tokens": "Tokens that were generated.",
    "num_preemptions": "Sequences that lost their KV blocks to others and were computed again.",
    "prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts that were found in it.",
    "engine_launches": "Launches of the machine, of one step or several.",
    "engine_late_launches": "Launches that began when the GPU ran nothing.",
    "engine_steps": "Steps that the machine ran.",
    "engine_faults": "Launches that failed.",
    "engine_busy_seconds": "Time in which the engine had work.",
    "engine_plan_seconds": "Time that planning took; it may overlap with runs.",
    "engine_run_seconds": "Time that the machine ran, by its own clock on a GPU.",
    "engine_collect_seconds": "Time that results took to be read; it may overlap with runs.",
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a completion.",
    "e2e_request_latency_seconds": "From the arrival of a request to the end of a completion.",
    "request_queue_time_seconds": "From the arrival of a request to its place in the batch.",
    "request_prefill_time_seconds": "From there to its first token.",
    "request_decode_time_seconds": "From there to its end.",
    "request_inference_time_seconds": "From its place in the batch to its end.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of a completion.",
    "request_max_num_generation_tokens": "Tokens of a request's longest completion.",
    "request_params_n": "Completions that a request asked for.",
    "request_params_max_tokens": "Largest number of tokens of a completion, as asked for.",
    "iteration_tokens_total": "Tokens of a launch: those generated, and prompts that it completed.",
    "step_seconds": "From a launch's end to the next one's, or from a request to the first one's.",
}
