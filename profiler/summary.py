"""The summary of a trace: the step of median duration, and its conspicuous facts.

The result travels in the trace file (docs/trace-format.md), so that the page shows what the reports
say. All of it comes from this module and those that it calls.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from megavm.profiler.analysis import (
    STATES,
    Selection,
    arithmetic,
    bandwidth,
    by_kind,
    by_worker,
    came_last,
    common_steps,
    median_step,
    phases,
)
from megavm.profiler.critical_path import PARTS, critical_path
from megavm.profiler.ranks import late_ranks
from megavm.profiler.sms import by_sm, slow_sms, sm_times
from megavm.profiler.tables import counted, percent, table, us, worker_name
from megavm.profiler.trace import Longs, Trace, TraceError
from megavm.profiler.what_if import short_name, what_if

# Version of the summary in a file. A reader ignores summaries of other versions.
VERSION: Final = 3
LONGEST: Final = 10  # waits, outliers and late workers that are listed
BEST: Final = 5  # changes that would bring most, and could be made
OUTLIER: Final = 0.05  # an outlier takes at least this much longer than the median
_WIDTH: Final = 120  # of lines of text
_DEVIATIONS: Final = 5.0  # and so many standard deviations, estimated from the quartiles

# A worker or rank is named if it comes last at least this many times as often as the mean.
_LATE: Final = 1.25
_CLOCKS: Final = 3  # ranks whose clocks are named one by one
# The share of the recorded bandwidth from which that seems to be one GPU's, of several.
_ONE_GPU: Final = 1.5
_NEAR: Final = 0.1  # the share of a ceiling from which its uncertainty matters

Facts = dict[str, Any]


def summary(trace: Trace, number: int | None = None) -> Facts:
    """The summary of a trace, or of the step with this number, as JSON values; times are ns.

    ``record`` is the index of a record in the file, ``step`` the number of a step. ``what_if`` is
    the result of ``what_if``, or a sentence that says why there is none.

    Raises TraceError when the trace does not have the step, or its causes form a cycle.
    """
    common = common_steps(Selection.of(trace, number))
    step = median_step(trace, common)
    selection = Selection(trace, step, step + 1)
    durations = (trace.step_end - trace.step_begin)[common]
    streams, operations = bandwidth(selection, 1), arithmetic(selection)
    sms = sm_times(trace, common)
    facts: Facts = {
        "version": VERSION,
        "step": int(trace.step_number[step]),
        "step_ns": int(trace.step_end[step] - trace.step_begin[step]),
        "tokens": int(trace.step_tokens[step]),
        "steps": len(common),
        "ranks": trace.ranks,
        "spread": _spread(durations),
        "streamed": streams.streamed,
        "of_ceiling": streams.of_ceiling,
        "flops_per_second": operations.rate,
        "of_flops_ceiling": operations.of_ceiling,
        "states": _states(selection),
        "critical_path": _path(trace, step)[:LONGEST],
        "late_workers": _late_workers(selection),
        "late_ranks": late_ranks(trace, common)[:LONGEST],
        "sms": by_sm(sms),
        "slow_sms": slow_sms(sms),
        "waits": _longest_waits(selection),
        "outliers": _outliers(trace, common, step),
        "workers": _workers(selection),
        "kinds": _kinds(selection),
        "warnings": list(warnings(trace, streams.of_ceiling, operations.of_ceiling)),
    }
    try:
        facts["what_if"] = what_if(trace, step)
    except TraceError as error:
        facts["what_if"] = str(error)
    facts["best"] = _best(facts["what_if"])
    facts["sentence"] = _sentence(trace, facts)
    return facts


def _spread(durations: Longs) -> float:
    """Half the distance of the quartiles over the median."""
    low, middle, high = np.percentile(durations, [25, 50, 75])
    return float((high - low) / 2 / middle) if middle else 0.0


def _states(selection: Selection) -> dict[str, float]:
    """The share of the step that workers spend in each state."""
    whole = max(selection.busy * selection.trace.workers, 1)
    return {name: float(times.sum() / whole) for name, times in by_worker(selection).items()}


def _path(trace: Trace, step: int) -> list[Facts]:
    """The critical path by phase, longest first."""
    phase, names = phases(trace)
    rows: dict[str, Facts] = {}
    for link in critical_path(trace, step).links:
        name = names[phase[trace.record_label[link.record]]]
        none = {"phase": name, "ns": 0, **dict.fromkeys(PARTS, 0)}
        row = rows.setdefault(name, none)
        row["ns"] += link.end - link.begin
        for part in PARTS:
            row[part] += link.parts[part]
    return sorted(rows.values(), key=lambda row: -int(row["ns"]))


def _late_workers(selection: Selection) -> list[Facts]:
    """The workers that came last most often, of all waits for channels."""
    trace, spans = selection.trace, selection.spans
    waited = selection.records.start + np.flatnonzero(spans.inputs > spans.begin)
    often, of = came_last(trace, waited, trace.record_worker, trace.workers)
    order = np.argsort(-often, kind="stable")[:LONGEST]
    return [{"worker": int(w), "count": int(often[w]), "of": of} for w in order if often[w]]


def _longest_waits(selection: Selection) -> list[Facts]:
    """The longest waits, one for each record that others waited for, with how many did."""
    trace, spans = selection.trace, selection.spans
    waited = spans.inputs - spans.begin
    through = selection.column(trace.record_cause_channel) >= 0
    cause = np.where(through, selection.column(trace.record_cause), -1)
    order = np.argsort(-waited, kind="stable")
    order = order[(waited > 0)[order] & (cause >= 0)[order]]
    _, first, count = np.unique(cause[order], return_index=True, return_counts=True)
    rows = []
    for place in np.argsort(first)[:LONGEST].tolist():
        record = selection.records.start + int(order[first[place]])
        last = int(trace.record_cause[record])
        program = trace.programs[trace.record_program[record]]
        rows.append(
            {
                "record": record,
                "label": trace.labels[trace.record_label[record]],
                "worker": int(trace.record_worker[record]),
                "ns": int(waited[order[first[place]]]),
                "through": program.channel_name(int(trace.record_cause_channel[record])),
                "last": last,
                "last_label": trace.labels[trace.record_label[last]],
                "last_worker": int(trace.record_worker[last]),
                "count": int(count[place]),
            }
        )
    return rows


def _outliers(trace: Trace, common: Longs, median: int) -> list[Facts]:
    """The steps that took much longer than the median, and which part of their paths grew most."""
    durations = (trace.step_end - trace.step_begin)[common]
    low, middle, high = np.percentile(durations, [25, 50, 75])
    limit = middle + max(OUTLIER * middle, _DEVIATIONS * (high - low) / 1.349)
    longest = np.argsort(-durations, kind="stable")[:LONGEST]
    usual = {row["phase"]: row for row in _path(trace, median)}
    rows = []
    for i in longest[durations[longest] > limit].tolist():
        grown = [
            (row[part] - usual.get(row["phase"], {}).get(part, 0), row["phase"], part)
            for row in _path(trace, int(common[i]))
            for part in PARTS
        ]
        more, phase, part = max(grown, default=(0, "", ""))
        rows.append(
            {
                "step": int(trace.step_number[common[i]]),
                "ns": int(durations[i]),
                "ratio": float(durations[i] / max(middle, 1.0)),
                "phase": phase,
                "part": part,
                "more_ns": int(more),
            }
        )
    return rows


def _best(found: Facts | str) -> list[Facts]:
    """The changes that would bring most, of those that could be made.

    What takes no time at all, or is not waited for, would bring more, but is a bound that no
    program reaches; everything at half the time is no single change; and a ring has as many pages
    as there is room for.
    """
    changes = found["changes"] if isinstance(found, dict) else []
    attainable = [
        row
        for row in changes
        if row["saved_ns"] > 0 and row["of"] and (row["factor"] or row["what"] == "balance")
    ]
    return attainable[:BEST]


def _workers(selection: Selection) -> dict[str, list[int]]:
    """Time of every worker in each state, as lists by worker: ns."""
    return {name: times.tolist() for name, times in by_worker(selection).items()}


def _kinds(selection: Selection) -> list[Facts]:
    """Where the kinds of instruction are in a roofline."""
    names = (
        "kind", "count", "total", "bytes_per_second", "streamed_per_second", "flops_per_second",
        "flops_per_byte",
    )  # fmt: skip
    return [{name: row[name] for name in names} for row in by_kind(selection)]


def warnings(
    trace: Trace, of_ceiling: float | None, of_flops_ceiling: float | None
) -> Iterator[str]:
    """Sentences on what may mislead a reader of the numbers.

    ``of_ceiling``, ``of_flops_ceiling``: share of the memory's bandwidth and of the rate of matrix
    products that the step reached, or None.
    """
    machine, notes = trace.machine, trace.notes
    yield from _ranks(trace)
    cores = machine.get("cores")
    if isinstance(cores, int) and trace.workers > cores > 0:
        yield (
            f"{trace.workers} workers ran on {counted(cores, 'core')}: waits are mostly those for "
            "a core, and say little about the program"
        )
    if of_ceiling is not None and of_ceiling > 1:
        if of_one_gpu(machine, trace.ranks, of_ceiling):
            yield (
                f"streamed data came at {of_ceiling:.0%} of the recorded bandwidth, which seems to "
                f"be that of one GPU and not of all {trace.ranks}: shares of it and of the rate of "
                "matrix products are too high, and what-if knows too slow a memory"
            )
        else:
            yield (
                f"streamed data came at {of_ceiling:.0%} of the memory's bandwidth: caches held a "
                "part of it, so that the bandwidth does not limit this step"
            )
    if of_flops_ceiling is not None and of_flops_ceiling > 1:
        yield (
            f"the step did {of_flops_ceiling:.0%} of the operations that matrix products of this "
            "machine do in its time: torch multiplies more slowly here, or most of the program's "
            "rows were dead"
        )
    for name, what, unit, share in (
        ("bandwidth", "bandwidth", "B/s", of_ceiling),
        ("flops_per_second", "rate of matrix products", "FLOP/s", of_flops_ceiling),
    ):
        usual, best = machine.get(f"{name}_median"), machine.get(name)
        if share is None or share < _NEAR:
            continue  # its limit is far away
        if isinstance(usual, int | float) and isinstance(best, int | float) and usual < 0.9 * best:
            scale, prefix = (1e12, "T") if best >= 1e12 else (1e9, "G")
            yield (
                f"the {what} was measured as {best / scale:,.1f} {prefix}{unit} at best and "
                f"{usual / scale:,.1f} in the median: other work used the machine or its clock "
                "fell under load, and shares of it are as uncertain"
            )
    ratio = notes.get("ratio")
    if isinstance(ratio, int | float) and ratio > 1.1:
        yield f"tracing made a token {ratio:.2f} times as long: short instructions look longer"
    if (trace.record_worker < 0).any():
        yield "the trace does not say which worker executed what (a dynamic queue)"


def of_one_gpu(machine: Mapping[str, Any], ranks: int, of_ceiling: float) -> bool:
    """Whether the recorded bandwidth seems to be that of one GPU of a machine with several.

    Early versions of benchmarks/llama_cuda.py recorded it so.
    """
    return machine.get("name") == "cuda" and _ONE_GPU < of_ceiling <= ranks


def _ranks(trace: Trace) -> Iterator[str]:
    """How workers of several ranks are named, and how far the clocks of the ranks were apart."""
    if trace.ranks == 1:
        return
    first = trace.workers // trace.ranks
    text = f"{trace.worker_name(first)} is the first worker of rank 1"
    ranks = trace.machine.get("ranks")
    known = [
        (rank, offset, uncertainty)
        for rank, clock in enumerate(ranks if isinstance(ranks, list) else ())
        if isinstance(clock, dict)
        and isinstance(offset := clock.get("clock_offset"), int)
        and isinstance(uncertainty := clock.get("clock_uncertainty"), int)
    ]
    apart = [
        f"that of rank {rank} was {offset:+,} ns off, give or take {uncertainty:,}"
        for rank, offset, uncertainty in known
        if offset or uncertainty
    ]
    if len(apart) > _CLOCKS:
        _, offsets, uncertainties = zip(*known[1:], strict=True)
        text += (
            f"; all times are on rank 0's clock: those of the others were {min(offsets):+,} to "
            f"{max(offsets):+,} ns off, give or take {max(uncertainties):,} at most"
        )
    elif apart:
        text += f"; all times are on rank 0's clock: {'; '.join(apart)}"
    elif known:
        text += "; all ranks read one clock"
    else:
        text += "; how far the clocks of the ranks were apart is not known"
    yield text


def _sentence(trace: Trace, facts: Facts) -> str:
    """The summary in a few words."""
    took = facts["step_ns"]
    parts = [f"A step takes {f'{took / 1e6:,.1f} ms' if took >= 1e7 else f'{us(took)} us'}"]
    states = facts["states"]
    # A share above 1 is of no ceiling: ``warnings`` says why.
    ceilings = [
        (share, what)
        for share, what in (
            (facts["of_ceiling"], "the memory's bandwidth"),
            (facts["of_flops_ceiling"], "the rate of matrix products"),
        )
        if share is not None and share <= 1
    ]
    if ceilings:
        share, what = max(ceilings)
        parts[0] += f": {share:.0%} of {what}"
    else:
        waiting = states["barrier"] + states["words"]
        parts[0] += (
            f": workers compute and load {states['computing'] + states['loading']:.0%} of it, "
            f"wait {waiting:.0%}"
        )
    for row in facts["critical_path"][:1]:
        share = percent(row["ns"], facts["step_ns"])
        parts.append(f"{short_name(row['phase']) or 'a phase'} is {share} of the critical path")
    late = [w for w in facts["late_workers"] if w["count"] * trace.workers >= _LATE * w["of"]]
    for row in late[:1]:
        share = f"{row['count'] / row['of']:.0%}"
        name = trace.worker_title(row["worker"])
        parts.append(f"{name} came last in {share} of {row['of']:,} waits")
    late = [r for r in facts["late_ranks"] if r["count"] * trace.ranks >= _LATE * r["of"]]
    for row in late[:1]:
        share = f"{row['count'] / row['of']:.0%}"
        parts.append(
            f"rank {row['rank']} came last in {share} of {row['of']:,} waits for "
            f"{short_name(row['phase'])}"
        )
    for row in facts["best"][:1]:
        share = percent(row["saved_ns"], facts["step_ns"])
        parts.append(f"what would help most: {row['text']}, {share} less")
    return "; ".join(parts) + "."


def format_summary(facts: Facts) -> Iterator[str]:
    """The result of ``summary`` as lines, without the table of changes."""
    yield from textwrap.wrap(facts["sentence"], _WIDTH)
    among = (
        f"of median duration among {facts['steps']} steps of {counted(facts['tokens'], 'token')}"
    )
    yield f"(step {facts['step']}{f', {among}' if facts['steps'] > 1 else ''})"
    for warning in facts["warnings"]:
        yield from textwrap.wrap(f"note: {warning}", _WIDTH)
    if facts["outliers"]:
        yield ""
        yield "Outliers: steps that took much longer, and what of their critical path grew most"
        yield from table(
            ("step", "us", "of median", "phase", "part", "more us"),
            [
                (
                    str(row["step"]),
                    us(row["ns"]),
                    f"{row['ratio']:.2f}",
                    short_name(row["phase"]),
                    row["part"],
                    us(row["more_ns"]),
                )
                for row in facts["outliers"]
            ],
        )
    if facts["late_workers"]:
        yield ""
        yield "Who came last"
        yield from table(
            ("worker", "waits", "share", "computing and loading, of the mean"),
            [
                (
                    _worker(facts, row["worker"]),
                    f"{row['count']:,}",
                    percent(row["count"], row["of"]),
                    f"{_relative_work(facts, row['worker']):.2f}",
                )
                for row in facts["late_workers"][:3]
            ],
        )
    yield from _sms(facts)
    yield from _exchanges(facts["late_ranks"], facts["steps"])
    if facts["waits"]:
        yield ""
        yield "Longest waits of the step, one for each instruction that others waited for"
        yield from table(
            ("instruction", "on worker", "for", "on worker", "through", "us", "waited for it"),
            [
                (
                    row["label"],
                    _worker(facts, row["worker"]),
                    row["last_label"],
                    _worker(facts, row["last_worker"]),
                    row["through"],
                    us(row["ns"]),
                    str(row["count"]),
                )
                for row in facts["waits"][:5]
            ],
            left=5,
        )


def _sms(facts: Facts) -> Iterator[str]:
    """How evenly the SMs are loaded, and who of them came last, as a table."""
    sms = facts["sms"]
    if not sms:
        return
    least, most = (us(pick(row["ns"] for row in sms)) for pick in (min, max))
    yield ""
    yield (
        f"SMs that compute and load longest, means of {counted(facts['steps'], 'step')} "
        f"(all {len(sms)}: {least} to {most} us)"
    )
    several = any(row["rank"] for row in sms)
    yield from table(
        ("SM", "us", "of the mean", "at equal work", "came last in", "share"),
        [
            (
                f"{row['rank']}:{row['sm']}" if several else str(row["sm"]),
                us(row["ns"]),
                f"{row['of_mean']:.2f}",
                f"{row['equal_work']:.2f}",
                f"{row['count']:,}",
                percent(row["count"], row["of"]),
            )
            for row in sorted(sms, key=lambda row: -float(row["ns"]))[:5]
        ],
    )
    if facts["slow_sms"]:
        yield from textwrap.wrap(facts["slow_sms"] + ".", _WIDTH)


def _exchanges(rows: list[Facts], steps: int) -> Iterator[str]:
    """The rank that came last in each exchange, as a table."""
    if not rows:
        return
    yield ""
    ranks = range(len(rows[0]["ranks"]))
    among = counted(steps, "step")
    yield f"Exchanges between ranks, of {among}: the rank that came last most often, and us that"
    yield "workers waited: all, those of another rank than the last, and these for each rank"
    yield from table(
        ("exchange", "rank", "waits", "share", "all", "for a peer", *(f"for {r}" for r in ranks)),
        [
            (
                row["phase"],
                str(row["rank"]),
                f"{row['of']:,}",
                percent(row["count"], row["of"]),
                us(row["ns"]),
                us(row["peer_ns"]),
                *(us(rank["peer_ns"]) for rank in row["ranks"]),
            )
            for row in rows
        ],
    )


def _worker(facts: Facts, worker: int) -> str:
    """The name of a worker, which is "1:3" where there are several ranks."""
    return worker_name(worker, len(facts["workers"][STATES[0]]), facts["ranks"])


def _relative_work(facts: Facts, worker: int) -> float:
    """Computing and loading of a worker over the mean of all."""
    own, whole = 0, 0
    for state in STATES[:2]:
        times = facts["workers"][state]
        own += times[worker]
        whole += sum(times)
    return own * len(facts["workers"][STATES[0]]) / whole if whole else 1.0
