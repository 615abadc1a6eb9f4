"""`megavm trace report`: all analyses of a trace, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from megavm.profiler.analysis import (
    STATES,
    Selection,
    arithmetic,
    balance,
    bandwidth,
    by_kind,
    by_role,
    by_worker,
    common_steps,
    gaps,
    median_step,
    phases,
    waits,
)
from megavm.profiler.critical_path import PARTS, CriticalPath, critical_path
from megavm.profiler.summary import format_summary, of_one_gpu, summary
from megavm.profiler.tables import as_text, counted, percent, table, us, worker_name
from megavm.profiler.trace import Trace
from megavm.profiler.what_if import format_what_if

LONG_PATH: Final = 12  # largest number of links and rows that a table shows
WORKER_WAITS: Final = 3  # longest waits reported per worker


def report(trace: Trace, number: int | None = None) -> dict[str, Any]:
    """All analyses of a trace, or of the step with this number, as JSON values.

    Keys of times end in ``_ns``. The critical path is that of the selected step, or of the step of
    median duration among those with the most frequent number of tokens.

    Raises TraceError when the trace does not have the step.
    """
    selection = Selection.of(trace, number)
    streams, operations = bandwidth(selection), arithmetic(selection)
    workers = by_worker(selection)
    longest: list[list[dict[str, Any]]] = [[] for _ in range(trace.workers)]
    for row in waits(selection, each_worker=True):
        if row.worker >= 0 and len(longest[row.worker]) < WORKER_WAITS:
            longest[row.worker].append(asdict(row))
    return {
        "created": trace.created,
        "megavm": trace.megavm,
        "machine": dict(trace.machine),
        "model": dict(trace.model),
        "notes": dict(trace.notes),
        "summary": summary(trace, number),
        "records": selection.records.stop - selection.records.start,
        "steps": _steps(selection),
        "bandwidth": {
            "ceiling": streams.ceiling,
            "streamed": streams.streamed,
            "of_ceiling": streams.of_ceiling,
            "from_memory": streams.from_memory,
            "moved": streams.moved,
            "streamed_bytes": streams.streamed_bytes,
            "moved_bytes": streams.moved_bytes,
            "begin_ns": streams.begin,
            "bin_ns": streams.bin,
            "over_time": streams.rates.tolist(),
        },
        "arithmetic": {
            "ceiling": operations.ceiling,
            "rate": operations.rate,
            "of_ceiling": operations.of_ceiling,
        },
        "kinds": by_kind(selection),
        "roles_ns": by_role(selection),
        "workers": [
            {
                "worker": w,
                **{state: int(workers[state][w]) for state in STATES},
                "waits": longest[w],
            }
            for w in range(trace.workers)
        ],
        "workers_unknown": bool((trace.record_worker[selection.records] < 0).any()),
        "waits": [asdict(row) for row in waits(selection)],
        "phases": [{**asdict(row), "imbalance": row.imbalance} for row in balance(selection)],
        "critical_path": _path(trace, median_step(trace, common_steps(selection))),
    }


def _steps(selection: Selection) -> dict[str, Any]:
    trace, own = selection.trace, slice(selection.first, selection.last)
    seconds, between = selection.step_seconds, gaps(selection)
    return {
        "count": selection.steps,
        "first": int(trace.step_number[selection.first]),
        "last": int(trace.step_number[selection.last - 1]),
        "tokens": int(trace.step_tokens[own].sum()),
        "busy_ns": selection.busy,
        "mean_ns": float(seconds.mean() * 1e9),
        "median_ns": float(np.median(seconds) * 1e9),
        "p99_ns": float(np.percentile(seconds, 99) * 1e9),
        "gap_ns": int(between.sum()),
        "gap_median_ns": float(np.median(between)) if len(between) else 0.0,
        "gap_longest_ns": int(between.max(initial=0)),
        "durations_ns": np.rint(seconds * 1e9).astype(int).tolist(),
    }


def _path(trace: Trace, step: int) -> dict[str, Any]:
    path = critical_path(trace, step)
    return {
        "step": int(trace.step_number[step]),
        "step_ns": path.end - path.begin,
        "length_ns": path.length,
        "contributions": contributions(trace, path),
        "links": [_link(trace, path, i) for i in range(len(path.links))],
    }


def contributions(trace: Trace, path: CriticalPath) -> list[dict[str, Any]]:
    """The path's time by phase, kind and reason of the delay, longest first."""
    phase, names = phases(trace)
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for link in path.links:
        name = names[phase[trace.record_label[link.record]]]
        kind = trace.kinds[trace.record_kind[link.record]]
        row = rows.setdefault(
            (name, kind, link.through),
            {"phase": name, "kind": kind, "through": link.through, "count": 0, "total": 0}
            | dict.fromkeys(PARTS, 0),
        )
        row["count"] += 1
        row["total"] += link.end - link.begin
        for part in PARTS:
            row[part] += link.parts[part]
    return sorted(rows.values(), key=lambda row: -int(row["total"]))


