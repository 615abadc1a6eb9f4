"""Answers about traces: they cover all time and agree with what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from recording import POSITIONS, record, record_ring, ring
from simulator import Machine, Task, simulate
from synthetic import HOP, LABELS, like_a_gpu, synthetic_trace

from megavm.instructions.matmul import Matmul
from megavm.profiler.analysis import (
    STATES,
    Selection,
    arithmetic,
    balance,
    bandwidth,
    by_kind,
    by_role,
    by_worker,
    gaps,
    states,
    waits,
)
from megavm.profiler.critical_path import PARTS, critical_path
from megavm.profiler.diff import diff, format_diff, judge, slower
from megavm.profiler.recorder import Recorder
from megavm.profiler.report import format_report, report
from megavm.profiler.trace import Trace, TraceError
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Wait
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec

WORKERS, ROUNDS, SIZE = 2, 6, 768


def products() -> Program:
    """Rounds of matrix products, one per worker; each round waits for all of the round before."""
    tensors = [TensorSpec("x", (1, SIZE), F32, TensorKind.STATE)]
    instructions = []
    for i in range(ROUNDS):
        weight, out = len(tensors), len(tensors) + 1
        tensors += [
            TensorSpec(f"weight{i}", (WORKERS * SIZE, SIZE), F32, TensorKind.WEIGHT),
            TensorSpec(f"out{i}", (1, WORKERS * SIZE), F32, TensorKind.ACTIVATION),
        ]
        for w in range(WORKERS):
            instructions.append(
                Matmul(
                    x=0, weight=weight, out=out, row_begin=0, row_end=1, column_begin=w * SIZE,
                    column_end=(w + 1) * SIZE, x_rows=1, tile=0, part=0, part_k=SIZE,
                    eps=0.0, signal=i,
                    waits=[Wait(i - 1, WORKERS) if i else Wait(ROUNDS - 1, 0)],
                )
            )  # fmt: skip
    numbers = np.arange(len(instructions))
    return Program.build(
        tensors,
        instructions,
        [numbers[numbers % WORKERS == w].tolist() for w in range(WORKERS)],
        barriers=[f"round{i}" for i in range(ROUNDS)],
        labels=[f"layers.{i // WORKERS}.product" for i in numbers],
    )


def run_products(launches: int, steps: int) -> tuple[Trace, float]:
    """A trace, and the seconds that its launches took."""
    program, memory = products(), Memory()
    memory.allocate(program.tensors)
    executable = CpuMachine(trace=True).load(program, memory)
    executable.run(20)
    executable.trace()
    recorder = Recorder()
    seconds = 0.0
    for _ in range(launches):
        begin = time.perf_counter()
        executable.run(steps)
        seconds += time.perf_counter() - begin
        recorder.add(executable, POSITIONS, rows=1)
    return recorder.trace(), seconds


TRACES: dict[str, Callable[[], Trace]] = {
    "synthetic": lambda: synthetic_trace(workers=6, steps=5, layers=3),
    "like a GPU's": lambda: like_a_gpu(synthetic_trace(workers=6, steps=5, layers=3)),
    "ring": record_ring,
    "tagged ring": lambda: record_ring(tagged=True),
    "dynamic ring": lambda: record_ring(dynamic=True),
    "launches of many steps": lambda: record(ring(2, 10), launches=2, steps=30).trace(),
    "products": lambda: run_products(2, 10)[0],
}


@pytest.fixture(params=TRACES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return TRACES[request.param]()


def selections(trace: Trace) -> list[Selection]:
    numbers = trace.step_number[[0, trace.num_steps // 2, -1]].tolist()
    return [Selection.of(trace), *(Selection.of(trace, n) for n in numbers)]


def test_what_a_worker_does_covers_all_of_its_time(trace: Trace) -> None:
    for selection in selections(trace):
        time = by_worker(selection)
        assert tuple(sorted(time)) == tuple(sorted(STATES))
        total = np.sum(list(time.values()), axis=0)
        assert (total >= 0.99 * selection.busy).all()
        assert (total <= 1.01 * selection.busy + 1).all()
        assert all((values >= 0).all() for values in time.values())


def test_spans_of_a_worker_cover_its_time() -> None:
    """What is idle, because no span is there, left out."""
    trace, _ = run_products(launches=2, steps=50)
    steps = [Selection.of(trace, number) for number in trace.step_number.tolist()]
    idle = [by_worker(step)["idle"] / step.busy for step in steps]
    assert (np.median(idle, axis=0) <= 0.01).all()


def test_the_states_of_a_record_are_its_time(trace: Trace) -> None:
    total = sum(vars(states(trace.spans)).values())
    assert (total == trace.spans.left - trace.spans.begin).all()


def test_steps_follow_each_other_and_gaps_are_what_is_between(trace: Trace) -> None:
    selection = Selection.of(trace)
    assert (trace.step_begin <= trace.step_end).all()
    assert (gaps(selection) >= 0).all()
    whole = int(trace.step_end[-1] - trace.step_begin[0])
    assert selection.busy + int(gaps(selection).sum()) == whole


def test_kinds_and_roles_count_every_record_once(trace: Trace) -> None:
    selection = Selection.of(trace)
    kinds = by_kind(selection)
    assert sum(row["count"] for row in kinds) == trace.num_records
    spans = trace.spans
    assert sum(row["total"] for row in kinds) == int((spans.left - spans.begin).sum())
    assert by_role(selection)["consumer"] == int((spans.left - spans.begin).sum())
    for row in kinds:
        parts = sum(row[part] for part in ("computing", "loading", "barrier", "words"))
        assert parts == row["total"]


def test_the_critical_path_is_as_long_as_the_step(trace: Trace) -> None:
    for step in range(trace.num_steps):
        path = critical_path(trace, step)
        assert path.length == pytest.approx(path.end - path.begin, rel=0.02)
        for link in path.links:
            assert link.begin <= link.end
            assert sum(link.parts.values()) == link.end - link.begin
            assert tuple(link.parts) == PARTS
        for before, after in itertools.pairwise(path.links):
            assert before.end == after.begin
            assert int(trace.record_cause[after.record]) == before.record


def test_the_critical_path_of_a_ring_goes_round_it() -> None:
    trace = record(ring(3, 4), launches=1, steps=1).trace()
    path = critical_path(trace, 0)
    hops = [int(trace.record_instruction[link.record]) for link in path.links]
    assert hops == list(range(12))
    assert {link.through for link in path.links[1:]} <= {"barrier", "queue"}


def test_roles_of_a_step_have_what_they_do_in_its_time(trace: Trace) -> None:
    """Loaders and controllers that work ahead, for the step after it or for later ones, too."""
    first = np.flatnonzero(trace.record_step == trace.num_steps - 1)
    times = trace.times.copy()
    times[0, first] = times[2, first] = 0
    times[4, first] = np.maximum(times[4, first], times[8, first])
    ahead = dataclasses.replace(trace, times=times)
    steps = [Selection.of(ahead, number) for number in ahead.step_number.tolist()]
    totals = [by_role(step) for step in steps]
    for step, total in zip(steps, totals, strict=True):
        for role, occupied in total.items():
            assert 0 <= occupied <= ahead.workers * step.busy, role
    some = len(np.unique(ahead.record_worker[first]))
    assert totals[0]["controller"] >= some * (steps[0].busy - int(ahead.step_begin[0]))


def test_a_path_through_a_queue_counts_from_when_the_consumers_left_the_cause() -> None:
    trace = like_a_gpu(synthetic_trace(workers=2, steps=1, layers=2))
    own = np.flatnonzero(trace.record_worker == 0)
    cause, channel = trace.record_cause.copy(), trace.record_cause_channel.copy()
    cause[own[1:]], channel[own] = own[:-1], -1
    spans = trace.spans
    assert (spans.end[own[:-1]] > spans.begin[own[1:]]).any()
    only_queue = dataclasses.replace(trace, record_cause=cause, record_cause_channel=channel)
    links = critical_path(only_queue, 0).links
    assert [link.record for link in links] == own.tolist()
    assert [link.begin for link in links[1:]] == spans.left[own[:-1]].tolist()


def test_a_circle_of_causes_is_refused() -> None:
    trace = synthetic_trace(workers=2, steps=1, layers=1)
    cause = np.arange(trace.num_records, dtype=np.int32)
    with pytest.raises(TraceError, match="go in a circle"):
        critical_path(dataclasses.replace(trace, record_cause=cause), 0)


def test_bandwidth_is_bytes_over_the_time_that_was_measured() -> None:
    trace, seconds = run_products(launches=3, steps=100)
    streamed = 300 * ROUNDS * WORKERS * SIZE * SIZE * 4
    found = bandwidth(Selection.of(trace))
    assert found.streamed_bytes == streamed
    assert found.streamed == pytest.approx(streamed / seconds, rel=0.02)


def test_a_weight_that_many_stream_comes_from_memory_once() -> None:
    trace = synthetic_trace(workers=6, steps=3, layers=2)
    found = bandwidth(Selection.of(trace))
    assert found.from_memory == pytest.approx(found.streamed, rel=1e-3)
    (program,) = trace.programs
    tensors = [*program.facts["tensors"]]
    weight = next(i for i, tensor in enumerate(tensors) if tensor[3] == "weight")
    half = int(program.load_bytes.sum()) // 2
    tensors[weight] = ["weights", [half // 2], "BF16", "weight", False]
    smaller = dataclasses.replace(program, facts={**program.facts, "tensors": tensors})
    again = bandwidth(Selection.of(dataclasses.replace(trace, programs=(smaller,))))
    assert again.streamed == found.streamed
    assert again.from_memory == pytest.approx(found.streamed / 2, rel=1e-3)
    kinds = by_kind(Selection.of(dataclasses.replace(trace, programs=(smaller,))))
    assert sum(row["streamed"] for row in kinds) == pytest.approx(
        found.streamed_bytes / 2, rel=1e-3
    )
    # What is not a weight, such as KV blocks, counts each time.
    tensors[weight] = ["k_cache", [half // 2], "BF16", "state", False]
    cache = dataclasses.replace(program, facts={**program.facts, "tensors": tensors})
    assert cache.memory_bytes.tolist() == program.load_bytes.tolist()


def test_arithmetic_is_operations_over_the_time_that_was_measured() -> None:
    trace, seconds = run_products(launches=3, steps=100)
    found = arithmetic(Selection.of(trace))
    whole = int(trace.of_instruction("flops").sum())
    assert whole >= 300 * ROUNDS * WORKERS * 2 * SIZE * SIZE
    assert found.rate == pytest.approx(whole / seconds, rel=0.02)
    assert found.of_ceiling is None


def test_bandwidth_over_time_adds_up_to_all_bytes(trace: Trace) -> None:
    for selection in selections(trace):
        found = bandwidth(selection, bins=77)
        assert len(found.rates) == 77
        total = float(found.rates.sum()) * found.bin / 1e9
        assert total == pytest.approx(found.streamed_bytes, rel=1e-6, abs=1e-3)
        assert (found.rates >= 0).all()


def test_bandwidth_in_a_bin_is_what_is_streamed_in_it() -> None:
    """Against the sum over records, one by one."""
    trace = synthetic_trace(workers=3, steps=2, layers=1)
    found = bandwidth(Selection.of(trace), bins=20)
    spans, streamed = trace.spans, trace.of_instruction("load_bytes")
    for i in range(20):
        begin, end = found.begin + i * found.bin, found.begin + (i + 1) * found.bin
        inside = sum(
            size * max(min(b, end) - max(a, begin), 0) / max(b - a, 1)
            for a, b, size in zip(spans.load_begin, spans.load_end, streamed, strict=True)
        )
        assert found.rates[i] * found.bin / 1e9 == pytest.approx(inside, rel=1e-6, abs=1e-3)


def test_bandwidth_of_times_far_from_zero_is_the_same() -> None:
    trace = synthetic_trace(workers=3, steps=2, layers=1)
    late = 2**60 - 2 - int(trace.times.max())
    later = dataclasses.replace(trace, times=np.where(trace.times < 0, -1, trace.times + late))
    first, second = (bandwidth(Selection.of(t)) for t in (trace, later))
    assert second.begin == first.begin + late
    assert second.rates.tolist() == first.rates.tolist()


def test_waits_name_who_is_waited_for_and_who_came_last() -> None:
    trace = synthetic_trace(workers=6, steps=5, layers=3)
    rows = waits(Selection.of(trace))
    found = {(row.waiting, row.awaited): row for row in rows}
    order = [f"layers.*.{label}" for label in LABELS]
    for before, after in itertools.pairwise(order):
        row = found[after, before]
        assert row.longest >= HOP
        assert 0 <= row.last_worker < 6
        assert row.kind == ("barrier" if before == "layers.*.attention" else "words")
    total = trace.spans.inputs - trace.spans.begin
    assert sum(row.total for row in rows) == int(total.sum())
    each = waits(Selection.of(trace), each_worker=True)
    for worker in range(6):
        own = sum(row.total for row in each if row.worker == worker)
        assert own == int(total[trace.record_worker == worker].sum())


def test_a_wait_is_for_what_came_last_even_if_less_time_passed_after_the_barrier() -> None:
    """Such an instruction waits for a barrier first and then a moment for the words."""
    trace = simulate(
        Machine(
            ((Task("layers.0.early", 1000.0, 0), Task("layers.0.last", 500.0, 2, (0, 1))),
             (Task("layers.0.late", 1400.0, 1), Task("layers.0.last", 500.0, 2, (0, 1)))),
            (False, True, False),
        )
    )  # fmt: skip
    rows = waits(Selection.of(trace))
    # Worker 1 comes to the barrier late enough for all of it to look like a wait for words.
    assert {(row.awaited, row.kind, row.channel) for row in rows} == {
        ("layers.*.late", "words", "group 1")
    }


def test_one_slow_worker_is_seen_in_balance_and_in_waits() -> None:
    trace = synthetic_trace(workers=4, steps=3, layers=2, slow_worker=2)
    uneven = {row.phase: row.imbalance for row in balance(Selection.of(trace))}
    assert all(uneven[f"layers.*.{label}"] > 2 for label in LABELS)
    behind = [row for row in waits(Selection.of(trace)) if row.awaited != "nothing"]
    assert all(row.last_worker == 2 for row in behind if row.awaited != "embed")
    links = critical_path(trace, 1).links
    on_path = [int(trace.record_worker[link.record]) for link in links]
    assert on_path.count(2) > 0.8 * len(links)


def test_a_step_that_is_not_there_is_told() -> None:
    trace = synthetic_trace(workers=2, steps=3, layers=1)
    with pytest.raises(TraceError, match="step 9 is not in the trace: it has 0 to 2"):
        Selection.of(trace, 9)


def test_a_diff_swapped_is_mirrored_and_says_that_models_differ() -> None:
    a = synthetic_trace(workers=3, steps=4, layers=2)
    b = synthetic_trace(workers=4, steps=3, layers=3, seed=1, slower={"qkv": 2.0})
    b = dataclasses.replace(b, model={"name": "another"})
    there, back = diff(a, b), diff(b, a)
    for key in ("kinds", "phases", "labels", "critical_path"):
        mirrored = {row["name"]: row for row in back[key]}
        assert mirrored.keys() == {row["name"] for row in there[key]}
        for row in there[key]:
            other = mirrored[row["name"]]
            assert (row["before"], row["after"]) == (other["after"], other["before"])
            assert row["change"] == -other["change"]
    assert "the models are different" in format_diff(there)
    assert "the number of workers is 3 in A and 4 in B" in format_diff(there)
    assert "different" not in format_diff(diff(a, a))
    with pytest.raises(TraceError, match="name is synthetic in A and another in B: no limit"):
        judge(there, 0.03)


def test_a_limit_fails_beyond_the_noise_alone() -> None:
    """The same program, recorded again, is not slower; a slower phase is."""
    first, again = (synthetic_trace(workers=6, steps=40, layers=2, seed=s) for s in (0, 1))
    slow = synthetic_trace(workers=6, steps=40, layers=2, seed=2, slower={"gate_up": 1.5})
    assert not judge(diff(first, again), 0.0)[0]
    facts = diff(first, slow)
    truth = np.median(slow.step_end - slow.step_begin) / np.median(
        first.step_end - first.step_begin
    )
    assert facts["slower"]["change"] == pytest.approx(truth - 1)
    assert facts["slower"]["least"] < truth - 1 < facts["slower"]["most"]
    failed, sentence = judge(facts, 0.03)
    assert failed
    assert "above the limit of 3.0%" in sentence
    # Between its median and the begin of its noise a change proves nothing.
    between = (facts["slower"]["least"] + facts["slower"]["change"]) / 2
    assert judge(facts, between) == (False, mock.ANY)
    assert "within the noise" in judge(facts, between)[1]
    assert not judge(diff(slow, first), 0.0)[0]


def test_the_interval_of_the_change_holds_it() -> None:
    """Of 400 pairs with a known ratio of medians the interval misses few."""
    random = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        a, b = (np.rint(1e5 * r * random.lognormal(0, 0.1, 25)).astype(int) for r in (1.0, 1.08))
        found = slower(a, b)
        missed += not found["least"] <= 0.08 <= found["most"]
    assert missed < 8
    one = slower(np.array([100]), np.array([110]))
    assert one["least"] == one["change"] == one["most"] == pytest.approx(0.1)


def test_a_report_says_the_same_in_json_and_in_tables(trace: Trace) -> None:
    facts = report(trace)
    text = format_report(facts)
    assert "Critical path" in text
    for row in facts["kinds"]:
        assert row["kind"] in text
    assert max(map(len, text.splitlines())) < 200
    one = report(trace, int(trace.step_number[1]))
    assert one["steps"]["count"] == 1
    assert format_report(one)


def test_a_report_of_unknown_workers_says_so() -> None:
    trace = record_ring(dynamic=True)
    unknown = np.full(trace.num_records, -1, np.int32)
    order = np.lexsort((trace.record_slot, unknown, trace.record_step))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    cause = trace.record_cause[order]
    dynamic = dataclasses.replace(
        trace,
        record_worker=unknown,
        record_slot=trace.record_slot[order],
        record_instruction=trace.record_instruction[order],
        record_cause=np.where(cause >= 0, place[cause], -1).astype(np.int32),
        times=trace.times[:, order],
    )
    assert "not known who executed what" in format_report(report(dynamic))


def test_a_trace_compared_with_itself_has_not_changed(trace: Trace) -> None:
    facts = diff(trace, trace)
    assert facts["step"]["change"] == 0
    for key in ("kinds", "phases", "labels", "critical_path"):
        assert all(row["change"] == 0 for row in facts[key])
    assert len(facts["steps"]) == facts["count"][0]
    assert format_diff(facts)


def test_what_became_slower_is_named_first() -> None:
    before = synthetic_trace(workers=4, steps=6, layers=2, seed=1)
    after = synthetic_trace(workers=4, steps=8, layers=2, seed=1, slower={"down_proj": 3.0})
    facts = diff(before, after)
    assert facts["step"]["change"] > 0
    assert facts["phases"][0]["name"] in ("layers.*.down_proj", "layers.*.qkv")
    assert facts["critical_path"][0]["name"] == "layers.*.down_proj"
    assert facts["critical_path"][0]["ratio"] > 1.5
    assert "down_proj" in format_diff(facts)


def test_steps_of_different_numbers_of_tokens_are_compared_without_a_limit() -> None:
    one, two = (synthetic_trace(workers=2, steps=8, layers=1, seed=seed) for seed in (1, 2))
    more = dataclasses.replace(two, step_tokens=two.step_tokens + 7)
    facts = diff(one, more)
    assert facts["tokens"] == [1, 8]
    assert facts["differences"] == ["the steps are different: they have 1 token in A and 8 in B"]
    assert "compared: steps of 1 token in A, of 8 in B" in format_diff(facts)
    with pytest.raises(TraceError, match=r"the steps are different.*no limit"):
        judge(facts, 0.03)
    # One step in common is enough to compare only such steps.
    more.step_tokens[3] = 1
    assert diff(one, more)["tokens"] == [1, 1]


def test_too_few_steps_are_judged_by_no_limit() -> None:
    few, many = (synthetic_trace(workers=2, steps=n, layers=1) for n in (5, 6))
    with pytest.raises(TraceError, match="5 steps of A and 6 of B do not show their noise"):
        judge(diff(few, many), 0.03)
    assert "the noise over fewer than 6 steps is not known" in format_diff(diff(few, many))
    assert not judge(diff(many, many), 0.03)[0]
