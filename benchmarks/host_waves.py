"""How long a GPU waits for its host while prompts come all the time, at a GPU's pace. Needs no GPU.

    python benchmarks/host_waves.py [--waves 6] [--batches 8 64 256] [--event-loops asyncio uvloop]
                                    [--rounds 1] [--save]

The machine is that of paced.py: a step of R rows takes 0.6 ms + R * 4 us, a launch of pure decode
has 8 of them. Each client sends ``--waves`` requests of 160 token ids for 128 tokens, one as soon
as the last is answered, over one connection.

``idle_share``: the time in which there were requests and the machine did nothing, over the time in
which there were. ``idle_share_of_busy``: the same by the server's metrics. ``ttft_ms``: time to the
first token, as clients see it. ``cpu_ms_per_request`` is the time on a core of the clients and of
the server's threads, ``core_wait_ms_per_request`` that in which they could run and had no core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from environment import save
from paced import (
    EVENT_LOOPS,
    Clients,
    Load,
    cpu_seconds,
    make_llm,
    measure_apart,
    per_unit,
    run_with,
    serving,
)

if TYPE_CHECKING:
    from megavm import LLM
    from megavm.server.engine.generation import Generation
    from megavm.server.run import Server
    from paced import PacedMachine

PROMPT: Final = 160
OUTPUT: Final = 128
STEP_SECONDS: Final = 0.6e-3  # and for each of its rows:
ROW_SECONDS: Final = 4e-6
STEPS_PER_LAUNCH: Final = 8
MAX_ROWS: Final = 2048


def make(batch: int) -> tuple[LLM, PacedMachine]:
    """A model for which one program runs all steps: others would cost when they come first."""
    llm, machine = make_llm(batch, STEP_SECONDS, STEPS_PER_LAUNCH, ROW_SECONDS, MAX_ROWS)
    limits, largest = llm.runner.limits, llm.runner.programs.bucket
    bucket = largest(limits.max_num_batched_tokens, batch, llm.max_model_len)
    llm.runner.programs.bucket = lambda *sizes, **kinds: bucket  # type: ignore[method-assign]
    return llm, machine


async def run_waves(batch: int, waves: int) -> dict[str, Any]:
    """A server to which ``batch`` clients send prompts all the time, ``waves`` each."""
    async with serving(partial(make, batch)) as made:
        await Clients(made.port, Load(batch, OUTPUT, PROMPT)).answered()
        begun, began = work_begins(made.server), time.perf_counter()
        busy, before = await busy_seconds(made.server), cpu_seconds(made.engine)
        answers = await Clients(made.port, Load(batch, OUTPUT, PROMPT, waves)).answered()
        busy, after = await busy_seconds(made.server) - busy, cpu_seconds(made.engine)
    launches = [launch for launch in made.work().launches if launch.begin > began]
    ran = sum(launch.end - launch.begin for launch in launches)
    idle, end = 0.0, 0.0
    for launch in launches:
        # Requests that have come before it are there since:
        since = begun[bisect_right(begun, launch.begin) - 1]
        idle += max(0.0, launch.begin - max(end, since))
        end = launch.end
    first = sorted(1e3 * answer.first for answer in answers)
    return {
        "idle_share": round(idle / (idle + ran), 4),
        "idle_share_of_busy": round(1 - ran / busy, 4),
        "tokens_per_second": round(len(answers) * OUTPUT / (end - launches[0].begin)),
        "ttft_ms": {
            "median": round(statistics.median(first), 1),
            "p99": round(first[int(0.99 * (len(first) - 1))], 1),
        },
        "launches": len(launches),
        **per_unit("request", before, after, len(answers)),
    }


async def busy_seconds(server: Server) -> float:
    """The time in which the engine has had requests."""
    snapshot = await server.service.engine.metrics()
    assert snapshot is not None
    return snapshot.counters["engine_busy_seconds"]


def work_begins(server: Server) -> list[float]:
    """The times, from now on, of requests that come while the engine has none."""
    engine, begun = server.service.engine, [time.perf_counter()]
    submit = engine.submit

    def noted(generation: Generation) -> None:
        if not engine.num_sequences:
            begun.append(time.perf_counter())
        submit(generation)

    engine.submit = noted  # type: ignore[method-assign]
    return begun


def measure(event_loop: str, batch: int, waves: int) -> dict[str, Any]:
    """One case, in a process of its own."""
    return run_with(event_loop, run_waves(batch, waves))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waves", type=int, default=6, help="requests of each client")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--event-loops", nargs="+", choices=EVENT_LOOPS, default=list(EVENT_LOOPS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/host_waves.json")
    options = parser.parse_args(arguments)
    print("    loop batch    idle of busy  tokens/s  TTFT ms: median    p99  CPU ms per request")
    results = []
    for _, event_loop, batch in itertools.product(
        range(options.rounds), options.event_loops, options.batches
    ):
        r = measure_apart(measure, event_loop, batch, options.waves)
        results.append({"batch": batch, **r})
        print(f"{event_loop:>8} {batch:5} {r['idle_share']:7.1%} ", end="")
        print(f"{r['idle_share_of_busy']:7.1%} {r['tokens_per_second']:9} ", end="")
        print(f"{r['ttft_ms']['median']:16} {r['ttft_ms']['p99']:6} ", end="")
        print(*(f"{name} {ms}" for name, ms in r["cpu_ms_per_request"].items()), flush=True)
    if options.save:
        report = {"load_average": os.getloadavg()[0], "waves": options.waves, "results": results}
        print(f"saved {save('host_waves', report)}")


if __name__ == "__main__":
    main()
