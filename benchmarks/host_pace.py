"""How long a GPU waits for its host while a batch decodes, at a GPU's pace. Needs no GPU.

    python benchmarks/host_pace.py [--batches 1 8 64 256] [--steps-per-launch 1 8]
                                   [--paths engine masks masks-first asyncio uvloop]
                                   [--writers thread loop] [--save [NAME]]

The machine is that of paced.py, with the paces that megavm aims at for a Llama of 1B on an H200.

``idle_share``: time between the end of a launch and the begin of the next, over all time; launches
that are not a decode step of the full batch are left out. ``plan_us`` and ``collect_us`` are means
of a launch, by the clock, so they include waiting for the GIL and for a core. Paths:

- ``engine``: ``Engine.step`` in a loop; nobody reads the text.
- ``masks``: the same, and one sequence has a mask that depends on its last token (``bad_words``).
- ``masks-first``: the same on a machine that must have such masks before it begins a step. The
  limits are not for this one.
- ``asyncio``: the server without uvloop and httptools, one streaming HTTP client per sequence.
- ``uvloop``: the server with both of them, as it is installed.

``--writers loop``: the server without the thread that writes plain events, so that the event loop
writes them all.

Each path has a process of its own, and the clients share another one: they need cores too, so
compare with ``cores`` and ``load_average`` of the result. ``cpu_ms_per_step`` is the time on a core
of the clients and of the server's threads, ``core_wait_ms_per_step`` the time in which they could
run and had no core, for 200 steps of the full batch. "engine" and "loop" share the GIL.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from environment import save
from megavm import SamplingParams
from paced import (
    EVENT_LOOPS,
    Clients,
    Load,
    PacedCopies,
    Work,
    cpu_seconds,
    make_llm,
    measure_apart,
    per_unit,
    run_with,
    serving,
)

PACE_MS: Final = {1: 0.6, 8: 0.7, 64: 1.2, 256: 2.4}  # time of a step, by batch
IDLE_LIMIT: Final = 0.05
HOST_LIMIT: Final = 0.10  # plan and collect, as a share of the pace
TOKENS: Final = 600  # of each sequence
WARM_UP: Final = 50  # first steps of a full batch, not counted
COUNTED: Final = 200  # following steps, whose CPU time is measured
ALONE: Final = ("engine", "masks", "masks-first")  # without a server
PATHS: Final = (*ALONE, *EVENT_LOOPS)


def summary(work: Work, pace: float, steps: int) -> dict[str, Any]:
    """The waits of the GPU in launches of the full batch, and the host's work of all launches."""
    pairs = zip(work.launches, work.launches[1:], strict=False)
    full = [(a, b) for a, b in pairs if a.full and b.full][WARM_UP // steps :]
    waits = sorted(max(0.0, b.begin - a.end) for a, b in full)
    if not waits:
        raise RuntimeError("the batch was never full: the clients were too slow")
    periods = [b.begin - a.begin for a, b in full]
    plan, collect = (
        1e6 * seconds / work.num_launches for seconds in (work.plan_seconds, work.collect_seconds)
    )
    return {
        "launches": len(full),
        "step_ms": round(1e3 * statistics.median(periods) / steps, 3),
        "idle_share": round(sum(waits) / sum(periods), 4),
        "idle_us": {
            "median": round(1e6 * statistics.median(waits), 1),
            "p90": round(1e6 * waits[int(0.9 * (len(waits) - 1))], 1),
            "p99": round(1e6 * waits[int(0.99 * (len(waits) - 1))], 1),
        },
        "plan_us": round(plan, 1),
        "collect_us": round(collect, 1),
        "host_share": round(1e-6 * (plan + collect) / (pace * steps), 4),
    }


def run_engine(path: str, batch: int, pace: float, tokens: int, steps: int) -> dict[str, Any]:
    """Launches of the engine alone."""
    PacedCopies.beside = path != "masks-first"
    llm, machine = make_llm(batch, pace, steps)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        if i == batch - 1 and path != "engine":
            params = replace(params, bad_words=["the fox"])
        restriction = llm.restrictions.compile(params)
        llm.engine.add([2 + i % 100] * (1 + i % 16), params, restriction=restriction)
    gc.collect()
    gc.freeze()  # as the server does
    while llm.engine.has_work:
        llm.engine.step()
    counters = llm.engine.counters
    seconds = counters.plan_seconds, counters.collect_seconds
    llm.close()
    return summary(Work(machine.launches, *seconds, counters.launches), pace, steps)


async def run_server(batch: int, pace: float, tokens: int, steps: int) -> dict[str, Any]:
    """Launches of a server while ``batch`` clients read streams."""
    used: list[tuple[int, dict[str, tuple[float, float]]]] = []
    async with serving(partial(make_llm, batch, pace, steps)) as made:
        clients = Clients(made.port, Load(batch, tokens))
        answered = asyncio.ensure_future(clients.answered())
        for count in (WARM_UP // steps, (WARM_UP + COUNTED) // steps):
            while made.full_launches < count and not answered.done():
                await asyncio.sleep(0.002)
            if not answered.done():
                used.append((made.full_launches, cpu_seconds(made.engine, clients.pid)))
        await answered
    result = summary(made.work(), pace, steps)
    if len(used) == 2:
        (first, before), (last, after) = used
        result |= per_unit("step", before, after, steps * (last - first))
    return result


def measure(path: str, batch: int, steps: int, writer: str, tokens: int) -> dict[str, Any]:
    """One case, in a process of its own."""
    pace = 1e-3 * PACE_MS[batch]
    if path in ALONE:
        return run_engine(path, batch, pace, tokens, steps)
    return run_with(path, serve(batch, pace, tokens, steps, writer))


async def serve(batch: int, pace: float, tokens: int, steps: int, writer: str) -> dict[str, Any]:
    """``run_server``; ``writer`` "loop": the event loop writes plain events too."""
    if writer == "loop":
        from megavm.server.service import Service

        Service.plain_writer = property(lambda self: None)  # type: ignore[assignment,method-assign]
    return await run_server(batch, pace, tokens, steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; returns 1 if the host is slower than the limits allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", choices=PACE_MS, default=list(PACE_MS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--steps-per-launch", type=int, nargs="+", default=[1])
    parser.add_argument("--writers", nargs="+", choices=("thread", "loop"), default=["thread"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each sequence")
    parser.add_argument(
        "--save", nargs="?", const="host_pace", metavar="NAME", help="write results/NAME.json"
    )
    options = parser.parse_args(arguments)
    print(
        f"{'path':>11} {'writer':>6} {'batch':>5} {'steps':>6} {'pace ms':>8} {'step ms':>8} ",
        end="",
    )
    print(f"{'idle':>7} {'plan us':>8} {'collect us':>11} {'host':>7}  CPU ms per step")
    results = []
    for path in options.paths:
        for batch, steps, writer in itertools.product(
            options.batches,
            options.steps_per_launch,
            options.writers[:1] if path in ALONE else options.writers,
        ):
            r = measure_apart(measure, path, batch, steps, writer, options.tokens)
            pace = PACE_MS[batch]
            sizes = {"batch": batch, "steps_per_launch": steps, "pace_ms": pace}
            results.append({"path": path, "writer": writer, **sizes, **r})
            print(f"{path:>11} {writer:>6} {batch:5} {steps:6} {pace:8} {r['step_ms']:8} ", end="")
            print(f"{r['idle_share']:7.1%} {r['plan_us']:8} {r['collect_us']:11} ", end="")
            used = r.get("cpu_ms_per_step", {}).items()
            print(f"{r['host_share']:7.1%} ", *(f"{name} {ms}" for name, ms in used), flush=True)
    late = [
        f"{r['path']} at {r['batch']}"
        for r in results
        if r["path"] != "masks-first"
        and (r["idle_share"] > IDLE_LIMIT or r["host_share"] > HOST_LIMIT)
    ]
    if late:
        print(f"{', '.join(late)} take more than {IDLE_LIMIT:.0%} idle or {HOST_LIMIT:.0%} host")
    if options.save:
        limits = {"idle_share": IDLE_LIMIT, "host_share": HOST_LIMIT}
        report = {"load_average": os.getloadavg()[0], "limits": limits, "within_limits": not late}
        print(f"saved {save(options.save, {**report, 'results': results})}")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
