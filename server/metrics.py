"""Metrics for Prometheus: vLLM's names with the prefix `megavm:`, and a few more."""

from __future__ import annotations

from collections.abc import Iterator
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
    from megavm.server.engine.metrics import EngineSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "megavm:"


class Metrics(Collector):
    """All metrics of a server, collected on request.

    Attributes:
        engine_process: the id of the engine's process, if it has one of its own and is there.
    """

    def __init__(self, model_name: str) -> None:
        self.engine_process: int | None = None
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine: EngineSnapshot | None = None
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        ProcessCollector("engine", lambda: self.engine_process or "none", registry=self._registry)
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

    def text(self, engine: EngineSnapshot | None) -> bytes:
        """All metrics in Prometheus's text format; `engine`: the engine's, if it is there."""
        self._engine = engine
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine."""
        engine = self._engine
        if engine is None:
            return
        for name, value in engine.gauges.items():
            yield self._family(GaugeMetricFamily, name, value)
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "Sizes of the KV cache.", labels=tuple(engine.sizes)
        )
        info.add_metric(tuple(engine.sizes.values()), 1)
        yield info
        for name, value in engine.counters.items():
            yield self._family(CounterMetricFamily, name, value)
        family = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Completions that ended, by what ended them.",
            labels=(*self._labels, "finished_reason"),
        )
        for reason, count in engine.finished.items():
            family.add_metric((*self._labels.values(), reason), count)
        yield family
        names, values = tuple(self._labels), tuple(self._labels.values())
        for name, (buckets, total) in engine.histograms.items():
            histogram = HistogramMetricFamily(PREFIX + name, _HELP[name], labels=names)
            histogram.add_metric(values, buckets, total)
            yield histogram

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
