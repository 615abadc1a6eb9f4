"""Steps in which sequences decode stay within a time, and prompts are read all the same."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_runs import make_engine, run_all
from toy_runner import ToyRunner

from megavm import LLM
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.pace import FEWEST_PROMPT_ROWS, StepPace
from megavm.scheduler.engine.sequence import Delta
from megavm.scheduler.engine.step import Plan, Step, power_of_two
from megavm.vm.target import TARGETS

FIXED, PER_ROW, COMPILING = 1e-3, 20e-6, 2.0  # seconds


class Clock:
    """A clock that only the machine moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(ToyRunner):
    """A toy whose steps take longer with more padded rows; the first of a size compiles."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self.clock = clock
        self.took: list[tuple[int, int, float]] = []  # rows, rows that decode, seconds
        self._known: set[int] = set()

    def run(self, step: Step, steps: int = 1, started: Any = None) -> None:
        rows = step.num_rows
        size = 1 << (rows - 1).bit_length()
        seconds = steps * (FIXED + PER_ROW * size)
        compiles = size not in self._known
        self._known.add(size)
        self.clock.now += seconds + COMPILING * compiles
        self.machine_seconds += seconds
        counts = np.unique(step.row_sequence, return_counts=True)[1]
        self.took.append((rows, int((counts == 1).sum()), seconds))
        super().run(step, steps, started)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def mixed_steps(clock: Clock, limit: float | None, overlap: bool) -> list[tuple[int, float]]:
    """(rows, seconds) of the steps that read long prompts while two sequences decode."""
    runner = TimedRunner(
        clock,
        max_num_seqs=4,
        max_model_len=1000,
        max_num_batched_tokens=256,
        num_blocks=1000,
        max_logit_rows=8,
    )
    engine = make_engine(runner, overlap=overlap, tpot_limit=limit, prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    answers = [engine.add(np.array([3, 4, 5]), params) for _ in range(2)]
    for _ in range(4):
        engine.step()
    for length in (700, 500):
        engine.add(np.arange(length) % 40, SamplingParams(temperature=0.0, max_tokens=2))
    results = run_all(engine)
    assert all(len(results[a.id, 0].token_ids) > 90 for a in answers)
    return [(rows, took) for rows, decoding, took in runner.took if rows > decoding >= 2]


def test_steps_that_decode_stay_within_the_limit(clock: Clock, overlap: bool) -> None:
    limit = FIXED + PER_ROW * 75
    steps = mixed_steps(clock, limit, overlap)
    assert sum(rows for rows, _ in steps) > 1100
    assert max(took for _, took in steps) <= limit
    # The largest size that fits, 64, does most of the work: the pace was learned.
    assert sum(rows for rows, _ in steps if rows > 32) > 900


def test_without_a_limit_prompts_fill_the_step(clock: Clock) -> None:
    steps = mixed_steps(clock, None, overlap=False)
    assert max(rows for rows, _ in steps) == 256


def test_a_limit_that_cannot_be_kept_leaves_prompts_a_few_rows(clock: Clock) -> None:
    steps = mixed_steps(clock, FIXED / 10, overlap=False)
    # As many as the program of the fewest has.
    assert {rows for rows, _ in steps[:-2]} == {2 * FEWEST_PROMPT_ROWS}


def test_the_first_step_of_a_size_does_not_count() -> None:
    pace = StepPace(1.0)
    pace.note(64, 30.0)
    assert pace.expected(64) == 0.0
    for seconds in (0.2, 0.9, 0.3):
        pace.note(50, seconds)
    assert pace.expected(64) == 0.3
    assert pace.expected(300) == pytest.approx(0.3 * 8)
    assert pace.most_rows(40, 4096) == 128
    assert pace.most_rows(10, 4096) == 32  # not known yet
    for _ in range(2):
        pace.note(32, 0.2)
    for _ in range(2):
        pace.note(128, 0.4)  # hardly more: on the line, 256 rows take 0.6 and 512 take 1.0
    assert pace.expected(256) == pytest.approx(0.6)
    assert pace.most_rows(10, 4096) == 256


def test_sizes_are_those_of_buckets() -> None:
    pace = StepPace(1.0)
    for rows, seconds in ((512, 0.4), (600, 0.55), (768, 0.6), (1000, 0.8), (1024, 0.8)):
        pace.note(rows, seconds)
    assert [pace.expected(rows) for rows in (512, 513, 768, 769)] == [0.0, 0.6, 0.6, 0.8]
    for _ in range(2):
        pace.note(512, 0.4)
    # 1,536 rows are expected to take 1.2 s.
    assert pace.most_rows(500, 4096) == 1024


def test_a_launch_takes_about_as_long_as_it_should() -> None:
    pace = StepPace(launch=0.005)
    assert pace.most_rows(1, 4096) == 4096
    assert pace.most_steps(8, 8) == 8  # not known yet
    for rows, seconds in ((8, 0.0008), (1, 0.0035), (4, 0.1), (256, 0.003), (64, 0.0057)):
        for _ in range(2):
            pace.note(rows, seconds)
    assert pace.most_steps(8, 8) == 6
    assert pace.most_steps(8, 3) == 3
    assert pace.most_steps(1, 8) == 1
    assert pace.most_steps(4, 8) == 1  # one step takes too long
    # The host collects the tokens of 256 sequences in 1.5 ms, whatever their number.
    assert pace.most_steps(256, 32) == 9
    assert pace.most_steps(64, 8) == 1


def test_a_request_that_comes_waits_for_short_launches(clock: Clock, overlap: bool) -> None:
    def steps_of_launches(limit: float | None) -> list[int]:
        runner = TimedRunner(clock, max_model_len=1000, num_blocks=1000)
        engine = make_engine(
            runner, overlap=overlap, steps_per_launch=8, launch_limit=limit, prefix_caching=False
        )
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        request = engine.add(np.array([3, 4, 5]), params)
        assert len(run_all(engine)[request.id, 0].token_ids) == 100
        step = FIXED + PER_ROW
        return [round(took / step) for rows, _, took in runner.took if rows == 1]

    assert set(steps_of_launches(None)[:-1]) == {8}
    # Nothing is known of the first two or three.
    assert set(steps_of_launches(2.9 * FIXED)[3:-1]) == {3}


def test_a_host_that_is_slower_than_launches_does_not_make_them_shorter(clock: Clock) -> None:
    """A launch ends for the host when it has begun the next: that time says nothing of steps."""
    runner = TimedRunner(clock, max_model_len=1000, num_blocks=1000, queues=True)
    engine = make_engine(runner, steps_per_launch=8, launch_limit=2.9 * FIXED, prefix_caching=False)
    collect = engine.collect

    def slowly(plan: Plan) -> list[Delta]:
        clock.now += 20 * FIXED
        return collect(plan)

    engine.collect = slowly  # type: ignore[method-assign]
    engine.add(
        np.array([3, 4, 5]), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    )
    run_all(engine)
    steps = [round(took / (FIXED + PER_ROW)) for rows, _, took in runner.took if rows == 1]
    assert set(steps[5:-2]) == {8}


def test_a_launch_is_longer_where_the_host_was_seen_to_need_longer() -> None:
    pace = StepPace(launch=0.005)
    for _ in range(3):
        pace.note(8, 0.001)
    assert pace.most_steps(8, 32) == 5
    for _ in range(2):
        pace.note_launch(0.05, machine=0.005)
    assert pace.most_steps(8, 32) == 5, "they may have waited for a program"
    pace.note_launch(0.012, machine=0.005)
    pace.note_launch(0.0051, machine=0.005)
    assert pace.most_steps(8, 32) == 12
    for _ in range(9):
        pace.note_launch(0.012, machine=0.0118)
    assert pace.most_steps(8, 32) == 5


def test_a_size_that_has_not_run_takes_at_most_as_long_as_a_larger_one() -> None:
    pace = StepPace(launch=0.005)
    for _ in range(2):
        pace.note(64, 0.0025)
    assert pace.most_steps(20, 8) == 2
    assert pace.expected(20) == 0.0


def test_rows_that_have_ended_count_as_rows_of_the_step_that_ran_them(clock: Clock) -> None:
    runner = TimedRunner(
        clock, max_num_seqs=8, max_model_len=100, num_blocks=400, max_logit_rows=8, queues=True
    )
    engine = make_engine(runner, steps_per_launch=4, prefix_caching=False)
    noted: list[tuple[int, float]] = []
    engine.planner.pace.note = lambda *of: noted.append(of)  # type: ignore[method-assign]
    for length in (4, 4, 4, 30):
        engine.add(
            np.array([3, 4, 5]), SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        )
    run_all(engine)
    assert all(took == pytest.approx(FIXED + PER_ROW * power_of_two(n)) for n, took in noted)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_is_a_positive_time(limit: float) -> None:
    with pytest.raises(ValueError, match="time limit of a step is"):
        StepPace(limit)
    with pytest.raises(ValueError, match="time limit of a launch is"):
        StepPace(launch=limit)


def test_a_number_of_steps_that_was_asked_for_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = TARGETS["cuda"]
    assert gpu.launch_seconds is not None
    target = replace(TARGETS["cpu"], steps_per_launch=8, launch_seconds=gpu.launch_seconds)
    monkeypatch.setitem(TARGETS, "cpu", target)
    for given, launch, most in ((None, gpu.launch_seconds, 8), (3, None, 3)):
        with LLM("stories", machine="cpu", workers=1, steps_per_launch=given) as llm:
            planner = llm.engine.planner
            assert (planner.pace.launch, planner.steps_per_launch) == (launch, most)
