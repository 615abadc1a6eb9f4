"""What-if predictions against traces of programs and kernels that really were changed.

    python benchmarks/techniques_cuda.py --names barriers none --steps 4 --trace FOLDER  # on a GPU
    python benchmarks/what_if_cuda.py FOLDER [--back] [--save]                           # anywhere

Every prediction is made from the trace of the unchanged machine; with --back there is another, the
other way round. What it takes from the other trace are facts of single instructions, never a time
of a step:

- another exchange: how long a phase's results are on their way, before and after. Attention's loads
  wait for barriers and not for words, so its times from its inputs to its sums and to its results
  are others too. The other way round, its loads do not wait;
- other splits: these two times, and the bytes that an instruction loads, where a phase consists of
  more or fewer of them. A phase that is gone takes no time, nor do the exchanges for it alone;
- a ring of other pages: their number. The header of a variant's trace has that of the unchanged
  kernel.

All times are those of the slowest in a layer, averaged over layers and steps: the next phase waits
for it. The replay multiplies what each record took, so a ratio of mean times is one of something
else where the spread changes: words reach some workers much sooner than others, barriers all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from environment import save
from megavm.profiler.analysis import Selection, common_steps, phases
from megavm.profiler.recorded_step import RecordedStep
from megavm.profiler.replay import Change, Replay
from megavm.profiler.ring import EARLY_PAGES
from megavm.profiler.trace import Longs, Trace
from megavm.vm.config import NUM_PAGES

MOST_STEPS = 8  # steps of a trace that are replayed


def exchange_lags(trace: Trace) -> dict[str, float]:
    """From a phase's last result until the last of those whom it held up have it: mean ns."""
    spans, cause = trace.spans, np.maximum(trace.record_cause, 0)
    held_up = (trace.record_cause >= 0) & (trace.record_cause_channel >= 0)
    held_up &= spans.inputs > spans.begin
    phase, names = phases(trace)
    producer = phase[trace.record_label[cause]]
    lags = {}
    for p in np.unique(producer[held_up]).tolist():
        own = np.flatnonzero(held_up & (producer == p))
        done = _latest(trace, own, spans.end[cause[own]])
        lags[names[p]] = float((_latest(trace, own, spans.inputs[own]) - done).mean())
    return lags


def instruction_times(trace: Trace) -> dict[str, tuple[float, float]]:
    """From the inputs to the sums of a phase's slowest instruction in a layer, and from the sums to
    the results of the slowest in that: mean ns."""
    spans = trace.spans
    phase, names = phases(trace)
    of = phase[trace.record_label]
    times = {}
    for p in np.unique(of).tolist():
        own = np.flatnonzero(of == p)
        parts = spans.computed[own] - spans.inputs[own], spans.end[own] - spans.computed[own]
        computing, storing = (float(_latest(trace, own, took).mean()) for took in parts)
        times[names[p]] = computing, storing
    return times


def _latest(trace: Trace, records: Longs, times: Longs) -> Longs:
    """The latest of the records' times, for every label in every step."""
    key = trace.record_step[records].astype(np.int64) * len(trace.labels)
    groups, of = np.unique(key + trace.record_label[records], return_inverse=True)
    latest = np.full(len(groups), np.iinfo(np.int64).min)
    np.maximum.at(latest, of.reshape(-1), times)
    return latest


