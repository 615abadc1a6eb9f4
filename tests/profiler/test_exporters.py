"""Exported traces, read back with Perfetto's own classes and as JSON: nested, ordered, named."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import record_ring
from synthetic import synthetic_trace

from megavm.profiler.analysis import role_spans
from megavm.profiler.chrome import save_chrome
from megavm.profiler.perfetto import save_perfetto, varint
from megavm.profiler.slices import MAX_ROWS, ROLES, arrows, lanes
from megavm.profiler.trace import Trace, TraceError

HTML = "<script>alert(1)</script>\"'&\\"


def traces() -> dict[str, Trace]:
    """A trace of a machine with a loader, and one that a CPU machine has recorded."""
    return {"synthetic": synthetic_trace(workers=5, steps=3, layers=2), "cpu": record_ring()}


@pytest.fixture(params=("synthetic", "cpu"))
def trace(request: pytest.FixtureRequest) -> Trace:
    return traces()[request.param]


def perfetto_packets(trace: Trace, path: Path) -> list[Any]:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    save_perfetto(trace, path)
    parsed = perfetto_trace_pb2.Trace()
    parsed.ParseFromString(path.read_bytes())
    assert parsed.ByteSize() > 0
    return list(parsed.packet)


def nested(events: list[tuple[int, str, Any]]) -> list[tuple[int, int, Any, int]]:
    """Slices (begin, end, what, depth) of one track, whose begins and ends must pair up."""
    stack: list[tuple[int, Any]] = []
    found = []
    last = -1
    for time, kind, what in events:
        assert time >= last
        last = time
        if kind == "begin":
            stack.append((time, what))
        else:
            begin, of = stack.pop()
            found.append((begin, time, of, len(stack)))
    assert not stack
    return found


def test_perfetto_reads_every_packet_and_knows_every_field(trace: Trace, tmp_path: Path) -> None:
    from google.protobuf.unknown_fields import UnknownFieldSet

    for packet in perfetto_packets(trace, tmp_path / "a.pftrace"):
        assert packet.trusted_packet_sequence_id == 1
        for message in (packet, packet.track_event, packet.track_descriptor, packet.interned_data):
            assert not len(UnknownFieldSet(message))


def test_perfetto_tracks_are_named_ordered_and_below_each_other(
    trace: Trace, tmp_path: Path
) -> None:
    packets = perfetto_packets(trace, tmp_path / "a.pftrace")
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in packets
        if p.HasField("track_descriptor")
    }
    by_name = {t.name: t for t in tracks.values() if t.name.startswith("worker")}
    assert list(by_name) == [f"worker {w}" for w in range(trace.workers)]
    ranks = [t.sibling_order_rank for t in by_name.values()]
    assert ranks == sorted(ranks)
    root = tracks[by_name["worker 0"].parent_uuid]
    assert "on" in root.name
    assert root.child_ordering == root.EXPLICIT
    roles = [t for t in tracks.values() if t.parent_uuid == by_name["worker 0"].uuid]
    own = [lane.name for lane in lanes(trace) if lane.worker == 0]
    assert [t.name for t in roles] == own
    assert len(set(own)) == len(own)
    assert {name.split()[0] for name in own} <= set(ROLES)
    order = [t.sibling_order_rank for t in roles]
    assert order == sorted(set(order))
    used = {p.track_event.track_uuid for p in packets if p.HasField("track_event")}
    assert used <= set(tracks)
    assert any(t.HasField("counter") and t.counter.unit_name == "GB/s" for t in tracks.values())


def test_perfetto_slices_nest_and_say_what_they_are(trace: Trace, tmp_path: Path) -> None:
    packets = perfetto_packets(trace, tmp_path / "a.pftrace")
    interned = packets[0].interned_data
    names = {n.iid: n.name for n in interned.event_names}
    kinds = {n.iid: n.name for n in interned.event_categories}
    arguments = {n.iid: n.name for n in interned.debug_annotation_names}
    assert packets[0].sequence_flags == 1
    assert packets[0].first_packet_on_sequence
    tracks: dict[int, list[tuple[int, str, Any]]] = defaultdict(list)
    for packet in packets[1:]:
        event = packet.track_event
        if packet.HasField("track_event") and event.type in (1, 2):
            kind = "begin" if event.type == 1 else "end"
            tracks[event.track_uuid].append((packet.timestamp, kind, event))
    consumers = 0
    for events in tracks.values():
        for begin, end, event, depth in nested(events):
            assert begin <= end
            assert names[event.name_iid]
            facts = {arguments[a.name_iid]: a.uint_value for a in event.debug_annotations}
            if depth == 0 and names[event.name_iid] != "step":
                assert kinds[event.category_iids[0]] in trace.kinds
                program = trace.programs[0]
                assert facts["bytes"] == program.bytes[facts["instruction"]]
                consumers += 1
    assert consumers == sum(len(lane.record) for lane in lanes(trace))


def role_slices(trace: Trace, role: str) -> list[tuple[str, int, int]]:
    """Label, begin and end of every slice of a role, as docs/trace-format.md defines them."""
    begin, end = role_spans(trace)[role]
    seen = np.flatnonzero((begin >= 0) & (end > begin))
    return sorted((trace.labels[trace.record_label[r]], begin[r], end[r]) for r in seen)


@pytest.mark.parametrize("role", ["controller", "loader", "storer"])
def test_slices_that_overlap_are_as_long_as_they_were(role: str, tmp_path: Path) -> None:
    trace = synthetic_trace(workers=5, steps=3, layers=2)
    wanted = role_slices(trace, role)
    assert len({lane.row for lane in lanes(trace) if lane.role == "loader"}) > 1

    packets = perfetto_packets(trace, tmp_path / "a.pftrace")
    names = {n.iid: n.name for n in packets[0].interned_data.event_names}
    own = {
        p.track_descriptor.uuid for p in packets if p.track_descriptor.name.split(" ")[0] == role
    }
    tracks: dict[int, list[tuple[int, str, Any]]] = defaultdict(list)
    for packet in packets:
        event = packet.track_event
        if event.type in (1, 2) and event.track_uuid in own:
            kind = "begin" if event.type == 1 else "end"
            tracks[event.track_uuid].append((packet.timestamp, kind, names.get(event.name_iid)))
    found = [(what, b, e) for events in tracks.values() for b, e, what, _ in nested(events)]
    assert sorted(found) == wanted

    events = chrome_events(trace, tmp_path / "a.json")
    threads = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"].split(" ")[0] == role
    }
    exact = [
        (
            e["name"],
            int(Decimal(e["ts"]) * 1000),
            int((Decimal(e["ts"]) + Decimal(e["dur"])) * 1000),
        )
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) in threads
    ]
    assert sorted(exact) == wanted


def test_more_slices_at_once_than_lanes_are_cut_to_nest(tmp_path: Path) -> None:
    trace = synthetic_trace(workers=2, steps=3, layers=4)
    times = trace.times.copy()
    row = [event.name for event in trace.events].index("load_begin")
    times[row] = 0
    damaged = dataclasses.replace(trace, times=times)
    rows = {lane.row for lane in lanes(damaged) if lane.role == "loader"}
    assert rows == set(range(MAX_ROWS))
    for lane in lanes(damaged):
        assert (lane.begin[1:] >= lane.end[:-1]).all()
        assert (lane.end > lane.begin).all()


def expected_details(trace: Trace, record: int) -> dict[str, Any]:
    """What the slice of a record says, from the columns of the trace."""
    program = trace.programs[trace.record_program[record]]
    instruction, cause = trace.record_instruction[record], int(trace.record_cause[record])
    channel = int(trace.record_cause_channel[record])
    facts: dict[str, Any] = {"flops": program.flops[instruction], "held_up_by": "start"}
    if program.load_bytes[instruction]:
        facts["streamed_bytes"] = program.load_bytes[instruction]
    if cause >= 0:
        facts["cause"] = trace.labels[trace.record_label[cause]]
        facts["cause_worker"] = trace.record_worker[cause]
        kinds = ("barrier", "words")
        facts["held_up_by"] = kinds[program.channel_kind[channel]] if channel >= 0 else "queue"
    return facts


def check_details(trace: Trace, found: dict[tuple[int, int], dict[str, Any]]) -> None:
    """``found``: arguments by number of the step and instruction."""
    consumers = [r for lane in lanes(trace) if lane.role == "consumer" for r in lane.record]
    assert len(found) == len(consumers) > 0
    for record in consumers:
        step = int(trace.step_number[trace.record_step[record]])
        facts = found[step, int(trace.record_instruction[record])]
        for name, value in expected_details(trace, int(record)).items():
            assert facts[name] == value, name
        spans = trace.spans
        begin, end = spans.load_begin[record], spans.load_end[record]
        if begin >= 0 and facts.get("streamed_bytes"):
            rate = facts["streamed_bytes"] / max(end - begin, 1) * 1e9
            assert float(facts["bytes_per_second"]) == pytest.approx(rate, rel=1e-6)


def test_perfetto_slices_have_cause_flops_and_rates(trace: Trace, tmp_path: Path) -> None:
    packets = perfetto_packets(trace, tmp_path / "a.pftrace")
    interned = packets[0].interned_data
    names = {n.iid: n.name for n in interned.debug_annotation_names}
    strings = {n.iid: n.str.decode() for n in interned.debug_annotation_string_values}
    found = {}
    for packet in packets:
        facts = {
            names[a.name_iid]: strings[a.string_value_iid]
            if a.HasField("string_value_iid")
            else a.double_value
            if a.HasField("double_value")
            else a.uint_value
            for a in packet.track_event.debug_annotations
        }
        if "flops" in facts:
            found[facts["step"], facts["instruction"]] = facts
    check_details(trace, found)


def test_chrome_slices_have_cause_flops_and_rates(trace: Trace, tmp_path: Path) -> None:
    events = chrome_events(trace, tmp_path / "a.json")
    arguments = [e["args"] for e in events if e["ph"] == "X" and "flops" in e["args"]]
    check_details(trace, {(a["step"], a["instruction"]): a for a in arguments})


def test_perfetto_flows_lead_from_the_last_producer_to_who_waited(
    trace: Trace, tmp_path: Path
) -> None:
    sources: dict[int, int] = {}
    targets: dict[int, int] = {}
    for packet in perfetto_packets(trace, tmp_path / "a.pftrace"):
        for flow in packet.track_event.flow_ids:
            assert flow not in sources
            sources[flow] = packet.timestamp
        for flow in packet.track_event.terminating_flow_ids:
            assert flow not in targets
            targets[flow] = packet.timestamp
    assert sources.keys() == targets.keys()
    assert len(sources) == len(arrows(trace, lanes(trace)).target) > 0
    assert all(sources[flow] <= targets[flow] for flow in sources)


def chrome_events(trace: Trace, path: Path) -> list[dict[str, Any]]:
    save_chrome(trace, path)
    loaded = json.loads(path.read_text(), parse_float=Decimal)
    assert loaded["displayTimeUnit"] == "ns"
    events: list[dict[str, Any]] = loaded["traceEvents"]
    return events


def test_chrome_slices_nest_on_every_thread(trace: Trace, tmp_path: Path) -> None:
    threads: dict[tuple[int, int], list[tuple[Decimal, Decimal]]] = defaultdict(list)
    for event in chrome_events(trace, tmp_path / "a.json"):
        if event["ph"] == "X":
            begin = Decimal(event["ts"])
            threads[event["pid"], event["tid"]].append((begin, begin + Decimal(event["dur"])))
    assert len(threads) > trace.workers
    for slices in threads.values():
        stack: list[Decimal] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


def test_chrome_arrows_have_two_ends_inside_slices(trace: Trace, tmp_path: Path) -> None:
    events = chrome_events(trace, tmp_path / "a.json")
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(
                (Decimal(event["ts"]), Decimal(event["ts"]) + Decimal(event["dur"]))
            )
    ends: dict[str, dict[int, Any]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            ends[event["ph"]][event["id"]] = event
            at = Decimal(event["ts"])
            assert any(b <= at <= e for b, e in slices[event["pid"], event["tid"]])
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == len(arrows(trace, lanes(trace)).target)
    assert all(ends["s"][i]["ts"] <= ends["f"][i]["ts"] for i in ends["s"])


def test_chrome_processes_and_threads_are_named_and_ordered(trace: Trace, tmp_path: Path) -> None:
    events = chrome_events(trace, tmp_path / "a.json")
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"].endswith("_name")
    }
    assert [names[w + 1, None] for w in range(trace.workers)] == [
        f"worker {w}" for w in range(trace.workers)
    ]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= names.keys()
    for worker in range(trace.workers):
        own = [names[worker + 1, t] for p, t in sorted(used) if p == worker + 1]
        assert own == [lane.name for lane in lanes(trace) if lane.worker == worker]
        assert {name.split()[0] for name in own} <= set(ROLES)


def renamed(trace: Trace) -> Trace:
    """The trace with names that would be markup in a page."""
    facts = dict(trace.programs[0].facts)
    facts["labels"] = [HTML + str(i) for i in range(len(facts["labels"]))]
    program = dataclasses.replace(trace.programs[0], facts=facts)
    return dataclasses.replace(trace, programs=(program,), model={"name": HTML})


def test_names_with_markup_and_quotes_come_through_unchanged(trace: Trace, tmp_path: Path) -> None:
    strange = renamed(trace)
    packets = perfetto_packets(strange, tmp_path / "a.pftrace")
    assert HTML + "0" in {n.name for n in packets[0].interned_data.event_names}
    events = chrome_events(strange, tmp_path / "a.json")
    assert HTML + "0" in {e["name"] for e in events if e["ph"] == "X"}


def test_instructions_that_take_no_time_have_no_slices_and_no_arrows(
    trace: Trace, tmp_path: Path
) -> None:
    """A coarse clock gives them."""
    coarse = dataclasses.replace(
        trace, times=np.where(trace.times < 0, -1, trace.times // 4096 * 4096)
    )
    packets = perfetto_packets(coarse, tmp_path / "a.pftrace")
    leaves = [f for p in packets for f in p.track_event.flow_ids]
    arrives = [f for p in packets for f in p.track_event.terminating_flow_ids]
    assert sorted(leaves) == sorted(arrives)
    events = chrome_events(coarse, tmp_path / "a.json")
    assert all(Decimal(e["dur"]) > 0 for e in events if e["ph"] == "X" and e["cat"] != "step")


def test_without_workers_there_are_no_lanes(trace: Trace, tmp_path: Path) -> None:
    unknown = np.full(trace.num_records, -1, np.int32)
    dynamic = dataclasses.replace(trace, record_worker=unknown)
    for save in (save_perfetto, save_chrome):
        with pytest.raises(TraceError, match="does not say which worker executed what"):
            save(dynamic, tmp_path / "a")


@given(st.integers(0, 2**64 - 1))
def test_a_varint_is_read_back(value: int) -> None:
    from google.protobuf.internal.decoder import _DecodeVarint

    assert _DecodeVarint(varint(value), 0) == (value, len(varint(value)))
