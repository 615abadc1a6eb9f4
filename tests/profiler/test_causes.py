"""Causes: the last predecessor of every record, through its channels or its worker's queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import record, ring

from megavm.instructions.noop import Noop
from megavm.profiler import causes
from megavm.profiler.causes import Executions, find_causes
from megavm.profiler.dependencies import trace_program
from megavm.profiler.trace import TAGGED, TraceProgram
from megavm.vm.isa import Wait
from megavm.vm.program import Program


def executions(
    program: TraceProgram,
    launches: list[int],
    queues: list[list[int]],
    end: Any,
    late: int = 0,
    begin: Any = lambda s, i: -1,
) -> Executions:
    """Records of launches of some steps each, of a program with static queues.

    ``begin`` and ``end`` give those of (step, instruction); signals are ``late`` after the end.
    """
    rows = [
        (step, worker, slot, instruction)
        for step in range(sum(launches))
        for worker, queue in enumerate(queues)
        for slot, instruction in enumerate(queue)
    ]
    step, worker, slot, instruction = np.array(rows, np.int32).T
    stored = np.array([end(s, i) for s, _, _, i in rows], np.int64)
    return Executions(
        programs=(program,),
        step_program=np.zeros(sum(launches), np.int32),
        launch=np.repeat(np.arange(len(launches), dtype=np.int32), launches),
        step=step,
        worker=worker,
        slot=slot,
        instruction=instruction,
        begin=np.array([begin(s, i) for s, _, _, i in rows], np.int64),
        stored=stored,
        signalled=stored + late,
    )


def one_by_one(e: Executions) -> list[tuple[int, int, int]]:
    """(time, cause, channel) of every record, found the slow way; ties as they come."""
    where = {
        (int(s), int(i)): r for r, (s, i) in enumerate(zip(e.step, e.instruction, strict=True))
    }
    found = []
    for r in range(len(e.step)):
        step, program = int(e.step[r]), e.programs[e.step_program[e.step[r]]]
        before = [
            q
            for q in range(len(e.step))
            if e.worker[q] == e.worker[r] >= 0
            and e.launch[e.step[q]] == e.launch[step]
            and (e.step[q], e.slot[q]) < (step, e.slot[r])
        ]
        best = (-1, -1, -1)
        if before:
            last = max(before, key=lambda q: (e.step[q], e.slot[q]))
            best = (int(e.stored[last]), last, -1)
        for instruction, channel, back in program.waits.tolist():
            other = step - back
            if instruction != e.instruction[r] or other < 0 or e.launch[other] != e.launch[step]:
                continue
            begin, end = program.channel_offsets[channel : channel + 2]
            tagged = program.channel_kind[channel] == TAGGED
            times = sorted(
                (
                    int((e.stored if tagged else e.signalled)[where[other, int(p)]]),
                    where[other, int(p)],
                )
                for p in program.channel_producers[begin:end]
            )
            nth = len(times) if tagged else int(program.channel_target[channel])
            if times[nth - 1][0] > best[0]:
                best = (*times[nth - 1], channel)
        found.append(best)
    return found


def check(e: Executions) -> None:
    cause, channel = find_causes(e)
    for r, (time, slow_cause, slow_channel) in enumerate(one_by_one(e)):
        assert (int(cause[r]) < 0) == (slow_cause < 0)
        if slow_cause >= 0 and channel[r] >= 0:
            tagged = e.programs[0].channel_kind[channel[r]] == TAGGED
            assert (e.stored if tagged else e.signalled)[cause[r]] == time
        elif slow_cause >= 0:
            assert (int(cause[r]), int(channel[r])) == (slow_cause, slow_channel)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("tagged", [False, True])
def test_causes_are_those_found_one_by_one(tagged: bool, data: st.DataObject) -> None:
    workers, rounds = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    program = ring(workers, rounds, tagged)
    launches = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    times = data.draw(
        st.lists(
            st.integers(1, 50),
            min_size=sum(launches) * len(program),
            max_size=sum(launches) * len(program),
        )
    )
    queues = [queue.tolist() for queue in program.queues]
    late = data.draw(st.integers(0, 5))
    check(
        executions(
            trace_program(program), launches, queues, lambda s, i: times[s * len(program) + i], late
        )
    )


def test_a_barrier_below_all_signals_is_complete_with_the_targetth_in_time() -> None:
    instructions = [Noop(signal=0), Noop(signal=0), Noop(signal=0), Noop(waits=[Wait(0, 2)])]
    program = trace_program(Program.build([], instructions, [[0], [1], [2], [3]], barriers=["a"]))
    end = {0: 30, 1: 10, 2: 20, 3: 40}
    e = executions(program, [1], [[0], [1], [2], [3]], lambda s, i: end[i])
    cause, channel = find_causes(e)
    assert (cause.tolist(), channel.tolist()) == ([-1, -1, -1, 2], [-1, -1, -1, 0])
    check(e)


def test_the_queue_is_the_cause_when_the_signal_came_before() -> None:
    instructions = [Noop(signal=0), Noop(), Noop(waits=[Wait(0, 1)])]
    program = trace_program(Program.build([], instructions, [[0], [1, 2]], barriers=["a"]))
    for signalled, expected in ((10, (1, -1)), (90, (0, 0))):
        e = executions(
            program, [1], [[0], [1, 2]], lambda s, i, at=signalled: {0: at, 1: 50, 2: 100}[i]
        )
        cause, channel = find_causes(e)
        assert (int(cause[2]), int(channel[2])) == expected


@pytest.mark.parametrize(
    ("begin", "signal", "expected"),
    [
        pytest.param(110, 90, (1, -1), id="the worker was busy until 100"),
        pytest.param(60, 90, (0, 0), id="the storer was, the worker waited for the signal"),
        pytest.param(60, 50, (1, -1), id="the signal came before the worker turned to it"),
        pytest.param(60, 60, (0, 0), id="both at once"),
    ],
)
def test_a_worker_that_turns_to_the_next_while_the_storer_stores_is_not_held_up(
    begin: int, signal: int, expected: tuple[int, int]
) -> None:
    instructions = [Noop(signal=0), Noop(), Noop(waits=[Wait(0, 1)])]
    program = trace_program(Program.build([], instructions, [[0], [1, 2]], barriers=["a"]))
    end, begins = {0: signal, 1: 100, 2: 120}, {0: 1, 1: 1, 2: begin}
    e = executions(program, [1], [[0], [1, 2]], lambda s, i: end[i], begin=lambda s, i: begins[i])
    cause, channel = find_causes(e)
    assert (int(cause[2]), int(channel[2])) == expected


def test_a_wait_for_the_step_before_sees_it_only_within_a_launch() -> None:
    program = trace_program(ring(2, 1))
    queues = [[0], [1]]
    together = find_causes(executions(program, [2], queues, lambda s, i: 100 * s + 10 * i + 1))
    assert [int(x[2]) for x in together] == [1, 1]
    apart = find_causes(executions(program, [1, 1], queues, lambda s, i: 100 * s + 10 * i + 1))
    assert [int(x[2]) for x in apart] == [-1, -1]


def test_steps_that_are_looked_at_in_batches_have_the_same_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = trace_program(ring(2, 2))
    queues = [[0, 2], [1, 3]]
    e = executions(program, [3, 4], queues, lambda s, i: 100 * s + 10 * i + 1)
    whole = find_causes(e)
    monkeypatch.setattr(causes, "_BATCH", 1)
    for a, b in zip(whole, find_causes(e), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_causes_of_a_recorded_ring_go_round_it(tagged: bool, dynamic: bool) -> None:
    trace = record(ring(3, 2, tagged, dynamic)).trace()
    for r in range(trace.num_records):
        cause = int(trace.record_cause[r])
        first = trace.record_instruction[r] == 0
        if cause < 0:
            assert first
            continue
        # The hop before it, or what its worker did before.
        same = trace.record_worker[cause] == trace.record_worker[r]
        hop = (trace.record_instruction[r] - trace.record_instruction[cause]) % 6 == 1
        assert hop or (same and trace.record_cause_channel[r] < 0)
        assert trace.spans.begin[cause] <= trace.spans.end[r]
