"""Traces of several ranks: who waited for which rank, against times chosen by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from simulator import layered, simulate
from test_exporters import perfetto_packets
from test_replay import PRODUCTS

from megavm.instructions.copy import Copy
from megavm.profiler.diff import diff
from megavm.profiler.ranks import late_ranks
from megavm.profiler.recorder import Recorder
from megavm.profiler.report import format_report, report
from megavm.profiler.summary import format_summary, summary
from megavm.profiler.trace import Trace, TraceError
from megavm.profiler.what_if import parse_change, predict
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Wait
from megavm.vm.machine import Notes
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec

EVENTS = {"begin": 0, "ready": 1, "inputs": 2, "end": 3, "signalled": 4}


def gather(tagged: bool) -> Program:
    """Each of two ranks writes its half of a row on both (0), and copies the whole row (1)."""
    tensors = [
        TensorSpec("start", (1, 16), F32, TensorKind.STATE),
        TensorSpec("row", (1, 32), F32, TensorKind.ACTIVATION, tagged, shares=2),
        TensorSpec("out", (1, 32), F32, TensorKind.STATE),
    ]
    place = {"x_row": 0, "x_column": 0, "row_begin": 0, "row_end": 1, "column_begin": 0}
    instructions = [
        Copy(x=0, out=1, column_end=16, waits=[Wait(1, 0)], signal=None if tagged else 0, **place),
        Copy(x=1, out=2, column_end=32, waits=[] if tagged else [Wait(0, 2)], signal=1, **place),
    ]
    return Program.build(
        tensors,
        instructions,
        [[0], [1]],
        barriers=["row.gathered", "row.read"],
        labels=["layers.0.gather", "layers.0.read"],
        ranks=2,
        shared_barriers=2,
    )


class Noted:
    """An executable whose notes are given: int64 [rows, events]."""

    def __init__(self, program: Program, times: list[list[int]], steps: int) -> None:
        self.program = program
        self._notes = torch.tensor(times)
        self._steps = steps

    def trace(self) -> list[Notes]:
        return [Notes(self._steps, self._notes, EVENTS, offsets=((0, 0), (-340, 25)))]


def recorded(program: Program, late: list[int]) -> Trace:
    """In step s, which begins at 1000 + 1000 s, rank ``late[s]`` writes its half last."""
    steps = len(late)
    rows: list[list[int]] = []
    for rank in range(2):
        begin = [1000 + 1000 * s for s in range(steps)]
        write = [b + (300 if late[s] == rank else 100) for s, b in enumerate(begin)]
        rows += [[b, b + 1, b + 1, w, w + 5] for b, w in zip(begin, write, strict=True)]
        rows += [[b, b + 330, b + 330, b + 400, b + 405] for b in begin]
    recorder = Recorder()
    recorder.add(Noted(program, rows, steps), np.zeros(1, np.int32), 1)
    return recorder.trace()


@pytest.mark.parametrize("tagged", [False, True])
def test_the_cause_of_a_wait_is_the_write_of_the_rank_that_came_last(tagged: bool) -> None:
    late = [1, 0, 1, 1]
    trace = recorded(gather(tagged), late)
    assert (trace.ranks, trace.workers) == (2, 4)
    reads = np.flatnonzero(trace.record_instruction % 2 == 1)
    assert trace.record_worker[reads].tolist() == [1, 3] * 4
    cause = trace.record_cause[reads]
    assert trace.record_worker[cause].tolist() == [2 * rank for rank in late for _ in range(2)]
    assert trace.record_instruction[cause].tolist() == [2 * rank for rank in late for _ in range(2)]
    channel = trace.programs[0].channel_name(int(trace.record_cause_channel[reads[0]]))
    assert channel == ("row" if tagged else "row.gathered of rank 0")


@pytest.mark.parametrize("tagged", [False, True])
def test_the_summary_says_which_rank_came_last(tagged: bool) -> None:
    trace = recorded(gather(tagged), [1, 0, 1, 1])
    row = summary(trace)["late_ranks"][0]  # the longest; the other is the wait for the step before
    assert row == {
        "phase": "layers.*.gather",
        "rank": 1,
        "count": 6,
        "of": 8,
        "ns": 8 * 330,
        "peer_ns": 4 * 330,
        "ranks": [{"count": 2, "peer_ns": 330}, {"count": 6, "peer_ns": 3 * 330}],
    }
    text = " ".join("\n".join(format_summary(summary(trace))).split())
    assert "rank 1 came last in 75% of 8 waits for gather" in text
    assert "layers.*.gather 1 8 75.0% 2.6 1.3 0.3 1.0" in text
    assert (
        "all times are on rank 0's clock: that of rank 1 was -340 ns off, give or take 25" in text
    )
    assert "rank 1, worker 0 came last" in text  # and not its number in the trace


def test_an_exchange_through_a_channel_for_each_rank_counts_the_waits_for_the_own_rank() -> None:
    """As in an all-reduce, whose sums read the words of each rank for themselves."""
    trace = recorded(gather(True), [1, 0, 1, 1])
    wanted = late_ranks(trace, np.arange(4))[0]
    words = 2  # the channel of both writes
    program = trace.programs[0]
    assert program.channel_producers.tolist() == [1, 3, 1, 3, 0, 2]
    divided = dataclasses.replace(
        program,
        channel_kind=np.append(program.channel_kind, program.channel_kind[words]),
        channel_object=np.append(program.channel_object, program.channel_object[words]),
        channel_target=np.append(program.channel_target, 0).astype(np.int32),
        channel_offsets=np.array([0, 2, 4, 5, 6], np.int32),
        waits=np.array(
            [[0, 0, 1], [1, 2, 0], [1, 3, 0], [2, 1, 1], [3, 2, 0], [3, 3, 0]], np.int32
        ),
    )
    channel = trace.record_cause_channel.copy()
    channel[channel == words] += trace.record_rank[trace.record_cause[channel == words]]
    trace = dataclasses.replace(trace, programs=(divided,), record_cause_channel=channel)
    row = late_ranks(trace, np.arange(4))[0]
    assert (row["of"], row["ns"], row["peer_ns"]) == (8, 8 * 330, 4 * 330)
    assert row == wanted


def test_ranks_that_come_last_equally_often_are_not_named() -> None:
    facts = summary(recorded(gather(True), [1, 0, 1, 0]))
    assert facts["late_ranks"][0]["count"] * 2 == facts["late_ranks"][0]["of"]
    assert "waits for gather" not in facts["sentence"]


def test_tables_name_the_workers_of_ranks() -> None:
    trace = recorded(gather(False), [1, 0, 1, 1])
    assert [trace.worker_name(w) for w in range(-1, 4)] == ["-1", "0:0", "0:1", "1:0", "1:1"]
    text = format_report(report(trace))
    assert "worker 1:0 (100.0%)" in text or "worker 1:0 (75.0%)" in text
    assert "\nrank 1 " in text
    change = parse_change("worker:1:0=0.5")
    facts = predict(trace, 0, [change])
    assert facts["changes"] == ["worker 1:0 in half the time"]
    assert facts["ns"] == predict(trace, 0, [parse_change("worker:2=0.5")])["ns"]
    with pytest.raises(TraceError, match=r"no '2:0' .* it has 0:0, 0:1, 1:0, 1:1"):
        predict(trace, 0, [parse_change("worker:2:0=0.5")])


def test_an_export_to_perfetto_groups_workers_by_rank(tmp_path: Path) -> None:
    trace = recorded(gather(True), [1, 0])
    packets = perfetto_packets(trace, tmp_path / "two.pftrace")
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in packets
        if p.HasField("track_descriptor")
    }
    above = {t.name: tracks[t.parent_uuid].name for t in tracks.values() if t.parent_uuid}
    for rank in range(2):
        assert " on " in above[f"rank {rank}"]
        for worker in range(2):
            assert above[f"rank {rank}, worker {worker}"] == f"rank {rank}"


def test_a_comparison_says_that_the_ranks_are_others() -> None:
    two, one = recorded(gather(True), [1, 0]), simulate(layered(4, 1, PRODUCTS))
    assert "the numbers of ranks are different: 1 in A and 2 in B" in diff(one, two)["differences"]


def test_sms_of_ranks_are_told_apart() -> None:
    trace = recorded(gather(False), [0, 1, 0])
    own = dataclasses.replace(trace, record_sm=np.full(trace.num_records, 3, np.int32))
    assert own.sms == ((0, 3), (1, 3))
    assert (own.record_place == own.record_rank).all()
    assert own.sm_title(*own.sms[1]) == "rank 1, SM 3"
    facts = summary(own)
    assert [(row["rank"], row["sm"]) for row in facts["sms"]] == [(0, 3), (1, 3)]
    assert "\n1:3 " in "\n".join(format_summary(facts))


def test_the_clocks_of_ranks_and_the_ranks_survive_the_file(tmp_path: Path) -> None:
    trace = recorded(gather(True), [1, 0])
    trace.save(tmp_path / "two.megatrace")
    again = Trace.load(tmp_path / "two.megatrace")
    assert again.machine["ranks"] == [
        {"clock_offset": 0, "clock_uncertainty": 0},
        {"clock_offset": -340, "clock_uncertainty": 25},
    ]
    assert (again.ranks, again.worker_title(3)) == (2, "rank 1, worker 1")
    assert again.record_rank.tolist() == [0, 0, 1, 1] * 2


@pytest.mark.parametrize("tagged", [False, True])
def test_the_cpu_machine_notes_all_ranks_on_one_clock(tagged: bool) -> None:
    program = gather(tagged)
    memory = Memory("cpu", 2)
    memory.allocate(program.tensors)
    executable = CpuMachine(trace=True).load(program, memory)
    executable.run(5)
    recorder = Recorder()
    recorder.add(executable, np.zeros(1, np.int32), 1)
    trace = recorder.trace()
    assert trace.machine["ranks"] == [{"clock_offset": 0, "clock_uncertainty": 0}] * 2
    assert trace.num_records == 5 * 4
    assert (trace.record_worker == np.tile([0, 1, 2, 3], 5)).all()
    assert (trace.record_instruction == np.tile([0, 1, 2, 3], 5)).all()
    # A read is over after the writes of both ranks.
    end = trace.event("end").reshape(5, 4)
    assert (end[:, [1, 3]].min(axis=1) >= end[:, [0, 2]].max(axis=1)).all()


def test_programs_of_different_numbers_of_ranks_are_no_trace(tmp_path: Path) -> None:
    trace = recorded(gather(True), [1, 0])
    program = trace.programs[0]
    one = dataclasses.replace(program, facts={**program.facts, "ranks": 1})
    dataclasses.replace(trace, programs=(program, one)).save(tmp_path / "mixed.megatrace")
    with pytest.raises(TraceError, match=r"different numbers of ranks: \[1, 2\]"):
        Trace.load(tmp_path / "mixed.megatrace")


def test_the_clocks_of_many_ranks_are_said_in_one_sentence() -> None:
    trace = recorded(gather(True), [1, 0])
    clocks = [{"clock_offset": -100 * rank, "clock_uncertainty": rank} for rank in range(8)]
    facts = summary(dataclasses.replace(trace, machine={**trace.machine, "ranks": clocks}))
    said = "those of the others were -700 to -100 ns off, give or take 7 at most"
    assert any(said in note for note in facts["warnings"])


@pytest.mark.parametrize(
    ("name", "share", "of_one"),
    [("cuda", 1.2, False), ("cuda", 1.9, True), ("cuda", 2.5, False), ("cpu", 1.9, False)],
)
def test_a_bandwidth_that_seems_to_be_that_of_one_of_two_gpus_is_said(
    name: str, share: float, of_one: bool
) -> None:
    trace = recorded(gather(True), [1, 0, 1, 1])
    program = dataclasses.replace(trace.programs[0], load_bytes=trace.programs[0].bytes)
    trace = dataclasses.replace(trace, programs=(program,))
    streamed = summary(trace)["streamed"]
    machine = {**trace.machine, "name": name, "bandwidth": streamed / share}
    trace = dataclasses.replace(trace, machine=machine)
    notes = " ".join(summary(trace)["warnings"])
    text = format_report(report(trace))
    assert ("seems to be that of one GPU and not of all 2" in notes) == of_one
    assert ("recorded seems to be that of one GPU)" in text) == of_one
    assert ("caches held a part" in notes) != of_one
    assert ("caches hold a part" in text) != of_one
