"""The summary of a trace, and the table of changes: what stands out is found, and said."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording import record_ring
from simulator import changed, layered, simulate, step_time
from synthetic import synthetic_trace
from test_replay import PRODUCTS

from megavm.profiler.diff import diff, format_diff
from megavm.profiler.report import format_report, report
from megavm.profiler.summary import VERSION, Facts, format_summary, summary
from megavm.profiler.trace import Trace, TraceError
from megavm.profiler.trace_file import with_summary
from megavm.profiler.what_if import (
    describe,
    format_prediction,
    format_what_if,
    parse_change,
    predict,
    what_if,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_slow_worker_is_named() -> None:
    facts = summary(synthetic_trace(workers=12, steps=5, layers=3, slow_worker=7))
    assert facts["late_workers"][0]["worker"] == 7
    assert all(row["last_worker"] == 7 for row in facts["waits"])
    assert "worker 7 came last in" in facts["sentence"]
    assert "worker 7 in half the time" in facts["sentence"]
    assert np.argmax(facts["workers"]["computing"]) == 7
    assert sum(facts["states"].values()) == pytest.approx(1, abs=0.01)


def test_bounds_are_not_what_would_help_most() -> None:
    facts = summary(Trace.load(EXAMPLES / "llama-1b-batch-8-h200.megatrace"))
    changes = facts["what_if"]["changes"]
    assert any(row["what"] == "wait" and row["saved_ns"] > 0 for row in changes)
    assert all(row["factor"] or row["what"] == "balance" for row in facts["best"])
    assert facts["best"][0]["text"] == "gate_up loads in half the time"


def test_a_worker_that_came_last_no_more_often_than_others_is_not_named() -> None:
    facts = summary(synthetic_trace(workers=2, steps=5, layers=3))
    assert max(row["count"] / row["of"] for row in facts["late_workers"]) < 0.6
    assert "came last" not in facts["sentence"]


def test_one_token_is_no_tokens() -> None:
    trace = synthetic_trace(workers=2, steps=5, layers=1)
    assert "among 5 steps of 1 token)" in "\n".join(format_summary(summary(trace)))
    assert "5 steps (0 to 4), 5 tokens, " in format_report(report(trace))
    assert "compared: steps of 1 token\n" in format_diff(diff(trace, trace))


def test_one_worker_and_one_step_are_no_workers_and_no_steps() -> None:
    trace = synthetic_trace(workers=1, steps=1, layers=1, sms=True)
    texts = (format_report(report(trace)), format_diff(diff(trace, trace)))
    assert "(synthetic, 1 worker), recorded" in texts[0]
    assert "means of 1 step (all 1:" in texts[0]
    assert "(synthetic, 1 worker), 1 step\n" in texts[1]
    for text in texts:
        assert not re.search(r"\b1 (steps|workers|tokens|instructions)\b", text)


def test_a_change_of_nothing_has_no_sign() -> None:
    trace = simulate(layered(3, 2, PRODUCTS))
    facts = predict(trace, 0, [parse_change("computing=1")])
    text = "\n".join(format_prediction({**facts, "saved_ns": 1e-9}))
    assert text.endswith("(0.0%)")


def test_outliers_are_found_and_what_of_them_grew() -> None:
    trace = synthetic_trace(workers=6, steps=30, layers=2)
    # In step 11 one worker's gate_up takes 100 us more; all that comes later moves.
    own = (trace.record_step == 11) & (trace.record_worker == 3)
    slow = own & (trace.record_label == trace.labels.index("layers.1.gate_up"))
    at = trace.times[[e.name for e in trace.events].index("inputs"), slow.argmax()]
    trace.times[trace.times > at] += 100_000
    facts = summary(trace)
    assert [row["step"] for row in facts["outliers"]] == [11]
    assert facts["outliers"][0]["more_ns"] == pytest.approx(100_000, rel=0.1)
    assert facts["outliers"][0]["phase"] == "layers.*.gate_up"
    assert "Outliers" in "\n".join(format_summary(facts))
    assert not summary(synthetic_trace(workers=6, steps=30, layers=2))["outliers"]


def test_steps_that_took_no_time_have_no_endless_numbers() -> None:
    trace = synthetic_trace(workers=4, steps=5, layers=1)
    begin = trace.step_begin[trace.record_step]
    times = np.where((trace.record_step < 4) & (trace.times >= 0), begin, trace.times)
    facts = summary(dataclasses.replace(trace, times=times))
    assert facts["step_ns"] == 0
    assert [row["step"] for row in facts["outliers"]] == [4]
    json.dumps(facts, allow_nan=False)


def test_what_misleads_is_said() -> None:
    trace = synthetic_trace(workers=4, steps=3, layers=1)
    machine = {
        **trace.machine, "cores": 2, "bandwidth": 1e9, "bandwidth_median": 5e8,
    }  # fmt: skip
    facts = summary(dataclasses.replace(trace, machine=machine, notes={"ratio": 1.5}))
    said = " ".join(facts["warnings"])
    words = ("4 workers ran on 2 cores", "caches held", "1.0 GB/s at best and 0.5 in", "1.50 times")
    assert all(part in said for part in words)
    assert "% of the memory's bandwidth" not in facts["sentence"]
    assert not summary(trace)["warnings"]
    # The spread of a ceiling that is far away misleads nobody.
    for peak, count in ((1e9, 1), (1e18, 0)):
        known = {"flops_per_second": peak, "flops_per_second_median": peak / 2}
        spread = dataclasses.replace(trace, machine={**trace.machine, **known})
        notes = "".join(summary(spread)["warnings"])
        assert notes.count("rate of matrix products was measured") == count


def test_the_sentence_names_the_nearer_ceiling() -> None:
    trace = synthetic_trace(workers=4, steps=3, layers=1)
    (program,) = trace.programs

    def said(flops: int, ceiling: float | None) -> Facts:
        own = dataclasses.replace(program, flops=program.load_bytes * flops)
        machine = {**trace.machine, "flops_per_second": ceiling}
        return summary(dataclasses.replace(trace, programs=(own,), machine=machine))

    peak = trace.machine["bandwidth"] * 100
    of_memory = said(0, peak)["of_ceiling"]
    assert 0.2 < of_memory < 1
    for flops, ceiling, words in (
        (90, peak, f"{of_memory:.0%} of the memory's bandwidth"),
        (110, peak, f"{1.1 * of_memory:.0%} of the rate of matrix products"),
        (110, None, f"{of_memory:.0%} of the memory's bandwidth"),
        (1000, peak, f"{of_memory:.0%} of the memory's bandwidth"),
    ):
        facts = said(flops, ceiling)
        assert f": {words};" in facts["sentence"]
        above = [warning for warning in facts["warnings"] if "operations" in warning]
        assert len(above) == (flops == 1000)
    assert "arithmetic" in format_report(report(trace))


def test_long_steps_are_said_in_milliseconds() -> None:
    trace = synthetic_trace(workers=4, steps=3, layers=1)
    long = dataclasses.replace(trace, times=np.where(trace.times < 0, -1, trace.times * 1000))
    facts = summary(long)
    assert facts["sentence"].startswith(f"A step takes {facts['step_ns'] / 1e6:,.1f} ms: ")


def test_unknown_workers_leave_the_rest() -> None:
    facts = summary(record_ring(dynamic=True))
    if any("dynamic" in warning for warning in facts["warnings"]):
        assert "does not say which worker" in facts["what_if"]
    assert json.loads(json.dumps(facts))["version"] == VERSION


def test_single_changes_are_ranked_by_what_they_bring() -> None:
    machine = layered(5, 3, PRODUCTS, hop=1500.0)
    facts = what_if(simulate(machine), 0)
    saved = [row["saved_ns"] for row in facts["changes"]]
    assert saved == sorted(saved, reverse=True)
    assert facts["replayed_ns"] == facts["step_ns"]
    rows = {row["text"]: row for row in facts["changes"]}
    for text, change in {
        "without waiting for attention's barrier": ("wait", "layers.*.attention barrier", 0.0),
        "all exchanges take half the time": ("latency", "", 0.5),
        "gate_up computes in half the time": ("computing", "layers.*.gate_up", 0.5),
    }.items():
        assert rows[text]["ns"] == pytest.approx(step_time(changed(machine, *change)), rel=0.03)
    lines = list(format_what_if(facts, 3))
    assert lines[2].startswith(facts["changes"][0]["text"])
    assert "more (megavm trace what-if" in lines[-1]


def test_changes_are_named_as_the_table_names_them() -> None:
    trace = simulate(layered(3, 2, PRODUCTS))
    facts = predict(trace, 0, [parse_change("computing:gate_up=2"), parse_change("latency=0")])
    assert facts["changes"] == [
        "gate_up computes in 2 times the time",
        "all exchanges take no time",
    ]
    change = parse_change("wait:o_proj words=0")
    assert predict(trace, 0, [change])["saved_ns"] > 0
    assert describe(change, trace) == "without waiting for o_proj's words"
    for text, sentence in {
        "bytes:gate_up=0.5": "gate_up loads half the bytes",
        "bytes=3": "everything loads 3 times the bytes",
        "storing:o_proj=0": "o_proj stores its results in no time",
    }.items():
        assert predict(trace, 0, [parse_change(text)])["changes"] == [sentence]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gate_up", "is no change: say WHAT=FACTOR"),
        ("luck=0", "WHAT is one of computing"),
        ("computing:gate_up=fast", "is not a number"),
        ("latency=1.2.3", "is not a number"),
        ("wait:o_proj words=0.5", "can only be left out"),
        ("switching:qkv=0", "of all workers"),
        ("computing=-1", "the factor of 'computing=-1' is out of range: 0 to 1,000,000"),
        ("latency=nan", "is out of range"),
        ("loading=1e300", "is out of range"),
        ("loading=", "is not a number"),
    ],
)
def test_what_is_no_change_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(TraceError, match=sentence):
        parse_change(text)


def test_a_phase_that_the_step_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(TraceError, match=r"no 'gate'.*it has qkv, attention, o_proj, gate_up"):
        predict(simulate(layered(2, 1, PRODUCTS)), 0, [parse_change("computing:gate=0")])


def header_of(content: bytes) -> dict[str, Any]:
    """The header of a trace file."""
    container = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header: dict[str, Any] = json.loads(container["__metadata__"]["header"])
    return header


def test_what_takes_no_time_does_not_help_most() -> None:
    facts = summary(simulate(layered(5, 3, PRODUCTS, hop=1500.0)))
    changes = facts["what_if"]["changes"]
    assert changes[0]["factor"] == 0
    assert facts["best"]
    for row in facts["best"]:
        assert row["of"]
        assert row["factor"] > 0 or row["what"] in ("wait", "balance")
        assert row in changes
    assert f"what would help most: {facts['best'][0]['text']}, " in facts["sentence"]


def test_an_old_file_gets_a_summary_and_keeps_its_columns(tmp_path: Path) -> None:
    trace = synthetic_trace(workers=3, steps=3, layers=1)
    path, old = tmp_path / "a.megatrace", tmp_path / "old.megatrace"
    trace.save(path)
    assert with_summary(path) == (b"", 0)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    container = json.loads(content[8 : 8 + length])
    header = json.loads(container["__metadata__"]["header"])
    header["summary"]["version"] = 0
    container["__metadata__"]["header"] = json.dumps(header)
    text = json.dumps(container).encode()
    old.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    begin, rest = with_summary(old)
    (tmp_path / "new.megatrace").write_bytes(begin + old.read_bytes()[rest:])
    loaded = Trace.load(tmp_path / "new.megatrace")
    assert (loaded.times == trace.times).all()
    assert (loaded.record_cause == trace.record_cause).all()
    assert header_of(begin)["summary"] == json.loads(json.dumps(summary(trace)))


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]", b"\x04" + b"\0" * 7]
)
def test_a_damaged_file_is_left_to_the_page(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.megatrace").write_bytes(content)
    assert with_summary(tmp_path / "x.megatrace") == (b"", 0)


@pytest.mark.parametrize(("name", "batch"), [("llama-1b", 1), ("llama-1b-batch-8", 8)])
def test_the_shipped_traces_are_two_steps_that_say_what_limits_them(name: str, batch: int) -> None:
    trace = Trace.load(EXAMPLES / f"{name}-h200.megatrace")
    assert (trace.num_steps, trace.workers) == (2, 132)
    assert trace.step_tokens.tolist() == [batch, batch]
    assert {"bandwidth", "flops_per_second"} <= set(trace.machine)
    facts = summary(trace)
    assert "of the memory's bandwidth; gate_up is 3" in facts["sentence"]
    assert f"what would help most: {facts['best'][0]['text']}" in facts["sentence"]
    # What the page shows of the file is what the report says today: else save it again.
    shown = header_of((EXAMPLES / f"{name}-h200.megatrace").read_bytes())["summary"]
    assert shown["version"] == VERSION
    for member in ("sentence", "warnings", "late_workers", "waits", "critical_path"):
        assert shown[member] == facts[member]
    own, now = (f["what_if"]["changes"] for f in (shown, facts))
    assert {row["text"]: row["ns"] for row in own} == pytest.approx(
        {row["text"]: row["ns"] for row in now}
    )
