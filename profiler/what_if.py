"""The predicted time of a step with one thing changed: all changes ranked, or chosen ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from megavm.profiler.replay import CHANGES, Change, Replay
from megavm.profiler.tables import percent, table, us
from megavm.profiler.trace import Trace, TraceError

WORKERS: Final = 8  # workers that are tried: those that come last most often
_CHANGE: Final = re.compile(r"(?P<what>[a-z]+)(?::(?P<of>.*))?=(?P<factor>[^=]*)")
_MAX_FACTOR: Final = 1e6
_NAMED_BY: Final = {
    "computing": "a phase",
    "storing": "a phase",
    "loading": "a phase",
    "bytes": "a phase",
    "balance": "a phase",
    "latency": "an exchange",
    "wait": "an exchange",
    "worker": "a worker",
}


def what_if(trace: Trace, step: int) -> dict[str, Any]:
    """The step with index ``step`` with every single change, as JSON values; times are ns.

    ``changes`` are sorted by what they bring. ``memory_bound``: the step cannot become shorter,
    because the memory needs that long for its bytes. ``replayed_ns``: the replay with nothing
    changed; it is as good as it is close to ``step_ns``.

    Raises TraceError when the step cannot be replayed.
    """
    replay = Replay(trace, step)
    changes = _single(replay)
    found = replay.run([(), *((change,) for change in changes)])
    whole = float(found.step[0])
    rows: list[dict[str, Any]] = [
        {
            "what": change.what,
            "of": change.of,
            "factor": change.factor,
            "text": describe(change, trace),
            "ns": float(ns),
            "saved_ns": whole - float(ns),
            "memory_bound": bool(floor >= ns > 0),
        }
        for change, ns, floor in zip(changes, found.step[1:], found.floor[1:], strict=True)
    ]
    rows.sort(key=lambda row: -row["saved_ns"])
    return {
        "step": int(trace.step_number[step]),
        "step_ns": replay.recorded,
        "replayed_ns": whole,
        "memory_ns": float(found.floor[0]) or None,
        "changes": rows,
    }


def predict(trace: Trace, step: int, changes: Sequence[Change]) -> dict[str, Any]:
    """The step with all of the changes at once, as JSON values; times are ns.

    Names need not have the layers that they are in: "gate_up".

    Raises TraceError when the step cannot be replayed, or has nothing that a change is of.
    """
    replay = Replay(trace, step)
    changes = [Change(c.what, _full_name(replay, c), c.factor) for c in changes]
    found = replay.run([(), changes])
    return {
        "step": int(trace.step_number[step]),
        "step_ns": replay.recorded,
        "replayed_ns": float(found.step[0]),
        "changes": [describe(change, trace) for change in changes],
        "ns": float(found.step[1]),
        "saved_ns": float(found.step[0] - found.step[1]),
        "memory_bound": bool(found.floor[1] >= found.step[1] > 0),
    }


def parse_change(text: str) -> Change:
    """A change as the command line has it: ``computing:gate_up=0.5``, ``latency=0``.

    Raises TraceError when the text is none.
    """
    found = _CHANGE.fullmatch(text)
    if found is None or found["what"] not in CHANGES:
        raise TraceError(
            f"{text!r} is no change: say WHAT=FACTOR or WHAT:OF=FACTOR, such as "
            f"computing:gate_up=0.5; WHAT is one of {', '.join(CHANGES)}"
        )
    try:
        factor = float(found["factor"])
    except ValueError as error:
        raise TraceError(f"the factor of {text!r} is not a number") from error
    if not 0 <= factor <= _MAX_FACTOR:
        raise TraceError(f"the factor of {text!r} is out of range: 0 to {_MAX_FACTOR:,.0f}")
    what, of = found["what"], found["of"] or ""
    if what in ("wait", "balance") and factor != 0:
        raise TraceError(f"{text!r}: a {what} can only be left out (=0)")
    if what in ("switching", "ring") and of:
        raise TraceError(f"{text!r}: {what} is of all workers")
    if what == "ring" and factor == 0:
        raise TraceError(f"{text!r}: a loader needs a page at least")
    return Change(what, of, factor)


def _full_name(replay: Replay, change: Change) -> str:
    """The name of a change in full: "gate_up" is "layers.*.gate_up" if the step has only that."""
    if not change.of:
        return ""
    exchanges = [" ".join(exchange) for exchange in replay.exchanges]
    names = {
        "a phase": list(replay.used_phases),
        "an exchange": exchanges + list(replay.late_loads) * (change.what == "wait"),
        "a worker": [str(worker) for worker in range(replay.trace.workers)],
    }[_NAMED_BY[change.what]]
    if change.of in names:
        return change.of
    short = [name for name in names if _short(change.what, name, replay.trace) == change.of]
    if len(short) == 1:
        return short[0]
    raise TraceError(
        f"the step has no {change.of!r} to change the {change.what} of: "
        f"it has {', '.join(_short(change.what, name, replay.trace) for name in names[:20])}"
        f"{' ...' if len(names) > 20 else ''}"
    )


def _short(what: str, name: str, trace: Trace) -> str:
    """The object of a change, as tables name it."""
    return trace.worker_name(int(name)) if what == "worker" and name else short_name(name)


def _single(replay: Replay) -> list[Change]:
    """All changes of one thing that the table has."""
    exchanges = [" ".join(exchange) for exchange in replay.exchanges]
    changes = [Change("switching", "", 0.0), Change("balance", "", 0.0)]
    for of in ("", *replay.used_phases):
        changes += [Change("computing", of, factor) for factor in (0.0, 0.5)]
    for of in ("", *replay.loading_phases):
        if replay.loading_phases:
            changes += [Change("loading", of, factor) for factor in (0.0, 0.5)]
    if replay.ring_pages:
        changes.append(Change("ring", "", 2.0))
    changes += [Change("balance", of, 0.0) for of in replay.used_phases]
    for of in ("", *exchanges):
        if exchanges:
            changes += [Change("latency", of, 0.0), Change("latency", of, 0.5)]
    changes += [Change("wait", of, 0.0) for of in (*exchanges, *replay.late_loads)]
    changes += [Change("worker", str(w), 0.5) for w in _late_workers(replay)]
    return changes


def _late_workers(replay: Replay) -> list[int]:
    """The workers that others wait for most often."""
    trace, own = replay.trace, replay.records
    cause = trace.record_cause[own]
    cause = cause[(cause >= 0) & (trace.record_cause_channel[own] >= 0)]
    workers = trace.record_worker[cause]
    counts = np.bincount(workers[workers >= 0], minlength=1)
    order = np.argsort(-counts, kind="stable")[:WORKERS]
    return [int(w) for w in order if counts[w]]


def short_name(name: str) -> str:
    """A phase or exchange without the layers that it is in."""
    return re.sub(r"^(?:.*\.)?layers\.\*\.", "", name)


def _times(factor: float) -> str:
    return {0.0: "no time", 0.5: "half the time"}.get(factor, f"{factor:g} times the time")


def _bytes(factor: float) -> str:
    return {0.0: "nothing", 0.5: "half the bytes"}.get(factor, f"{factor:g} times the bytes")


def describe(change: Change, trace: Trace) -> str:
    """The change of a step of ``trace`` in words: "without waiting for attention's words"."""
    what, of, factor = change.what, _short(change.what, change.of, trace), change.factor
    name, _, kind = of.rpartition(" ")
    match what:
        case "computing":
            return f"{of or 'everything'} computes in {_times(factor)}"
        case "loading":
            return f"{of or 'everything'} loads in {_times(factor)}"
        case "storing":
            return f"{of or 'everything'} stores its results in {_times(factor)}"
        case "bytes":
            return f"{of or 'everything'} loads {_bytes(factor)}"
        case "latency" if not of:
            return f"all exchanges take {_times(factor)}"
        case "latency":
            return f"{name}'s {_through(kind)} in {_times(factor)}"
        case "wait" if not of:
            return "without waiting for other workers"
        case "wait" if kind == "loads":
            return f"{name} loads before its barriers"
        case "wait":
            return f"without waiting for {name}'s {kind}"
        case "worker":
            return f"{f'worker {of}' if of else 'every worker'} in {_times(factor)}"
        case "ring":
            return f"a ring of {'twice' if factor == 2 else f'{factor:g} times'} the pages"
        case "balance":
            return f"{of or 'every phase'} shared evenly by its workers"
        case _:
            return f"turning to the next instruction takes {_times(factor)}"


def _through(kind: str) -> str:
    return "words arrive" if kind == "words" else "barrier is seen"


def format_what_if(facts: dict[str, Any], rows: int | None = None) -> Iterator[str]:
    """The result of ``what_if`` as lines of a table; the first ``rows`` changes."""
    replayed = facts["replayed_ns"]
    yield (
        f"What if: step {facts['step']} took {us(facts['step_ns'])} us, "
        f"its replay with nothing changed {us(replayed)} (no time and no waiting are bounds)"
    )
    if facts["memory_ns"] is not None:
        yield f"(* not shorter: the memory needs {us(facts['memory_ns'])} us for the step's bytes)"
    gains = [row for row in facts["changes"] if row["saved_ns"] >= 0.5]
    shown = gains[:rows]
    yield from table(
        ("change", "step would take, us", "saved", "share"),
        [
            (
                row["text"],
                us(row["ns"]) + ("*" if row["memory_bound"] else ""),
                us(row["saved_ns"]),
                percent(row["saved_ns"], replayed),
            )
            for row in shown
        ],
    )
    if len(gains) > len(shown):
        yield f"... and {len(gains) - len(shown)} more (megavm trace what-if, or --json)"
    if not gains:
        yield "no single change makes the step shorter"


def format_prediction(facts: dict[str, Any]) -> Iterator[str]:
    """The result of ``predict`` as lines."""
    yield (
        f"step {facts['step']} took {us(facts['step_ns'])} us, "
        f"its replay with nothing changed {us(facts['replayed_ns'])}"
    )
    bound = ", as long as the memory needs for its bytes" if facts["memory_bound"] else ""
    yield (
        f"{', '.join(facts['changes'])}: {us(facts['ns'])} us{bound} "
        f"({percent(-facts['saved_ns'], facts['replayed_ns'])})"
    )
