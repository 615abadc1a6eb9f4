"""`megavm trace diff`: two traces side by side, aligned by label, kind of instruction and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from megavm.profiler.analysis import STATES, median_step, phases, states
from megavm.profiler.critical_path import critical_path
from megavm.profiler.report import LONG_PATH, contributions
from megavm.profiler.tables import as_text, counted, table
from megavm.profiler.trace import Longs, Trace, TraceError

PARTS: Final = STATES[:4]  # the states of instructions: all but idle

# Members of a trace's model that say what there is to compute.
_MODEL: Final = ("name", "parameters", "layers", "hidden_size", "vocab_size", "dtype")

# Of fewer steps, the shortest and the longest hold the median with less than 95 %.
LEAST_STEPS: Final = 6

_TRACING: Final = 0.05  # a difference of what tracing costs that is worth a note

Totals = dict[str, dict[str, float]]  # by name: ns of all workers per step


def diff(before: Trace, after: Trace) -> dict[str, Any]:
    """The changes from one trace to another, as JSON values; times are ns.

    Compares only steps with the number of tokens that is most frequent in both traces (decode steps
    with decode steps). If the traces have none in common, compares steps with the number that is
    most frequent in each, and ``differences`` says so; ``tokens`` has both numbers. ``kinds``,
    ``phases`` and ``labels`` hold times of all workers per step, ``critical_path`` those of the
    steps of median duration. ``steps`` pairs steps in order. ``slower`` is the change of the median
    step with its interval, ``differences`` sentences on what else is different.
    """
    tokens = _tokens(before, after)
    a, b = (
        _Side(t, np.flatnonzero(t.step_tokens == count))
        for t, count in zip((before, after), tokens, strict=True)
    )
    return {
        "tokens": list(tokens),
        "machines": [dict(t.machine) for t in (before, after)],
        "models": [dict(t.model) for t in (before, after)],
        "count": [len(a.steps), len(b.steps)],
        "differences": [
            *model_differences(before, after),
            *_step_differences(*tokens),
            *_run_differences(before, after),
        ],
        "step": _change(a.median, b.median),
        "slower": slower(a.durations, b.durations),
        "gap": _change(a.gap, b.gap),
        "streamed": _change(a.streamed, b.streamed),
        "kinds": _changes(a.totals(0), b.totals(0)),
        "phases": _changes(a.totals(1), b.totals(1)),
        "labels": _changes(a.totals(2), b.totals(2)),
        "critical_path": _changes(a.path(), b.path()),
        "steps": [
            {"numbers": [int(n), int(m)], **_change(float(x), float(y))}
            for n, m, x, y in zip(a.numbers, b.numbers, a.durations, b.durations, strict=False)
        ],
    }


def model_differences(before: Trace, after: Trace) -> list[str]:
    """In what the models differ: a comparison of times is then one of what there is to do."""
    return [
        f"the models are different: {name} is {before.model[name]} in A and "
        f"{after.model[name]} in B"
        for name in _MODEL
        if name in before.model and name in after.model and before.model[name] != after.model[name]
    ][:1]


def _step_differences(a: int, b: int) -> Iterator[str]:
    if a != b:
        yield f"the steps are different: they have {counted(a, 'token')} in A and {b} in B"


def _run_differences(before: Trace, after: Trace) -> Iterator[str]:
    for name, what in (("device", "device"), ("workers", "number of workers")):
        a, b = before.machine.get(name), after.machine.get(name)
        if a != b:
            yield f"the machines are different: the {what} is {a} in A and {b} in B"
    if before.ranks != after.ranks:
        yield f"the numbers of ranks are different: {before.ranks} in A and {after.ranks} in B"
    a, b = (trace.notes.get("ratio") for trace in (before, after))
    if isinstance(a, int | float) and isinstance(b, int | float) and abs(a - b) > _TRACING:
        yield f"tracing made a token {a:.2f} times as long in A and {b:.2f} times in B"


def slower(a: Longs, b: Longs) -> dict[str, float]:
    """By what part the median of b is above that of a, with an interval that holds it.

    The interval follows from the 95 % intervals of both medians, which are order statistics
    (Conover, Practical Nonparametric Statistics): nothing is assumed of how durations are spread.
    It covers the noise over the steps of these runs, not that between runs.
    """
    low_a, high_a = _median_interval(a)
    low_b, high_b = _median_interval(b)
    return {
        "change": float(np.median(b) / np.median(a)) - 1,
        "least": low_b / high_a - 1,
        "most": high_b / low_a - 1,
    }


def _median_interval(durations: Longs) -> tuple[float, float]:
    ordered, count = np.sort(np.maximum(durations, 1)), len(durations)
    half = 1.96 * np.sqrt(count) / 2
    low = max(int(np.floor((count - 1) / 2 - half)), 0)
    high = min(int(np.ceil((count - 1) / 2 + half)), count - 1)
    return float(ordered[low]), float(ordered[high])


def judge(facts: dict[str, Any], limit: float) -> tuple[bool, str]:
    """Whether B is slower than A by more than ``limit`` for certain, and a sentence that says so.

    ``limit`` is a part: 0.03 is 3 %. Raises TraceError when the models or the numbers of tokens are
    different, or there are too few steps to know their noise.
    """
    different = [t for t in facts["differences"] if t.startswith(("the models", "the steps"))]
    if different:
        raise TraceError(f"{different[0]}: no limit on the change of time makes sense")
    if min(facts["count"]) < LEAST_STEPS:
        a, b = facts["count"]
        raise TraceError(
            f"{counted(a, 'step')} of A and {b} of B do not show their noise: a limit needs at "
            f"least {LEAST_STEPS} of both"
        )
    said, change, least = _said(facts), facts["slower"]["change"], facts["slower"]["least"]
    if least > limit:
        return True, f"{said}: above the limit of {limit:.1%}"
    if change > limit:
        return False, f"{said}: above the limit of {limit:.1%}, but within the noise"
    return False, f"{said}: within the limit of {limit:.1%}"


def _said(facts: dict[str, Any]) -> str:
    slower = facts["slower"]
    noise = (
        f"with the noise over steps {slower['least']:+.1%} to {slower['most']:+.1%}"
        if min(facts["count"]) >= LEAST_STEPS
        else f"the noise over fewer than {LEAST_STEPS} steps is not known"
    )
    return (
        f"a step of B takes {1 + slower['change']:.3f} times as long as one of A: "
        f"{slower['change']:+.1%}, {noise}"
    )


def _tokens(before: Trace, after: Trace) -> tuple[int, int]:
    """How many tokens the compared steps of both traces have: the same number, if there is one."""
    a, b = (Counter(t.step_tokens.tolist()) for t in (before, after))
    common = a.keys() & b.keys()
    if common:
        most = int(max(common, key=lambda n: (min(a[n], b[n]), -n)))
        return most, most
    first, second = (int(max(counts, key=lambda n: (counts[n], -n))) for counts in (a, b))
    return first, second


def _change(a: float, b: float) -> dict[str, Any]:
    return {"before": a, "after": b, "change": b - a, "ratio": b / a if a else None}


def _changes(a: Totals, b: Totals) -> list[dict[str, Any]]:
    """One row per name of either side, largest change first."""
    none = dict.fromkeys(("total", *PARTS), 0.0)
    rows = []
    for name in dict.fromkeys([*a, *b]):
        x, y = a.get(name, none), b.get(name, none)
        parts = {part: y.get(part, 0.0) - x.get(part, 0.0) for part in PARTS}
        rows.append({"name": name, **_change(x["total"], y["total"]), "parts": parts})
    return sorted(rows, key=lambda row: -abs(row["change"]))


class _Side:
    """The compared steps of one trace."""

    def __init__(self, trace: Trace, steps: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self.trace = trace
        self.steps = steps
        self.numbers = trace.step_number[steps].tolist()
        self.durations = (trace.step_end - trace.step_begin)[steps]
        self.median = float(np.median(self.durations))
        following = steps[steps > 0]
        between = trace.step_begin[following] - trace.step_end[following - 1]
        self.gap = float(np.median(between)) if len(between) else 0.0
        chosen = np.zeros(trace.num_steps, np.bool_)
        chosen[steps] = True
        self.records = chosen[trace.record_step]
        streamed = trace.of_instruction("load_bytes")[self.records].sum()
        self.streamed = float(streamed / max(self.durations.sum(), 1) * 1e9)

    def totals(self, level: int) -> Totals:
        """Time per step by kind (0), phase (1) or label (2)."""
        trace = self.trace
        phase, phase_names = phases(trace)
        of, names = (
            (trace.record_kind, trace.kinds),
            (phase[trace.record_label], phase_names),
            (trace.record_label, trace.labels),
        )[level]
        columns = {
            name: np.bincount(of[self.records], values[self.records], len(names)) / len(self.steps)
            for name, values in vars(states(trace.spans)).items()
        }
        return {
            name: {
                "total": float(sum(column[i] for column in columns.values())),
                **{part: float(columns[part][i]) for part in PARTS},
            }
            for i, name in enumerate(names)
            if (of[self.records] == i).any()
        }

    def path(self) -> Totals:
        """The critical path of the step of median duration, by phase."""
        step = median_step(self.trace, self.steps)
        totals: Totals = {}
        for row in contributions(self.trace, critical_path(self.trace, step)):
            known = totals.setdefault(row["phase"], {"total": 0.0})
            known["total"] += row["total"]
        return totals


def format_diff(facts: dict[str, Any]) -> str:
    """The result of ``diff`` as tables."""
    return as_text(_lines(facts))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    before, after = facts["machines"]
    for name, machine, model, count in zip(
        "AB", (before, after), facts["models"], facts["count"], strict=True
    ):
        yield (
            f"{name}  {model.get('name', 'unknown model')} on {machine['name']} "
            f"({machine['device']}, {counted(machine['workers'], 'worker')}), "
            f"{counted(count, 'step')}"
        )
    first, second = facts["tokens"]
    also = "" if first == second else f" in A, of {second} in B"
    yield f"compared: steps of {counted(first, 'token')}{also}"
    for difference in facts["differences"]:
        yield f"note: {difference}"
    yield _said(facts)
    yield ""
    rows = [("step, us", facts["step"], 1e3), ("gap before it, us", facts["gap"], 1e3)]
    rows.append(("weights and KV, GB/s", facts["streamed"], 1e9))
    yield from table(
        ("median", "A", "B", "change", "ratio"),
        [(name, *_cells(change, unit)) for name, change, unit in rows],
    )
    for title, key in (
        ("Kinds: us of all workers per step", "kinds"),
        ("Phases: us of all workers per step", "phases"),
    ):
        yield ""
        yield title
        yield from table(
            ("", "A", "B", "change", "ratio", *PARTS),
            [
                (
                    row["name"],
                    *_cells(row, 1e3),
                    *(f"{row['parts'][part] / 1e3:+,.1f}" for part in PARTS),
                )
                for row in facts[key][:LONG_PATH]
            ],
        )
    yield ""
    yield "Critical path of the median step: us by phase"
    yield from table(
        ("", "A", "B", "change", "ratio"),
        [(row["name"], *_cells(row, 1e3)) for row in facts["critical_path"][:LONG_PATH]],
    )


def _cells(change: dict[str, Any], unit: float) -> tuple[str, str, str, str]:
    ratio = "-" if change["ratio"] is None else f"{change['ratio']:.3f}"
    return (
        f"{change['before'] / unit:,.1f}",
        f"{change['after'] / unit:,.1f}",
        f"{change['change'] / unit:+,.1f}",
        ratio,
    )
