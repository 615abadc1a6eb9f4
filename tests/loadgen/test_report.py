"""Statistics of outcomes that are known."""

from __future__ import annotations

import json
import math

import pytest

from megavm.loadgen.client import Outcome, Target
from megavm.loadgen.report import format_table, parse_goodput, summarise, warnings
from megavm.loadgen.run import Load, Result

TARGET = Target("http://here", "m", api_key="secret")


def outcome(ttft: float, gaps: list[float], inputs: int = 10) -> Outcome:
    first = 5.0 + ttft
    last = first + sum(gaps)
    return Outcome(5.0, inputs, len(gaps) + 1, first=first, last=last, gaps=gaps)


def failed(kind: str, message: str) -> Outcome:
    result = Outcome(5.0, 10)
    result.fail(kind, message)
    return result


def result(*outcomes: Outcome, lag: float = 0.001) -> Result:
    return Result(list(outcomes), len(outcomes), 2.0, 0.5, 3, lags=[lag] * 100)


def test_statistics_have_vllms_names_and_definitions() -> None:
    report = summarise(
        result(
            outcome(0.1, [0.01, 0.03]),
            outcome(0.2, [0.02, 0.02]),
            outcome(0.3, []),
            failed("429", "full"),
        ),
        TARGET,
        Load(rate=4.0),
        {"ttft": 250, "tpot": 25},
    )
    expected = {
        "completed": 3,
        "failed": 1,
        "unfinished": 0,
        "num_prompts": 4,
        "duration": 2.0,
        "total_input_tokens": 30,
        "total_output_tokens": 7,
        "request_throughput": 1.5,
        "request_goodput": 1.0,
        "output_throughput": 3.5,
        "total_token_throughput": 18.5,
        "max_concurrent_requests": 3,
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "p90_ttft_ms": 280,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 20,
        "p99_tpot_ms": 20,
        "mean_itl_ms": 20,
        "median_itl_ms": 20,
        "p90_itl_ms": 27,
        "std_itl_ms": math.sqrt(50),
        "mean_e2el_ms": (140 + 240 + 300) / 3,
        "median_e2el_ms": 240,
        "request_rate": 4.0,
    }
    for name, value in expected.items():
        assert report[name] == pytest.approx(value), name
    assert report["failures"] == [{"kind": "429", "count": 1, "example": "full"}]
    assert "secret" not in json.dumps(report, allow_nan=False)


def test_failures_are_counted_by_kind_with_one_sentence_each() -> None:
    report = summarise(
        result(failed("500", "a"), failed("429", "b"), failed("429", "c")), TARGET, Load(), {}
    )
    assert report["failures"] == [
        {"kind": "429", "count": 2, "example": "b"},
        {"kind": "500", "count": 1, "example": "a"},
    ]
    table = format_table(report)
    assert "2 x 429: b" in table
    assert "c" not in table.splitlines()[-3:-1]
    assert (report["mean_ttft_ms"], report["p99_itl_ms"]) == (0, 0)


def test_without_outcomes_the_report_is_still_json() -> None:
    report = summarise(Result(), TARGET, Load(), {})
    json.dumps(report, allow_nan=False)
    assert "Successful requests" in format_table(report)


def test_goodput_is_told_only_where_it_was_asked_for() -> None:
    report = summarise(result(outcome(0.1, [])), TARGET, Load(), {})
    assert report["request_goodput"] is None
    assert "goodput" not in format_table(report)
    report = summarise(result(outcome(0.1, [])), TARGET, Load(), {"e2el": 99})
    assert report["request_goodput"] == 0
    assert "goodput" in format_table(report)


def test_limits_are_read_as_vllm_reads_them() -> None:
    assert parse_goodput(["ttft:50", "tpot:5.5"]) == {"ttft": 50, "tpot": 5.5}
    for text in ("ttft", "itl:5", "ttft:fast", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError, match="is not a limit such as ttft:50"):
            parse_goodput([text])


def test_a_client_that_is_late_says_so() -> None:
    report = summarise(result(outcome(0.1, []), lag=0.012), TARGET, Load(), {})
    assert report["client"]["was_bottleneck"]
    (sentence,) = warnings(report)
    assert "12.0 ms late" in sentence
    assert warnings(summarise(result(outcome(0.1, [])), TARGET, Load(), {})) == []


def test_what_is_mean_in_the_table_is_mean_in_the_report() -> None:
    report = summarise(result(outcome(0.1, [0.01])), TARGET, Load(), {})
    table = format_table(report)
    assert "Mean TTFT (ms):                                   100.00" in table
    assert max(map(len, table.splitlines())) == 56
