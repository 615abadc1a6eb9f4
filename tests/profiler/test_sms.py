"""Imbalance by SM: what SMs do, which came last, and when one is said to be slow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_trace

from megavm.profiler.analysis import Selection, by_worker
from megavm.profiler.report import format_report, report
from megavm.profiler.sms import STEPS, by_sm, slow_sms, sm_times
from megavm.profiler.summary import format_summary, summary
from megavm.profiler.trace import Trace, TraceError

WORKERS = 24


def traced(*slow: int, steps: int = 20) -> Trace:
    return synthetic_trace(WORKERS, steps, layers=4, sms=True, slow_sms=slow)


def all_steps(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(trace.num_steps)


def test_in_one_step_an_sm_does_what_its_worker_does() -> None:
    trace = traced(5)
    assert trace.record_sm is not None
    rows = by_sm(sm_times(trace, np.array([3])))
    times = by_worker(Selection(trace, 3, 4))
    own = trace.record_step == 3
    for row in rows:
        (worker,) = np.unique(trace.record_worker[own & (trace.record_sm == row["sm"])])
        # Roles of the next step may begin in this one.
        done = times["computing"][worker] + times["loading"][worker]
        assert row["ns"] == pytest.approx(done, rel=0.02)
    assert sum(row["count"] for row in rows) == rows[0]["of"]
    assert np.mean([row["of_mean"] for row in rows]) == pytest.approx(1)


def test_a_slow_sm_is_named_wherever_workers_run() -> None:
    trace = traced(5)
    facts = summary(trace)
    slow = facts["sms"][5]
    assert slow["sm"] == 5
    assert slow["count"] == max(row["count"] for row in facts["sms"])
    assert slow["equal_work"] == max(row["equal_work"] for row in facts["sms"]) > 1.15
    assert facts["slow_sms"].startswith("SM 5 took ")
    assert "20 steps)" in facts["slow_sms"]
    assert "may be the cause" not in facts["slow_sms"]
    text = "\n".join(format_summary(facts))
    assert "SMs that compute and load longest, means of 20 steps (all 24:" in text
    assert "SM 5 took " in text
    assert "SM 5 took " in format_report(report(trace))


def test_a_slow_pair_is_named_as_one() -> None:
    text = slow_sms(sm_times(traced(8, 9), np.arange(20)))
    assert text.startswith("Both SMs of a TPC (SM 8 and 9) took ")
    # Two slow SMs of different pairs are no pair.
    text = slow_sms(sm_times(traced(9, 10), np.arange(20)))
    assert text.startswith(("SM 9 took", "SM 10 took"))
    assert "and 1 more is slow" in text


def test_equal_sms_and_few_steps_say_nothing() -> None:
    assert slow_sms(sm_times(traced(), np.arange(20))) == ""
    assert slow_sms(sm_times(traced(5), np.arange(STEPS - 1))) == ""
    assert slow_sms(sm_times(traced(5), np.arange(STEPS))) != ""
    assert summary(traced(5))["slow_sms"]
    assert "SM 5" not in summary(traced(5, steps=2))["slow_sms"]


def test_a_worker_that_never_moved_may_be_the_cause() -> None:
    trace = synthetic_trace(WORKERS, 20, layers=4, slow_worker=7)
    still = dataclasses.replace(trace, record_sm=100 + trace.record_worker)
    text = slow_sms(sm_times(still, all_steps(still)))
    assert text.startswith("SM 107 took ")
    assert "worker 7 ran there in all steps, so its instructions may be the cause" in text


def test_traces_without_sms_say_nothing_of_them() -> None:
    trace = synthetic_trace(WORKERS, 8, layers=2, slow_worker=7)
    facts = summary(trace)
    assert facts["sms"] == []
    assert facts["slow_sms"] == ""
    assert "SM" not in "\n".join(format_summary(facts))
    assert trace.record_sm is None
    # Half of them unknown: the known ones are counted.
    sm = np.where(trace.record_worker % 2, trace.record_worker, -1).astype(np.int32)
    half = dataclasses.replace(trace, record_sm=sm)
    assert [row["sm"] for row in by_sm(sm_times(half, all_steps(half)))] == list(
        range(1, WORKERS, 2)
    )


def test_the_file_keeps_sms_and_refuses_impossible_ones(tmp_path: Path) -> None:
    trace = traced(steps=2)
    assert trace.record_sm is not None
    trace.save(tmp_path / "a")
    again = Trace.load(tmp_path / "a")
    assert again.record_sm is not None
    assert (again.record_sm == trace.record_sm).all()
    for wrong in (-2, 1 << 16):
        sm = trace.record_sm.copy()
        sm[3] = wrong
        dataclasses.replace(trace, record_sm=sm).save(tmp_path / "b")
        with pytest.raises(TraceError, match=f"record.sm is {wrong} at 3"):
            Trace.load(tmp_path / "b")
