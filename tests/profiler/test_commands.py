"""`megavm profile` and `megavm trace`: what they print, write and refuse."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from synthetic import synthetic_trace

from megavm import cli
from megavm.profiler.trace import Trace


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "a.megatrace"
    synthetic_trace(workers=3, steps=4, layers=2).save(path)
    return str(path)


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def test_profile_writes_a_trace_and_says_what_tracing_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.megatrace"
    options = ("--machine", "cpu", "--workers", "2", "--max-tokens", "8", "-o", str(path))
    result = run(capsys, "profile", "stories", *options)
    assert result.code == 0, result.err
    assert f"{path}: 8 steps" in result.out
    # With eight tokens the noise may be larger than the cost.
    assert ("times as long" in result.out) == (Trace.load(path).notes["ratio"] >= 1)
    assert "A step takes" in result.out
    trace = Trace.load(path)
    assert trace.num_steps == 8
    assert trace.step_tokens[0] > 1
    assert trace.step_number.tolist() == list(range(8))
    assert trace.machine["bandwidth"] >= trace.machine["bandwidth_median"] > 1e8
    assert trace.machine["flops_per_second"] >= trace.machine["flops_per_second_median"] > 1e8
    assert trace.notes["ratio"] > 0


@pytest.mark.parametrize(
    ("rates", "said", "unsaid"),
    [
        ((50, 150, 50), "its cost is within the noise of this machine", "times as long"),
        ((100, 50, 100), "10.000 ms without: 2.000 times as long", "noise"),
    ],
)
def test_profile_does_not_say_that_tracing_makes_tokens_faster(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rates: tuple[int, ...],
    said: str,
    unsaid: str,
) -> None:
    times = iter(1e3 / rate for rate in rates)
    monkeypatch.setattr("megavm.commands.profile._milliseconds", lambda *_: next(times))
    monkeypatch.setattr("megavm.profiler.environment.measure_ceilings", lambda machine: {})
    monkeypatch.setattr(
        "megavm.profiler.recorder.Recorder.trace",
        lambda recorder: synthetic_trace(workers=1, steps=1, layers=1),
    )
    path = tmp_path / "run.megatrace"
    options = ("--machine", "cpu", "--workers", "1", "--max-tokens", "1", "-o", str(path))
    result = run(capsys, "profile", "stories", *options)
    assert said in result.out
    assert unsaid not in result.out
    assert f"{path}: 1 step, 7 records, " in result.out


def test_profile_keeps_the_last_steps_and_takes_a_context(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.megatrace"
    options = ("--machine", "cpu", "--workers", "1", "--max-tokens", "6", "--keep", "2")
    result = run(
        capsys, "profile", "stories", *options, "--context", "40", "--json", "-o", str(path)
    )
    facts = json.loads(result.out)
    assert (facts["steps"], facts["file"]) == (2, str(path))
    assert Trace.load(path).step_tokens.tolist() == [1, 1]


def test_profile_of_one_token_has_no_ratio(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.megatrace"
    options = ("--machine", "cpu", "--max-tokens", "1", "--prompt-ids", "5,6,7", "-o", str(path))
    result = run(capsys, "profile", "stories", *options)
    assert result.code == 0
    assert "times as long" not in result.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("profile", "stories", "text", "--context", "5"), "give one of PROMPT"),
        (("profile", "stories", "--machine", "reference"), "'reference' does not trace"),
        (("profile", "stories", "--max-tokens", "0"), "max_tokens"),
        (("trace", "report", "missing.megatrace"), "missing.megatrace"),
        (("trace", "export", "missing.megatrace"), "say where to write: -o FILE"),
        (("trace", "html", "missing.megatrace"), "say where to write: -o FILE"),
        (("trace", "nonsense"), "invalid choice"),
        (("trace", "report"), "required: FILE (see megavm trace report --help)"),
        (("trace", "report", "."), "cannot read .: Is a directory"),
        (("trace", "view", __file__), f"{__file__} is not a trace: it is truncated or no"),
        (("trace", "html", __file__, "-o", "page.html"), f"{__file__} is not a trace"),
        (("trace", "what-if", "missing.megatrace", "gate_up"), "is no change: say WHAT=FACTOR"),
        (("trace", "diff", "a", "b", "--fail-above", "much"), "'much' is not a percentage such as"),
        (("trace", "report", "a", "--stop"), "unrecognized arguments: --stop"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    result = run(capsys, *arguments)
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err
    assert len(result.err.splitlines()) == 1


def test_report_prints_tables_or_json(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    assert "Critical path of step" in run(capsys, "trace", "report", saved).out
    facts = json.loads(run(capsys, "trace", "report", saved, "--json").out)
    assert facts["steps"]["count"] == 4
    assert len(facts["workers"]) == 3
    assert facts["bandwidth"]["streamed"] > 0
    one = json.loads(run(capsys, "trace", "report", saved, "--step", "2", "--json").out)
    assert (one["steps"]["count"], one["critical_path"]["step"]) == (1, 2)
    assert "step 7 is not in the trace" in run(capsys, "trace", "report", saved, "--step", "7").err


def test_what_if_prints_a_table_a_prediction_or_json(
    capsys: pytest.CaptureFixture[str], saved: str
) -> None:
    table = run(capsys, "trace", "what-if", saved)
    assert "gate_up computes in half the time" in table.out
    changes = ("computing:gate_up=0.5", "latency=2")
    one = run(capsys, "trace", "what-if", saved, *changes, "--step", "2")
    assert "step 2 took" in one.out
    assert "gate_up computes in half the time, all exchanges take 2 times the time" in one.out
    for order in ((*changes[:1], "--step", "2", *changes[1:]), ("--step", "2", *changes)):
        assert run(capsys, "trace", "what-if", saved, *order).out == one.out
    facts = json.loads(run(capsys, "trace", "what-if", saved, *changes, "--json").out)
    assert facts["saved_ns"] == facts["replayed_ns"] - facts["ns"]
    assert len(json.loads(run(capsys, "trace", "what-if", saved, "--json").out)["changes"]) > 20


def test_diff_prints_tables_or_json(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    other = str(tmp_path / "b.megatrace")
    synthetic_trace(workers=3, steps=4, layers=2, slower={"gate_up": 2.0}).save(other)
    assert "Critical path of the median step" in run(capsys, "trace", "diff", saved, other).out
    facts = json.loads(run(capsys, "trace", "diff", saved, other, "--json").out)
    assert facts["step"]["ratio"] > 1


def test_diff_fails_above_a_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved, slow, other = (str(tmp_path / f"{name}.megatrace") for name in ("one", "two", "three"))
    synthetic_trace(workers=3, steps=6, layers=2).save(saved)
    synthetic_trace(workers=3, steps=6, layers=2, slower={"gate_up": 2.0}).save(slow)
    failed = run(capsys, "trace", "diff", saved, slow, "--fail-above", "3%")
    assert failed.code == 1
    assert "FAILED: a step of B takes 1." in failed.out
    assert run(capsys, "trace", "diff", slow, saved, "--fail-above", "3%").code == 0
    passed = run(capsys, "trace", "diff", saved, slow, "--fail-above", "900", "--json")
    assert (passed.code, json.loads(passed.out)["failed"]) == (0, False)
    trace = synthetic_trace(workers=3, steps=6, layers=2)
    dataclasses.replace(trace, model={"name": "another"}).save(other)
    refused = run(capsys, "trace", "diff", saved, other, "--fail-above", "3%")
    assert (refused.code, refused.out) == (2, "")
    assert "the models are different: name is synthetic in A and another in B" in refused.err


@pytest.mark.parametrize("format", ["perfetto", "chrome"])
def test_export_writes_the_file(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path, format: str
) -> None:
    path = tmp_path / "out"
    result = run(capsys, "trace", "export", saved, "--format", format, "-o", str(path))
    assert (result.code, result.out) == (0, "")
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("command", ["html", "export"])
def test_a_trace_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], saved: str, command: str
) -> None:
    same = str(Path(saved).parent / "." / Path(saved).name)
    result = run(capsys, "trace", command, saved, "-o", same)
    assert result.code == 2
    assert "would overwrite the trace" in result.err
    assert Trace.load(saved).num_steps == 4


def test_view_and_html_hand_over_to_the_viewer(
    capsys: pytest.CaptureFixture[str], saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    viewer: Any = types.ModuleType("megavm.profiler.viewer")
    viewer.serve = lambda *arguments, compare: calls.append((*arguments, compare))
    viewer.save_html = lambda *arguments, compare: calls.append((*arguments, compare))
    monkeypatch.setitem(sys.modules, "megavm.profiler.viewer", viewer)
    assert run(capsys, "trace", "view", saved, "--port", "8123", "--no-open").code == 0
    assert run(capsys, "trace", "html", saved, "-o", "page.html").code == 0
    other = f"{saved}.other"
    synthetic_trace(workers=1, steps=1, layers=1).save(other)
    assert run(capsys, "trace", "view", saved, "--no-open", other).code == 0
    assert run(capsys, "trace", "html", saved, other, "-o", "page.html").code == 0
    assert calls == [
        (saved, "127.0.0.1", 8123, False, None),
        (saved, "page.html", None),
        (saved, "127.0.0.1", 0, False, other),
        (saved, "page.html", other),
    ]


def test_html_of_two_traces_holds_both(
    capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path
) -> None:
    other, page = tmp_path / "b.megatrace", tmp_path / "page.html"
    synthetic_trace(workers=2, steps=2, layers=1).save(other)
    assert run(capsys, "trace", "html", saved, str(other), "-o", str(page)).code == 0
    text = page.read_text("utf-8")
    assert 'data-name="a.megatrace"' in text
    assert 'data-name="b.megatrace"' in text
    assert "cannot read" in run(capsys, "trace", "view", saved, "missing", "--no-open").err


def test_trace_alone_prints_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "trace")
    assert result.code == 0
    assert all(name in result.out for name in ("report", "diff", "export", "view", "html"))