def exchange_changes(base: Trace, changed: Trace) -> list[Change]:
    """The latencies of all exchanges of ``base`` as they are in ``changed``, how long results take
    to be stored, and its attention."""
    before, after = exchange_lags(base), exchange_lags(changed)
    changes = [
        Change("latency", " ".join(exchange), after[exchange.phase] / before[exchange.phase])
        for exchange in RecordedStep(base, 0).exchanges
        if before.get(exchange.phase, 0.0) > 0 and after.get(exchange.phase, 0.0) > 0
    ]
    phase, names = phases(base)
    attends = [kind == "attention" for kind in base.kinds]
    own = np.array(attends, np.bool_)[base.record_kind]
    times = _other_times(
        base, changed, {names[p] for p in np.unique(phase[base.record_label[own]]).tolist()}
    )
    # Loads that no longer wait for barriers: that, and not computing, makes the time shorter.
    late, still = (RecordedStep(trace, 0).late_loads for trace in (base, changed))
    ahead = set(late) - set(still)
    times = [change for change in times if f"{change.of} loads" not in ahead]
    # Tagged words and a signal behind results are stored in other ways.
    took, takes = instruction_times(base), instruction_times(changed)
    others = {change.of for change in times}
    changes += [
        Change("storing", name, takes[name][1] / took[name][1])
        for name in took
        if name not in others and took[name][1] > 0 and name in takes
    ]
    return changes + times + [Change("wait", loads, 0.0) for loads in sorted(ahead)]


def _other_times(base: Trace, changed: Trace, of: set[str]) -> list[Change]:
    """The phases ``of``, as long from inputs to sums and to results as they are in ``changed``."""
    before, after = instruction_times(base), instruction_times(changed)
    changes = []
    for phase in before:
        if phase in of and phase in after and min(before[phase]) > 0:
            computing, storing = np.divide(after[phase], before[phase]).tolist()
            changes.append(Change("computing", phase, computing))
            changes.append(Change("storing", phase, storing / computing))
    return changes


def _load_bytes(trace: Trace) -> dict[str, float]:
    """What an instruction of every phase loads: mean bytes."""
    phase, names = phases(trace)
    of, loads = phase[trace.record_label], trace.of_instruction("load_bytes")
    return {names[p]: float(loads[of == p].mean()) for p in np.unique(of).tolist()}


def _memory_shares(trace: Trace) -> dict[str, float]:
    """A worker's share of the memory in every phase that loads, as multiple of its even share.

    Few workers that load more than fits into a ring share the memory among them.
    """
    step = RecordedStep(trace, 0)
    shares = {}
    for phase in step.loading_phases:
        fitting, behind, pages = step.intervals_of(phase)
        shares[phase] = step.interval / (behind if pages > step.ring_pages else fitting)
    return shares


def instructions(trace: Trace) -> dict[str, int]:
    """How many instructions every phase of the first step has."""
    phase, names = phases(trace)
    count = np.bincount(phase[trace.record_label[trace.record_step == 0]], minlength=len(names))
    return {name: n for name, n in zip(names, count.tolist(), strict=True) if n}


def split_changes(base: Trace, changed: Trace) -> list[Change]:
    """The work of the instructions of ``base``, if they were as many as those of ``changed``.

    What they load is declared, and so another fact than how long they take.
    """
    before, after = instructions(base), instructions(changed)
    others = {phase for phase, count in before.items() if after.get(phase, count) != count}
    changes = _other_times(base, changed, others)
    loads, others_load = _load_bytes(base), _load_bytes(changed)
    changes += [
        Change("bytes", phase, others_load[phase] / loads[phase])
        for phase in sorted(others & after.keys())
        if loads[phase] > 0
    ]
    shares, other_shares = _memory_shares(base), _memory_shares(changed)
    changes += [
        Change("loading", phase, shares[phase] / other_shares[phase])
        for phase in sorted(others & shares.keys() & other_shares.keys())
    ]
    changes += [Change("computing", phase, 0.0) for phase in before if phase not in after]
    return changes + [
        Change("latency", " ".join(exchange), 0.0)
        for exchange in RecordedStep(base, 0).exchanges
        if (readers := _readers(base, exchange.phase)) and not readers & after.keys()
    ]


def _readers(trace: Trace, producer: str) -> set[str]:
    """The phases that the phase ``producer`` held up."""
    phase, names = phases(trace)
    caused = (trace.record_cause >= 0) & (trace.record_cause_channel >= 0)
    of = phase[trace.record_label[np.maximum(trace.record_cause, 0)]]
    found = phase[trace.record_label[caused & (of == names.index(producer))]]
    return {names[p] for p in np.unique(found).tolist()}


