"""The cost of tracing on the CPU machine.

    python benchmarks/tracing.py [--tokens 300] [--rounds 8] [--save]

Measures a Noop instruction with and without tracing, and the shipped model's time per token with
and without a recorder: medians of alternating rounds of ``LLM.generate``, including all overhead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from environment import save
from megavm import LLM, SamplingParams
from megavm.instructions.noop import Noop
from megavm.profiler.recorder import Recorder
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.memory import Memory
from megavm.vm.program import Program

INSTRUCTIONS = 1000


def noop_ns(trace: bool, rounds: int) -> float:
    """Nanoseconds per Noop on one worker, in the best round."""
    program = Program.build([], [Noop()] * INSTRUCTIONS, [range(INSTRUCTIONS)])
    executable = CpuMachine(trace=trace).load(program, Memory())
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        executable.run(200)
        times.append((time.perf_counter() - begin) / 200 / INSTRUCTIONS * 1e9)
        if trace:
            executable.trace()
    return min(times)


def token_us(workers: int, tokens: int, rounds: int) -> dict[str, float]:
    """Microseconds per token without and with a recorder, and their ratio."""
    times: dict[bool, list[float]] = {False: [], True: []}
    params = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
    with LLM("stories", machine="cpu", workers=workers, prefix_caching=False) as llm:
        for number in range(2 * rounds + 2):
            traced = number % 2 == 1
            llm.record(Recorder(100) if traced else None)
            timings = llm.generate("Once upon a time", params)[0].timings
            if number >= 2:
                times[traced].append(1e6 / timings["output_tokens_per_second"])
    untraced, traced_us = (statistics.median(times[on]) for on in (False, True))
    return {"untraced_us": untraced, "traced_us": traced_us, "ratio": traced_us / untraced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "noop_ns": {"untraced": noop_ns(False, args.rounds), "traced": noop_ns(True, args.rounds)}
    }
    print(
        f"noop: {results['noop_ns']['untraced']:.1f} ns, {results['noop_ns']['traced']:.1f} traced"
    )
    for workers in (1, 2):
        results[f"{workers} workers"] = found = token_us(workers, args.tokens, args.rounds)
        print(
            f"{workers} workers: {found['untraced_us']:.1f} us per token, "
            f"{found['traced_us']:.1f} traced: {found['ratio']:.4f} times"
        )
    if args.save:
        print(f"saved {save('tracing', results)}")


if __name__ == "__main__":
    main()
