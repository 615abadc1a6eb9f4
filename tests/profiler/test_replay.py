"""Replays: nothing changed gives the recorded step, and changes give what really happens."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import record, record_ring, ring
from simulator import Machine, Task, changed, layered, simulate, step_time
from synthetic import like_a_gpu, synthetic_trace

from megavm.profiler.replay import Change, Replay
from megavm.profiler.trace import Trace, TraceError
from megavm.vm.config import NUM_PAGES

# Name, ns to compute, pages to load, whether the results are words.
PRODUCTS = (
    ("qkv", 2500, 0, True),
    ("attention", 2000, 0, False),
    ("o_proj", 1500, 0, True),
    ("gate_up", 3000, 0, True),
    ("down_proj", 1500, 0, False),
)
STREAMING = (
    ("qkv", 1500, 6, True),
    ("attention", 2000, 0, False),
    ("o_proj", 1200, 4, True),
    ("gate_up", 4000, 16, True),
    ("down_proj", 2400, 8, False),
)


def replayed(trace: Trace, *changes: Change) -> float:
    return float(Replay(trace, 0).run([changes]).step[0])


@pytest.mark.parametrize(
    "trace",
    [
        synthetic_trace(workers=6, steps=4, layers=3),
        synthetic_trace(workers=6, steps=4, layers=3, slow_worker=2),
        like_a_gpu(synthetic_trace(workers=6, steps=4, layers=3)),
        record_ring(),
        record_ring(tagged=True),
        record(ring(2, 10), launches=2, steps=30).trace(),
    ],
    ids=["synthetic", "slow worker", "like a GPU's", "ring", "tagged ring", "many steps"],
)
def test_nothing_changed_takes_the_recorded_time(trace: Trace) -> None:
    for step in range(trace.num_steps):
        replay = Replay(trace, step)
        assert replay.run([()]).step[0] == pytest.approx(replay.recorded, rel=0.01)


def test_the_simulator_is_replayed_exactly() -> None:
    for phases in (PRODUCTS, STREAMING):
        machine = layered(5, 3, phases)
        # The step begins with the first event, after the worker's first turn.
        assert replayed(simulate(machine)) == pytest.approx(
            step_time(machine), abs=machine.turn + 2
        )


def _error(machine: Machine, what: str, of: str, factor: float) -> float:
    """Predicted less true time, as a part of the time without the change."""
    truth = step_time(changed(machine, what, of, factor))
    return (replayed(simulate(machine), Change(what, of, factor)) - truth) / step_time(machine)


CHANGES = [
    ("computing", "", 0.5),
    ("computing", "layers.*.gate_up", 0.0),
    ("computing", "layers.*.gate_up", 2.0),
    ("latency", "", 0.0),
    ("latency", "", 2.0),
    ("wait", "layers.*.attention barrier", 0.0),
    ("wait", "layers.*.o_proj words", 0.0),
    ("worker", "1", 0.5),
    ("worker", "1", 2.0),
    ("switching", "", 0.0),
    ("storing", "", 10.0),
]
BYTES = [
    *(("bytes", "layers.*.gate_up", factor) for factor in (0.0, 0.5, 2.0)),
    ("bytes", "", 0.5),
    ("bytes", "layers.*.o_proj", 3.0),
]


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(2, 9),
    layers=st.integers(1, 4),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 0.2, 0.7]),
    hop=st.sampled_from([100.0, 700.0, 3000.0]),
    change=st.sampled_from(CHANGES),
)
def test_changes_of_what_was_seen_are_predicted(
    workers: int, layers: int, seed: int, spread: float, hop: float, change: tuple[str, str, float]
) -> None:
    """Without loads a trace has every time that the step consists of."""
    machine = layered(workers, layers, PRODUCTS, seed, spread, hop=hop)
    # The simulator's stores, 90 ns each, take as long as before; those of the replay do not.
    assert abs(_error(machine, *change)) < 0.05


def test_changes_of_a_machine_that_streams_are_predicted() -> None:
    """What loads hide was not seen: it is estimated from where they hide nothing."""
    errors = {
        (page, ring, *change): _error(
            layered(8, 4, STREAMING, seed=3, page=page, ring=ring), *change
        )
        # Bound by computing, by neither, by the memory.
        for page in (100.0, 400.0, 900.0)
        for ring in (4, 8, 16)
        for change in [*CHANGES[1:], *BYTES, ("loading", "", 0.5), ("loading", "", 2.0)]
    }
    sizes = np.abs(list(errors.values()))
    assert sizes.mean() < 0.01, errors
    assert sizes.max() < 0.09, errors


def with_shared_memory(page: float, ring: int) -> Machine:
    """Workers that share a memory, which brings a page to each in ``page`` ns."""
    phases = [
        *(("qkv", 1300.0, 6, True), ("attention", 1500.0, 0, True), ("o_proj", 800.0, 4, True)),
        *(("gate_up", 5000.0, 31, True), ("down_proj", 2500.0, 16, True)),
    ]
    return layered(24, 2, phases, 3, 0.08, page=page, ring=ring, burst=3.0, hop=1200.0, stray=600.0)


def test_changes_of_workers_that_share_a_memory_are_predicted() -> None:
    """The memory serves some workers faster than others: the phase says what they all wait for."""
    changes = [("loading", "", 0.5), ("loading", "", 2.0), ("computing", "", 2.0), *BYTES]
    errors: dict[tuple[object, ...], float] = {}
    # Bound by computing, by the memory, by both.
    for page, pages in itertools.product((300.0, 480.0, 700.0), (4, 8)):
        machine = with_shared_memory(page, pages)
        errors |= {(page, pages, *change): _error(machine, *change) for change in changes}
    sizes = np.abs(list(errors.values()))
    assert sizes.mean() < 0.01, errors
    assert sizes.max() < 0.03, errors


def test_twice_the_bandwidth_helps_steps_that_are_near_it() -> None:
    for example in ("llama-1b-h200", "llama-1b-batch-8-h200"):
        trace = Trace.load(Path(__file__).parents[2] / "examples" / f"{example}.megatrace")
        saved = []
        for step in range(trace.num_steps):
            replay = Replay(trace, step)
            of = ["", "lm_head"]
            found = replay.run([(Change("loading", name, 0.5),) for name in of])
            saved.append(1 - found.step / replay.recorded)
        # Loading is 61 % and 44 % of their critical paths, that of lm_head a quarter of it.
        assert np.min(saved) > 0.07
        assert np.ptp(saved, axis=0).max() < 0.02


def without_ring(trace: Trace) -> Trace:
    """The trace as older ones are: it does not say how many pages a ring has."""
    facts = {k: v for k, v in trace.programs[0].facts.items() if k not in ("pages", "early_pages")}
    return dataclasses.replace(
        trace, programs=(dataclasses.replace(trace.programs[0], facts=facts),)
    )


@pytest.mark.parametrize("page", [100.0, 400.0, 900.0])
def test_shorter_and_longer_rings_are_predicted(page: float) -> None:
    for recorded, pages in itertools.product((4, 8), (2, 3, 4, 6, 8, 16)):
        machine = layered(8, 4, STREAMING, seed=3, page=page, ring=recorded)
        truth = step_time(dataclasses.replace(machine, ring=pages))
        found = replayed(simulate(machine), Change("ring", "", pages / recorded))
        assert abs(found - truth) < 0.045 * step_time(machine), (recorded, pages)


@pytest.mark.parametrize("page", [100.0, 400.0, 900.0])
def test_rings_of_older_traces_are_predicted(page: float) -> None:
    """A trace that does not say how many pages a ring has shows how far its loaders were ahead."""
    for recorded, pages in itertools.product((4, 8), (2, 3, 4, 6, 8, 16)):
        machine = layered(8, 4, STREAMING, seed=3, page=page, ring=recorded)
        replay = Replay(without_ring(simulate(machine)), 0)
        # A loader that never filled its ring does not show how long it is.
        assert 0 < replay.ring_pages <= recorded
        truth = step_time(dataclasses.replace(machine, ring=pages))
        found = replay.run([(Change("ring", "", pages / replay.ring_pages),)]).step[0]
        assert abs(found - truth) < 0.06 * step_time(machine), (recorded, pages)


@pytest.mark.parametrize("page", [300.0, 480.0, 700.0])
def test_what_other_rings_bring_is_predicted(page: float) -> None:
    """From short rings, with which the memory waits for free places, to long ones and back."""
    for recorded, pages in itertools.permutations((4, 6, 8, 10, 16), 2):
        machine = with_shared_memory(page, recorded)
        truth = step_time(dataclasses.replace(machine, ring=pages)) / step_time(machine) - 1
        replay = Replay(simulate(machine), 0)
        found = replay.run([(Change("ring", "", pages / recorded),)]).step[0] / replay.recorded - 1
        assert found == pytest.approx(truth, rel=0.15, abs=0.011), (recorded, pages)


@pytest.mark.parametrize("way", [300.0, 900.0])
def test_rings_are_predicted_where_pages_queue_in_the_memory(way: float) -> None:
    """Loaders ask for five pages at once: how long each takes then is the queue, not its way."""
    rings, errors = (4, 6, 8, 10, 16), {}
    for page in (300.0, 480.0, 700.0):
        machines = {
            ring: dataclasses.replace(with_shared_memory(page, ring), copies=5, way=way)
            for ring in rings
        }
        times = {ring: step_time(machine) for ring, machine in machines.items()}
        for recorded, machine in machines.items():
            replay = Replay(simulate(machine), 0)
            found = replay.run([(Change("ring", "", pages / recorded),) for pages in rings]).step
            for pages, step in zip(rings, found.tolist(), strict=True):
                effect = times[pages] / times[recorded] - 1
                errors[page, recorded, pages] = step / replay.recorded - 1 - effect
    sizes = np.abs([e for (_, recorded, pages), e in errors.items() if recorded != pages])
    assert sizes.mean() < 0.011, errors
    assert sizes.max() < 0.04, errors


def test_loads_that_wait_for_barriers_may_do_without() -> None:
    machine = layered(8, 4, [(*phase[:3], False) for phase in STREAMING], seed=3, hop=2200.0)

    def late(task: Task) -> Task:
        attends = "attention" in task.label
        return dataclasses.replace(task, pages=8, late=True) if attends else task

    queues = tuple(tuple(map(late, queue)) for queue in machine.queues)
    machine = dataclasses.replace(machine, queues=queues)
    trace = simulate(machine)
    assert Replay(trace, 0).late_loads == ("layers.*.attention loads",)
    early = tuple(tuple(dataclasses.replace(t, late=False) for t in q) for q in queues)
    truth = step_time(dataclasses.replace(machine, queues=early)) / step_time(machine) - 1
    assert truth < -0.03
    found = (
        replayed(trace, Change("wait", "layers.*.attention loads", 0.0)) / step_time(machine) - 1
    )
    assert found == pytest.approx(truth, rel=0.15)


def test_rings_of_a_gpu_are_predicted() -> None:
    """The shipped trace against what techniques_cuda.py measured with shorter rings."""
    root = Path(__file__).parents[2]
    trace = Trace.load(root / "examples" / "llama-1b-h200.megatrace")
    results = json.loads((root / "benchmarks/results/techniques_cuda.json").read_text())["results"]
    measured = {
        int(r["name"].split()[0]): r["ratio"] for r in results if r["technique"] == "ring of pages"
    }
    assert measured.keys() == {4, 6, 8, 10}
    for step in range(trace.num_steps):
        replay = Replay(trace, step)
        assert replay.ring_pages == NUM_PAGES
        for pages, ratio in measured.items():
            change = Change("ring", "", pages / NUM_PAGES)
            assert replay.run([(change,)]).step[0] / replay.recorded == pytest.approx(
                ratio, abs=0.01
            )


@pytest.mark.parametrize(("example", "batch"), [("llama-1b", 1), ("llama-1b-batch-8", 8)])
def test_the_memory_of_another_gpu_is_predicted(example: str, batch: int) -> None:
    """What a step of an H200 would take with the bandwidth of an H100, which was measured."""
    root = Path(__file__).parents[2]

    def measured(name: str) -> tuple[float, float]:
        results = json.loads((root / "benchmarks/results" / f"{name}.json").read_text())
        steps = {(r["kind"], r["what"]): r["us"] for r in results["results"]}
        return steps["decode", batch], results["bandwidth"]

    (fast, most), (slow, less) = (
        measured("throughput_cuda_1b_1"),
        measured("throughput_cuda_1b_h100"),
    )
    effect = slow / fast - 1
    assert effect > 0.2
    trace = Trace.load(root / "examples" / f"{example}-h200.megatrace")
    for step in range(trace.num_steps):
        replay = Replay(trace, step)
        found = replay.run([(Change("loading", "", most / less),)]).step[0] / replay.recorded - 1
        assert found == pytest.approx(effect, rel=0.11)


def test_a_phase_is_evened_out() -> None:
    machine = layered(6, 2, PRODUCTS, spread=0.0)
    slow = [tuple(dataclasses.replace(t, work=3 * t.work) for t in machine.queues[0])]
    uneven = dataclasses.replace(machine, queues=(*slow, *machine.queues[1:]))
    even = dataclasses.replace(
        machine,
        queues=tuple(
            tuple(dataclasses.replace(t, work=t.work * 8 / 6) for t in q) for q in machine.queues
        ),
    )
    assert replayed(simulate(uneven), Change("balance", "", 0.0)) == pytest.approx(
        step_time(even), rel=0.02
    )


def test_a_barrier_that_needs_some_of_its_signals_waits_for_those() -> None:
    first = Task("layers.0.early", 1000.0, 0)
    late = Task("layers.0.late", 5000.0, 0)
    last = Task("layers.0.last", 1000.0, 1, (0,))
    trace = simulate(Machine(((first, last), (late,)), (False, False)))
    target = trace.programs[0].channel_target
    target[0] = 1
    # The simulator knows no targets: what was recorded is later than need be.
    assert replayed(trace) == Replay(trace, 0).recorded


def test_several_changes_act_together() -> None:
    machine = layered(6, 3, PRODUCTS, hop=2000.0)
    both = changed(changed(machine, "latency", "", 0.5), "computing", "layers.*.qkv", 0.5)
    changes = Change("latency", "", 0.5), Change("computing", "layers.*.qkv", 0.5)
    assert replayed(simulate(machine), *changes) == pytest.approx(step_time(both), rel=0.03)


def test_no_step_is_shorter_than_its_bytes_take() -> None:
    trace = synthetic_trace(workers=8, steps=3, layers=2)
    machine = {**trace.machine, "bandwidth": trace.machine["bandwidth"] / 1.3}
    slow = dataclasses.replace(trace, machine=machine)
    own = slice(*slow.step_offsets[:2].tolist())
    needed = slow.of_instruction("load_bytes")[own].sum() / machine["bandwidth"] * 1e9
    replay = Replay(slow, 0)
    everything = [Change("computing", "", 0.0), Change("latency", "", 0.0)]
    found = replay.run([everything, [*everything, Change("loading", "", 0.5)]])
    assert found.step[0] == pytest.approx(needed) == found.floor[0]
    assert found.floor[1] == pytest.approx(needed / 2)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(TraceError, match="does not say which worker"):
        Replay(
            dataclasses.replace(t := synthetic_trace(), record_worker=t.record_worker * 0 - 1), 0
        )
    trace = simulate(layered(2, 1, PRODUCTS))
    trace.programs[0].waits[0, 1] = trace.programs[0].waits[-1, 1]
    with pytest.raises(TraceError, match="circle"):
        Replay(trace, 0)
    with pytest.raises(TraceError, match="no 'nothing' to change the computing of"):
        replayed(simulate(layered(2, 1, PRODUCTS)), Change("computing", "nothing", 0.5))
    with pytest.raises(TraceError, match="a change is of computing"):
        replayed(simulate(layered(2, 1, PRODUCTS)), Change("luck", "", 0.5))


def test_many_scenarios_are_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(simulate(layered(3, 2, STREAMING)), 0)
    scenarios = [[Change("latency", "", f)] for f in (0.0, 0.3, 1.0, 2.5)]
    together = replay.run(scenarios).step
    monkeypatch.setattr("megavm.profiler.replay._CELLS", 1)
    assert np.array_equal(replay.run(scenarios).step, together)