def _link(trace: Trace, path: CriticalPath, i: int) -> dict[str, Any]:
    link = path.links[i]
    return {
        "record": link.record,
        "label": trace.labels[trace.record_label[link.record]],
        "kind": trace.kinds[trace.record_kind[link.record]],
        "worker": int(trace.record_worker[link.record]),
        "begin_ns": link.begin - path.begin,
        "end_ns": link.end - path.begin,
        "through": link.through,
        "channel": link.channel,
        **link.parts,
    }


# Text.


def format_report(facts: dict[str, Any]) -> str:
    """The result of ``report`` as tables."""
    return as_text(_lines(facts))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    machine, steps, streams = facts["machine"], facts["steps"], facts["bandwidth"]
    model = facts["model"].get("name", "unknown model")
    yield (
        f"{model} on {machine['name']} ({machine['device']}, "
        f"{counted(machine['workers'], 'worker')}), recorded {facts['created']} "
        f"by megavm {facts['megavm']}"
    )
    numbers = f"step {steps['first']}"
    if steps["count"] > 1:
        numbers = f"{steps['count']} steps ({steps['first']} to {steps['last']})"
    executed = counted(facts["records"], "instruction")
    yield f"{numbers}, {counted(steps['tokens'], 'token')}, {executed} executed"
    yield ""
    yield from format_summary(facts["summary"])
    yield from _what_if(facts["summary"]["what_if"])
    yield ""
    yield (
        f"step       median {us(steps['median_ns'])} us, mean {us(steps['mean_ns'])}, "
        f"p99 {us(steps['p99_ns'])}"
    )
    if steps["count"] > 1:
        yield (
            f"gaps       median {us(steps['gap_median_ns'])} us between steps, "
            f"longest {us(steps['gap_longest_ns'])}, "
            f"{percent(steps['gap_ns'], steps['gap_ns'] + steps['busy_ns'])} of the time"
        )
    yield from _ceilings(facts)
    yield from _kinds(facts["kinds"], streams["ceiling"], facts["arithmetic"]["ceiling"])
    yield from _roles(facts["roles_ns"])
    yield from _workers(facts)
    yield from _waits(facts)
    yield from _phases(facts["phases"])
    yield from _critical(facts["critical_path"])


def _ceilings(facts: dict[str, Any]) -> Iterator[str]:
    """Bandwidth and arithmetic of the steps against what the machine can give."""
    streams, operations = facts["bandwidth"], facts["arithmetic"]
    streamed, once, moved = (streams[name] / 1e9 for name in ("streamed", "from_memory", "moved"))
    share, activations = _of_ceiling(streams), f"{moved:,.1f} GB/s with activations"
    if once > 0.99 * streamed:
        yield f"bandwidth  {streamed:,.1f} GB/s of weights and KV{share}; {activations}"
    else:
        yield f"bandwidth  {streamed:,.1f} GB/s of weights and KV; {activations}"
        yield f"           {once:,.1f} GB/s with a weight counted once a step{share}"
    above = streams["of_ceiling"] or 0.0
    if of_one_gpu(facts["machine"], facts["summary"]["ranks"], above):
        yield "           (the bandwidth that was recorded seems to be that of one GPU)"
    elif above > 1:
        yield "           (above the memory's bandwidth: caches hold a part of what was streamed)"
    yield f"arithmetic {operations['rate'] / 1e9:,.1f} GFLOP/s{_of_ceiling(operations)}"


def _of_ceiling(rates: dict[str, Any]) -> str:
    ceiling = rates["ceiling"]
    return "" if ceiling is None else f", {rates['of_ceiling']:.1%} of {ceiling / 1e9:,.1f}"


def _what_if(found: dict[str, Any] | str) -> Iterator[str]:
    yield ""
    if isinstance(found, str):
        yield f"What if: {found}"
    else:
        yield from format_what_if(found, LONG_PATH)


def _kinds(
    kinds: Sequence[dict[str, Any]], bandwidth: float | None, flops: float | None
) -> Iterator[str]:
    yield ""
    yield "Time by kind of instruction: us of all workers; rates of workers that do nothing else,"
    yield "weights and KV against the bandwidth (above it: from caches, or while workers waited)"
    total = sum(row["total"] for row in kinds)
    yield from table(
        ("kind", "count", "share", "total", "computing", "loading", "barrier", "words",
         "p50", "p99", "GB/s", "of ceiling", "GFLOP/s", "of ceiling", "FLOP/B"),
        [
            (
                row["kind"],
                f"{row['count']:,}",
                percent(row["total"], total),
                *(us(row[name]) for name in ("total", "computing", "loading", "barrier", "words")),
                us(row["p50"]),
                us(row["p99"]),
                f"{row['bytes_per_second'] / 1e9:,.1f}",
                percent(row["streamed_per_second"], bandwidth) if bandwidth else "-",
                f"{row['flops_per_second'] / 1e9:,.1f}",
                percent(row["flops_per_second"], flops) if flops else "-",
                f"{row['flops_per_byte']:.2f}",
            )
            for row in kinds
        ],
    )  # fmt: skip


