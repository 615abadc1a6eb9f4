"""Statistics of a run under the names of vLLM's benchmark, as a table and as one JSON object."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from megavm.loadgen.client import Outcome, Target
from megavm.loadgen.run import LAG_LIMIT_SECONDS, Load, Result

METRICS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")
_WIDTH: Final = 56
_NAME_WIDTH: Final = 42
_BUSY: Final = 0.95  # share of a core from which the client counts as a bottleneck


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Limits in milliseconds by metric, from texts such as `ttft:50`.

    Raises:
        ValueError: a text is not NAME:MILLISECONDS with a name out of ttft, tpot, e2el.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_METRICS or not limit >= 0:
            raise ValueError(
                f"{text!r} is not a limit such as ttft:50, with one of"
                f" {', '.join(GOODPUT_METRICS)} and milliseconds"
            )
        limits[name] = limit
    return limits


def summarise(
    result: Result, target: Target, load: Load, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """The report as JSON values. Keys ending in _ms are milliseconds, `duration` is seconds."""
    done = [outcome for outcome in result.outcomes if outcome.failure is None]
    seconds = result.seconds
    inputs = sum(outcome.input_tokens for outcome in done)
    outputs = sum(outcome.output_tokens for outcome in done)
    good = sum(_is_good(outcome, goodput) for outcome in done)

    def per_second(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    samples = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [outcome.tpot for outcome in done if outcome.tpot is not None],
        "itl": [gap for outcome in done for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in done],
    }
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if target.endpoint == "chat" else "openai",
        "base_url": target.base_url,
        "model_id": target.model,
        "num_prompts": result.sent,
        "request_rate": "inf" if load.rate == math.inf else load.rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
        "interrupted": result.interrupted,
        "duration": seconds,
        "completed": len(done),
        "failed": len(result.outcomes) - len(done),
        "unfinished": result.sent - len(result.outcomes),
        "failures": _failures(result.outcomes),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": per_second(len(done)),
        "request_goodput": per_second(good) if goodput else None,
        "goodput_limits_ms": dict(goodput),
        "output_throughput": per_second(outputs),
        "total_token_throughput": per_second(inputs + outputs),
        "max_concurrent_requests": result.peak_concurrency,
        **{
            key: value
            for name, values in samples.items()
            for key, value in _statistics(name, values).items()
        },
        "mean_client_wait_ms": _mean_ms([outcome.waited for outcome in result.outcomes]),
        "client": _client(result),
    }


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1e3 * seconds[name] <= limit for name, limit in limits.items())


def _failures(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Count and first message of each kind of failure, most frequent first."""
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    examples: dict[str | None, str] = {}
    for outcome in failed:
        examples.setdefault(outcome.failure, outcome.message)
    counts = Counter(outcome.failure for outcome in failed)
    return [
        {"kind": kind, "count": count, "example": examples[kind]}
        for kind, count in counts.most_common()
    ]


def _statistics(name: str, seconds: list[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of one metric; zeros without samples."""
    values = np.asarray(seconds or [0.0]) * 1e3
    p90, p99 = np.percentile(values, (90, 99))
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p90_{name}_ms": float(p90),
        f"p99_{name}_ms": float(p99),
    }


def _mean_ms(seconds: list[float]) -> float:
    return 1e3 * sum(seconds) / len(seconds) if seconds else 0.0


def _client(result: Result) -> dict[str, Any]:
    """Statistics of the client itself; `load` is the share of one core that it used."""
    lags = np.asarray(result.lags or [0.0])
    p99 = float(np.percentile(lags, 99))
    load = result.cpu_seconds / result.seconds if result.seconds > 0 else 0.0
    return {
        "p99_lag_ms": 1e3 * p99,
        "max_lag_ms": 1e3 * float(lags.max()),
        "load": load,
        "was_bottleneck": p99 > LAG_LIMIT_SECONDS or load > _BUSY,
    }


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Sentences about reasons to doubt the numbers of `summarise`."""
    client, sentences = report["client"], []
    if client["was_bottleneck"]:
        sentences.append(
            f"this client did not keep up: it was {client['p99_lag_ms']:.1f} ms late (99th"
            f" percentile) and used {client['load']:.0%} of a core, so that latencies are too long"
            " and throughput may be too low; send less, or from a computer of its own"
        )
    if report["interrupted"]:
        sentences.append(
            f"interrupted: {report['unfinished']} requests were under way and do not count"
        )
    return sentences


def format_table(report: Mapping[str, Any]) -> str:
    """The report of `summarise` as a table."""
    lines = [" Benchmark of a server ".center(_WIDTH, "=")]

    def row(name: str, value: Any) -> None:
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name + ':':{_NAME_WIDTH}} {text:>{_WIDTH - _NAME_WIDTH - 1}}")

    row("Successful requests", report["completed"])
    row("Failed requests", report["failed"])
    row("Request rate (req/s)", report["request_rate"])
    row("Most requests at once", report["max_concurrent_requests"])
    row("Duration (s)", report["duration"])
    row("Total input tokens", report["total_input_tokens"])
    row("Total output tokens", report["total_output_tokens"])
    row("Request throughput (req/s)", report["request_throughput"])
    if report["goodput_limits_ms"]:
        row("Request goodput (req/s)", report["request_goodput"])
    row("Output token throughput (tok/s)", report["output_throughput"])
    row("Total token throughput (tok/s)", report["total_token_throughput"])
    if report["request_rate"] != "inf" and report["max_concurrency"]:
        row("Mean wait for a free slot (ms)", report["mean_client_wait_ms"])
    for name, title in METRICS.items():
        lines.append(f" {title} ".center(_WIDTH, "-"))
        for statistic in ("mean", "median", "p90", "p99"):
            label = f"{statistic.capitalize()} {name.upper()} (ms)"
            row(label, report[f"{statistic}_{name}_ms"])
    if report["failures"]:
        lines.append(" Failures ".center(_WIDTH, "-"))
        lines += [f"{f['count']} x {f['kind']}: {f['example']}" for f in report["failures"]]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)
