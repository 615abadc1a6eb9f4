"""The rank that the others wait for, exchange by exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from megavm.profiler.analysis import phases
from megavm.profiler.trace import Ints, Longs, Trace


def late_ranks(trace: Trace, steps: Longs) -> list[dict[str, Any]]:
    """For every exchange between ranks in ``steps``, the rank that came last most often.

    An exchange is what instructions of several ranks pass on; ``phase`` is theirs. It may come
    through a channel for each rank: that of the own rank belongs to it. ``count`` of
    ``of`` waits ended with a result of ``rank``. ``ns`` is the time of all workers in these ``of``
    waits, ``peer_ns`` that for a rank other than the waiting one. ``ranks`` has for every rank how
    often it came last, and how long the others waited for it. Longest first; [] for one rank.
    """
    if trace.ranks == 1:
        return []
    spans, cause = trace.spans, trace.record_cause
    waited = spans.inputs - spans.begin
    phase, names = phases(trace)
    own = np.isin(trace.record_step, steps) & (cause >= 0) & (waited > 0)
    records = np.flatnonzero(own & _between_ranks(trace, phase))
    last = trace.record_rank[cause[records]]
    on_peer = last != trace.record_rank[records]
    exchange = phase[trace.record_label[cause[records]]]
    rows = []
    for number in np.unique(exchange):
        inside = exchange == number
        counts = np.bincount(last[inside], minlength=trace.ranks)
        times = waited[records[inside]]
        peer = inside & on_peer
        waited_for = np.zeros(trace.ranks, np.int64)
        np.add.at(waited_for, last[peer], waited[records[peer]])
        rows.append(
            {
                "phase": names[number],
                "rank": int(counts.argmax()),
                "count": int(counts.max()),
                "of": int(counts.sum()),
                "ns": int(times.sum()),
                "peer_ns": int(waited_for.sum()),
                "ranks": [
                    {"count": int(count), "peer_ns": int(ns)}
                    for count, ns in zip(counts, waited_for, strict=True)
                ],
            }
        )
    return sorted(rows, key=lambda row: -int(row["ns"]))


def _between_ranks(trace: Trace, phase: Ints) -> np.typing.NDArray[np.bool_]:
    """Whether each record was held up by an exchange between ranks.

    That is a channel of several ranks, or any channel of a phase of which the record's instruction
    waits for another rank too. ``phase`` is that of every label.
    """
    found = np.zeros(trace.num_records, np.bool_)
    number = {label: i for i, label in enumerate(trace.labels)}
    for p, program in enumerate(trace.programs):
        if not len(program.channel_kind):
            continue
        size = max(len(program) // program.ranks, 1)
        rank = program.channel_producers // size
        first = program.channel_offsets[:-1]
        lowest = np.minimum.reduceat(rank, first)
        several = lowest != np.maximum.reduceat(rank, first)
        # The phase of a channel is that of its first producer.
        labels = np.array([number[label] for label in program.facts["labels"]], np.int32)
        of_channel = phase[labels[program.label[program.channel_producers[first]]]].astype(np.int64)
        instruction, channel = program.waits[:, 0].astype(np.int64), program.waits[:, 1]
        foreign = several[channel] | (lowest[channel] != instruction // size)
        exchanges = instruction[foreign] * len(phase) + of_channel[channel[foreign]]
        own = np.flatnonzero((trace.record_program == p) & (trace.record_cause_channel >= 0))
        through = trace.record_cause_channel[own]
        key = trace.record_instruction[own] * np.int64(len(phase)) + of_channel[through]
        found[own] = several[through] | np.isin(key, exchanges)
    return found
