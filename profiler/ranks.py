"""The rank that the others wait for, exchange by exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

from megavm.profiler.analysis import phases
from megavm.profiler.trace import Longs, Trace


def late_ranks(trace: Trace, steps: Longs) -> list[dict[str, Any]]:
    """For every exchange between ranks in ``steps``, the rank that came last most often.

    An exchange is what instructions of several ranks pass on; ``phase`` is theirs. ``count`` of
    ``of`` waits ended with a result of ``rank``. ``ns`` is the time of all workers in these ``of``
    waits, ``peer_ns`` that for a rank other than the waiting one. ``ranks`` has for every rank how
    often it came last, and how long the others waited for it. Longest first; [] for one rank.
    """
    if trace.ranks == 1:
        return []
    spans, cause = trace.spans, trace.record_cause
    waited = spans.inputs - spans.begin
    own = np.isin(trace.record_step, steps) & (cause >= 0) & (waited > 0)
    records = np.flatnonzero(own & _between_ranks(trace))
    last = trace.record_rank[cause[records]]
    on_peer = last != trace.record_rank[records]
    phase, names = phases(trace)
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


def _between_ranks(trace: Trace) -> np.typing.NDArray[np.bool_]:
    """Whether each record was held up through a channel of several ranks, or by a peer."""
    found = np.zeros(trace.num_records, np.bool_)
    for p, program in enumerate(trace.programs):
        if not len(program.channel_kind):
            continue
        rank = program.channel_producers // max(len(program) // program.ranks, 1)
        first = program.channel_offsets[:-1]
        several = np.minimum.reduceat(rank, first) != np.maximum.reduceat(rank, first)
        own = np.flatnonzero((trace.record_program == p) & (trace.record_cause_channel >= 0))
        peer = trace.record_rank[own] != trace.record_rank[trace.record_cause[own]]
        found[own] = several[trace.record_cause_channel[own]] | peer
    return found