def _roles(roles: dict[str, int]) -> Iterator[str]:
    yield ""
    yield "Time by role: us of all workers in which it had an instruction, waiting included"
    yield from table(("role", "us"), [(role, us(ns)) for role, ns in roles.items()])


def _workers(facts: dict[str, Any]) -> Iterator[str]:
    workers, busy = facts["workers"], facts["steps"]["busy_ns"]
    yield ""
    yield "What workers did while a step ran"
    if facts["workers_unknown"]:
        yield "(of a dynamic queue it is not known who executed what: such time looks idle)"
    columns = [[worker[state] for worker in workers] for state in STATES]
    rows = [
        ("mean", *(percent(sum(column) / len(column), busy) for column in columns), ""),
        ("least", *(percent(min(column), busy) for column in columns), ""),
        ("most", *(percent(max(column), busy) for column in columns), ""),
    ]
    ranks = facts["summary"]["ranks"]
    each = len(workers) // ranks
    for rank in range(ranks if ranks > 1 else 0):
        own = slice(rank * each, (rank + 1) * each)
        shares = (percent(sum(column[own]) / each, busy) for column in columns)
        rows.append((f"rank {rank}", *shares, ""))
    waiting = sorted(workers, key=lambda w: -w["barrier"] - w["words"])[:LONG_PATH]
    rows += [
        (
            f"worker {_name(facts, w['worker'])}",
            *(percent(w[s], busy) for s in STATES),
            _most(facts, w["waits"]),
        )
        for w in sorted(waiting, key=lambda w: int(w["worker"]))
    ]
    yield from table(("", *STATES, "waits most for (who came last most often)"), rows)
    if len(workers) > LONG_PATH:
        yield f"... of {len(workers)} workers those that wait longest (--json has all)"


def _most(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    last = rows[0]["last_worker"]
    return f"{rows[0]['awaited']}{f' (worker {_name(facts, last)})' if last >= 0 else ''}"


def _name(facts: dict[str, Any], worker: int) -> str:
    return worker_name(worker, len(facts["workers"]), facts["summary"]["ranks"])


def _waits(facts: dict[str, Any]) -> Iterator[str]:
    rows = facts["waits"]
    yield ""
    yield "Waits: us of all workers, and who came last most often"
    yield from table(
        ("waiting", "for", "by", "longest through", "count", "total", "longest", "came last"),
        [
            (
                row["waiting"],
                row["awaited"],
                row["kind"],
                row["channel"] if row["awaited"] != "nothing" else "-",
                f"{row['count']:,}",
                us(row["total"]),
                us(row["longest"]),
                f"worker {_name(facts, row['last_worker'])} "
                f"({percent(row['last_count'], row['count'])})"
                if row["last_worker"] >= 0
                else "-",
            )
            for row in rows[:LONG_PATH]
        ],
        left=4,
    )
    yield from _more(len(rows))


def _more(count: int) -> Iterator[str]:
    if count > LONG_PATH:
        yield f"... and {count - LONG_PATH} more (--json has all)"


def _phases(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield "Balance: us of a worker's computing and loading, means over layers and steps"
    yield from table(
        ("phase", "count", "workers", "least", "mean", "longest", "imbalance", "first to last end"),
        [
            (
                row["phase"],
                f"{row['count']:,}",
                f"{row['workers']:.1f}",
                us(row["least"]),
                us(row["mean"]),
                us(row["longest"]),
                f"{row['imbalance']:.2f}",
                us(row["tail"]),
            )
            for row in rows
        ],
    )


def _critical(path: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield (
        f"Critical path of step {path['step']}: {us(path['length_ns'])} us in "
        f"{len(path['links'])} links, the step took {us(path['step_ns'])}"
    )
    rows = path["contributions"]
    yield from table(
        ("phase", "kind", "held up by", "links", "us", "share", *PARTS),
        [
            (
                row["phase"],
                row["kind"],
                row["through"],
                str(row["count"]),
                us(row["total"]),
                percent(row["total"], path["step_ns"]),
                *(us(row[part]) for part in PARTS),
            )
            for row in rows[:LONG_PATH]
        ],
        left=3,
    )
    yield from _more(len(rows))