def changes_of(
    technique: str, name: str, base: Trace, changed: Trace, back: bool = False
) -> list[Change]:
    """The change that a variant of techniques_cuda.py makes, in the words of the replay.

    ``back``: ``base`` is the trace of the variant, and ``changed`` that of the unchanged machine.

    Raises ValueError when the replay has no words for it.
    """
    if technique == "exchange":
        return exchange_changes(base, changed)
    if technique == "splits of attention":
        return split_changes(base, changed)
    if technique == "ring of pages":
        factor = int(name.split()[0]) / NUM_PAGES
        return [Change("ring", "", 1 / factor if back else factor)]
    raise ValueError(f"a replay cannot change {technique}")


def with_ring(trace: Trace, pages: int) -> Trace:
    """The trace, of steps of one row, with rings of ``pages``."""
    programs = [
        dataclasses.replace(p, facts={"early_pages": EARLY_PAGES, **p.facts, "pages": pages})
        for p in trace.programs
    ]
    return dataclasses.replace(trace, programs=tuple(programs))


def compare(
    technique: str, name: str, base: Trace, changed: Trace, back: bool = False
) -> dict[str, Any]:
    """The predicted and the measured effect of a variant, as parts of a step of ``base``."""
    changes = changes_of(technique, name, base, changed, back)
    if technique == "ring of pages":
        base = with_ring(base, int(name.split()[0]) if back else NUM_PAGES)
    if technique == "splits of attention":
        # The bytes stay the same: other instructions load them. So no more of them limit the step.
        base = dataclasses.replace(base, machine={**base.machine, "bandwidth": None})
    effects = []
    for step in common_steps(Selection.of(base, None))[:MOST_STEPS].tolist():
        replay = Replay(base, step)
        same, other = replay.run([(), changes]).step.tolist()
        effects.append(other / same - 1)
    before, after = _median_step(base), _median_step(changed)
    predicted, measured = float(np.median(effects)), after / before - 1
    return {
        "technique": technique,
        "name": name,
        "back": back,
        "base_us": before / 1e3,
        "changed_us": after / 1e3,
        "measured": measured,
        "predicted": predicted,
        "error_of_effect": predicted / measured - 1,
        "changes": [dataclasses.asdict(change) for change in changes],
    }


def _line(row: dict[str, Any]) -> str:
    """The row of a comparison in the table (Markdown)."""
    return (
        f"| {row['technique']} | {row['name']}{', back' if row['back'] else ''} | "
        f"{row['base_us']:.1f} | {row['changed_us']:.1f} | {row['measured']:+.1%} | "
        f"{row['predicted']:+.1%} | {row['error_of_effect']:+.0%} |"
    )


def _median_step(trace: Trace) -> float:
    durations: Longs = trace.step_end - trace.step_begin
    return float(np.median(durations[common_steps(Selection.of(trace, None))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what techniques_cuda.py --trace wrote")
    parser.add_argument("--back", action="store_true", help="predict the other way round as well")
    parser.add_argument("--save", action="store_true", help="write results/what_if_cuda.json")
    arguments = parser.parse_args()
    folder, rows = arguments.folder, []
    print("| technique | changed to | as it is, us | changed, us | measured | predicted | error |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for variant in json.loads((folder / "traces.json").read_text(encoding="utf-8")):
        technique, name = variant["technique"], variant["name"]
        if "failed" in variant:
            print(f"| {technique} | {name} | {variant['failed']} | | | | |")
            continue
        base, changed = (Trace.load(folder / variant[key]) for key in ("base", "trace"))
        for back in (False, True) if arguments.back else (False,):
            pair = (changed, base) if back else (base, changed)
            row = compare(technique, name, *pair, back)
            rows.append(
                row
                | {"context": variant["context"], "repeat": variant.get("repeat", 0)}
                | {"device": base.machine.get("device"), "recorded": pair[0].created}
            )
            print(_line(row))
            for change in row["changes"]:
                of = change["of"] or "all"
                print(f"    {change['what']} of {of}: {change['factor']:.2f} times")
    if arguments.save:
        print(f"saved {save('what_if_cuda', {'results': rows})}")


if __name__ == "__main__":
    main()
