"""SMs of a GPU that compute and load longer than others, and SMs that came last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megavm.profiler.analysis import came_last, states
from megavm.profiler.trace import Floats, Longs, Trace

# An SM, or a pair, is slow if its time at equal work is longer than the median of all by each of
LEAST: Final = 0.05  # this part,
ERRORS: Final = 4.0  # so many standard errors of its mean over the steps,
DEVIATIONS: Final = 4.0  # and so many standard deviations among SMs, estimated from the median.
STEPS: Final = 6  # steps that an SM must have, as in trace diff
PLACES: Final = 4  # and SMs that the trace must have
MOST: Final = 1 << 22  # SMs times steps; of more steps, the last ones count


@dataclass(frozen=True, eq=False)
class SmTimes:
    """Computing and loading of each SM in some steps of a trace: [steps, trace.sms], ns; NaN: none.

    ``expected`` is what the SM's instructions take on average: on all SMs, instructions of one
    label, bytes and FLOPs in the same step.
    """

    trace: Trace
    steps: Longs
    busy: Floats
    expected: Floats


def sm_times(trace: Trace, steps: Longs) -> SmTimes:
    """How long every SM computed and loaded in ``steps``, which are sorted."""
    steps = steps[-max(MOST // max(len(trace.sms), 1), 1) :]
    own = np.flatnonzero(np.isin(trace.record_step, steps) & (trace.record_place >= 0))
    time = states(trace.spans)
    busy = (time.computing + time.loading)[own]
    step = np.searchsorted(steps, trace.record_step[own])
    alike = _numbered(step, trace.record_label[own])
    for name in ("bytes", "flops"):
        alike = _numbered(alike, trace.of_instruction(name)[own])
    average = np.bincount(alike, busy) / np.maximum(np.bincount(alike), 1)
    shape = len(steps), len(trace.sms)
    place = step * shape[1] + trace.record_place[own]
    sums, expected = (
        np.bincount(place, values, math.prod(shape)).astype(np.float64)
        for values in (busy, average[alike])
    )
    sums[expected <= 0] = expected[expected <= 0] = np.nan
    return SmTimes(trace, steps, sums.reshape(shape), expected.reshape(shape))


def by_sm(times: SmTimes) -> list[dict[str, Any]]:
    """A table row for every SM; [] when the trace does not know SMs.

    ``ns`` is its computing and loading, a mean over the steps that it took part in, and ``of_mean``
    that over the mean of all SMs, ``equal_work`` the same over what is expected. ``count`` of
    ``of`` waits ended with a result of this SM.
    """
    trace, steps = times.trace, times.steps
    own = np.flatnonzero(np.isfinite(times.busy).any(axis=0))
    if not len(own):
        return []
    each = np.nanmean(times.busy[:, own], axis=0)
    ratio = np.nanmean((times.busy / times.expected)[:, own], axis=0)
    spans = trace.spans
    waited = np.isin(trace.record_step, steps) & (spans.inputs > spans.begin)
    counts, of = came_last(trace, np.flatnonzero(waited), trace.record_place, len(trace.sms))
    mean = max(float(each.mean()), 1.0)
    return [
        {
            "rank": trace.sms[sm][0],
            "sm": trace.sms[sm][1],
            "ns": float(each[i]),
            "of_mean": float(each[i] / mean),
            "equal_work": float(ratio[i]),
            "count": int(counts[sm]),
            "of": of,
        }
        for i, sm in enumerate(own.tolist())
    ]


def slow_sms(times: SmTimes) -> str:
    """A sentence on the SM, or pair of SMs, that is slowest of those that are slow, or ""."""
    trace, steps = times.trace, times.steps
    ratio = times.busy / times.expected
    place = {sm: i for i, sm in enumerate(trace.sms)}
    pairs = [
        (i, place[rank, sm + 1])
        for (rank, sm), i in place.items()
        if sm % 2 == 0 and (rank, sm + 1) in place
    ]
    # A pair is as slow as the faster of the two: a single slow SM is no slow pair.
    both = np.array(pairs, np.int64).reshape(-1, 2).T
    found: list[tuple[tuple[int, ...], float, float]]
    found = [(pairs[i], *how) for i, how in _slow(np.minimum(*ratio[:, both].swapaxes(0, 1)))]
    paired = {i for pair, *_ in found for i in pair}
    found += [((i,), *how) for i, how in _slow(ratio) if i not in paired]
    if not found:
        return ""
    slowest, more, error = max(found, key=lambda one: one[1])
    rank, first = trace.sms[slowest[0]]
    name = trace.sm_title(rank, first)
    if len(slowest) > 1:
        name = f"both SMs of a TPC ({name} and {first + 1})"
    text = (
        f"{name[0].upper()}{name[1:]} took {more:.1%} longer than the median SM for equal work "
        f"(give or take {2 * error:.1%}, {len(steps)} steps)"
    )
    others = len(found) - 1
    if others:
        text += f", and {others} more {'is' if others == 1 else 'are'} slow"
    own = np.isin(trace.record_step, steps) & np.isin(trace.record_place, slowest)
    workers = np.unique(trace.record_worker[own])
    if len(workers) == len(slowest):
        who, whose = ("worker", "its") if len(workers) == 1 else ("workers", "their")
        who += f" {' and '.join(map(str, workers))}"
        text += f"; {who} ran there in all steps, so {whose} instructions may be the cause"
    return text


def _slow(ratio: Floats) -> list[tuple[int, tuple[float, float]]]:
    """The columns of ``ratio`` [steps, n] that are slow: by how much, and the standard error."""
    count = np.isfinite(ratio).sum(axis=0)
    own = np.flatnonzero(count >= STEPS)
    if len(own) < PLACES:
        return []
    mean = np.nanmean(ratio[:, own], axis=0)
    if not np.median(mean) > 0:
        return []
    error = np.nanstd(ratio[:, own], axis=0, ddof=1) / np.sqrt(count[own])
    more = mean / np.median(mean) - 1
    spread = 1.4826 * np.median(np.abs(more))
    limit = np.maximum(np.maximum(LEAST, ERRORS * error), DEVIATIONS * spread)
    return [(int(own[i]), (float(more[i]), float(error[i]))) for i in np.flatnonzero(more > limit)]


def _numbered(groups: Longs, values: npt.NDArray[np.integer]) -> Longs:
    """Numbers from 0 on of the different pairs of a group and a value."""
    different, value = np.unique(values, return_inverse=True)
    _, number = np.unique(groups * len(different) + value, return_inverse=True)
    return np.asarray(number, np.int64)
