"""TTFT and TPOT by the most tokens of a step, at the pace of an H200. No GPU is needed.

    python benchmarks/step_sizes.py [--model 1b 8b] [--sizes 512 1024 2048 4096 8192]
                                    [--clients 8 64 256] [--requests 5] [--save]

The engine plans and collects as it does behind ``LLM`` on a GPU: one launch runs while the next one
is planned. Its machine executes nothing, and the clock is a number: a step takes as long as
results/throughput_cuda_*.json say. Between measured sizes a line is drawn; a row that chooses a
token takes longer than one of a prompt, by as much as decoding 256 sequences takes longer than
reading 256 tokens. The host's work takes no time. Each client sends its next request up to DELAY
seconds after the last token, at random. ``--launch-ms``: what a launch of several steps should
take.

Then a prompt of 8,192 tokens arrives while 64 sequences decode, with and without a limit of the
time of a step (``tpot_limit_ms``), which has learned from one such prompt before.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast
from unittest.mock import patch

import numpy as np

from environment import RESULTS, save
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.sequence import Delta
from megavm.scheduler.engine.step import Plan, Step
from megavm.vm.target import TARGETS
from planning import EchoRunner

# Of requests: tokens of the prompt, fewest and most tokens of the answer.
LOADS: Final = ((160, 128, 128), (160, 64, 192), (1024, 64, 192))
DELAY: Final = 5e-3
LONG: Final = 8192
BESIDE: Final = 64  # sequences that decode beside a long prompt
LIMIT_MS: Final = {"1b": 8.0, "8b": 35.0}
VOCABULARY: Final = 1000


class Pace:
    """How long steps take on an H200, in seconds."""

    def __init__(self, model: str) -> None:
        measured = json.loads((RESULTS / f"throughput_cuda_{model}.json").read_text())["results"]
        # (sequences or tokens, microseconds)
        self._decode: list[tuple[int, float]] = []
        self._prompts: list[tuple[int, float]] = []
        for result in measured:
            if result["kind"] == "decode":
                self._decode.append((result["what"], result["us"]))
            else:
                sequences, tokens = map(int, result["what"].split("x"))
                self._prompts.append((sequences * tokens, result["us"]))
        (few, short), (many, long), *_ = self._prompts
        self._prompts.insert(0, (0, short - few * (long - short) / (many - few)))
        most, longest = self._decode[-1]
        self._choosing = (longest - _on_lines(most, self._prompts)) / most

    def step(self, rows: int, choosing: int) -> float:
        """``choosing`` of the rows choose a token."""
        if rows == choosing:
            return 1e-6 * _on_lines(rows, self._decode)
        return 1e-6 * (_on_lines(rows, self._prompts) + choosing * self._choosing)


def _on_lines(x: int, points: list[tuple[int, float]]) -> float:
    xs, ys = np.array(points, dtype=np.float64).T
    return float(np.interp(x, xs, ys))


class PacedRunner(EchoRunner):
    """A runner that executes nothing and moves a clock."""

    def __init__(self, pace: Pace, size: int, sequences: int, length: int) -> None:
        super().__init__(sequences, length, VOCABULARY, np.zeros(1, dtype=np.int32))
        self.max_num_batched_tokens = size
        self.now = 0.0
        self.longest = 0.0  # step
        self._pace = pace

    def run(self, step: Step, steps: int = 1, started: Callable[[], None] | None = None) -> None:
        """As ``Runner.run``; every token is 0."""
        took = self._pace.step(step.num_rows, len(step.logit_row))
        self.longest = max(self.longest, took)
        self.now += took * steps
        self.machine_seconds += took * steps


class Simulation:
    """An engine, and requests by the time at which they arrive."""

    def __init__(
        self, runner: PacedRunner, tpot_limit: float | None = None, launch: float | None = None
    ) -> None:
        self.runner = runner
        self.engine = Engine(
            runner,
            prefix_caching=False,
            overlap=False,  # this object itself plans ahead, in the thread of the clock
            steps_per_launch=TARGETS["cuda"].steps_per_launch,
            launch_limit=launch,
            tpot_limit=tpot_limit,
        )
        self._planned: deque[Plan] = deque()
        self._arrivals: list[tuple[float, int, int, int]] = []

    def send(self, at: float, id: int, prompt: int, output: int) -> None:
        """A request with so many tokens arrives at a time."""
        heapq.heappush(self._arrivals, (at, id, prompt, output))

    def launch(self) -> list[Delta]:
        """Run until the next launch has ended; the one behind it is planned before."""
        self._plan()
        if not self._planned:
            self.runner.now = self._arrivals[0][0]
            self._plan()
        plan = self._planned.popleft()
        self.engine.executor.execute(plan)
        return self.engine.collect(plan)

    def _plan(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.runner.now:
            _, id, prompt, output = heapq.heappop(self._arrivals)
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            self.engine.add(np.arange(prompt, dtype=np.int32) % VOCABULARY, params, id)
        while len(self._planned) < 2:
            plan = self.engine.plan()
            if plan is None:
                return
            self._planned.append(plan)


def serve(
    pace: Pace,
    size: int,
    load: tuple[int, int, int],
    clients: int,
    requests: int,
    launch: float | None,
) -> dict[str, float]:
    """Clients that each send a request when the one before is answered; medians."""
    prompt, fewest, most = load
    runner = PacedRunner(pace, size, clients, prompt + most)
    simulation = Simulation(runner, launch=launch)
    numbers = iter(range(requests))
    draw = np.random.default_rng(1)
    outputs = draw.integers(fewest, most, requests, endpoint=True).tolist()
    sent: dict[int, float] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}

    def send(count: int) -> None:
        for number in itertools.islice(numbers, count):
            sent[number] = runner.now + draw.uniform(0.0, DELAY)
            simulation.send(sent[number], number, prompt, outputs[number])

    with patch("time.perf_counter", lambda: runner.now):
        send(clients)
        while len(last) < requests:
            for delta in simulation.launch():
                number = cast(int, delta.request.id)
                first.setdefault(number, runner.now)
                if delta.finish_reason is not None:
                    last[number] = runner.now
                    send(1)
    ttft = [first[n] - sent[n] for n in last]
    tpot = [(last[n] - first[n]) / (outputs[n] - 1) for n in last]
    return {
        "ttft_ms": round(1e3 * statistics.median(ttft), 1),
        "tpot_ms": round(1e3 * statistics.median(tpot), 2),
        "longest_step_ms": round(1e3 * runner.longest, 1),
        "tokens_per_second": round(sum(outputs) / runner.now),
    }


def long_prompt(pace: Pace, size: int, limit_ms: float | None) -> dict[str, float]:
    """A prompt of LONG tokens beside BESIDE sequences that decode, after a first such prompt."""
    runner = PacedRunner(pace, size, BESIDE + 1, 2 * LONG)
    limit = None if limit_ms is None else limit_ms / 1e3
    with patch("time.perf_counter", lambda: runner.now):
        simulation = Simulation(runner, limit)
        for number in range(BESIDE):
            simulation.send(0.0, number, 1, LONG)
        for number in (BESIDE, BESIDE + 1):
            for _ in range(20):
                simulation.launch()
            sent, runner.longest = runner.now, 0.0
            simulation.send(sent, number, LONG, 1)
            while not any(delta.request.id == number for delta in simulation.launch()):
                pass
    return {
        "ttft_ms": round(1e3 * (runner.now - sent), 1),
        "longest_step_ms": round(1e3 * runner.longest, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("1b", "8b"), nargs="+", default=["1b", "8b"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--requests", type=int, default=5, help="of each client")
    usual = 1e3 * (TARGETS["cuda"].launch_seconds or 0.0)
    parser.add_argument("--launch-ms", type=float, default=usual, help="0: no limit")
    parser.add_argument("--save", action="store_true", help="write results/step_sizes.json")
    options = parser.parse_args()
    launch = 1e-3 * options.launch_ms if options.launch_ms else None
    results: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    for model, size in itertools.product(options.model, options.sizes):
        pace = Pace(model)
        for load, clients in itertools.product(LOADS, options.clients):
            count = clients * options.requests
            row = serve(pace, max(size, clients), load, clients, count, launch)
            results.append({"model": model, "size": size, "load": load, "clients": clients, **row})
            print(f"{model}, steps of {size}, {clients} clients of {load}: {row}", flush=True)
        for limit in (None, LIMIT_MS[model]):
            row = long_prompt(pace, size, limit)
            prompts.append({"model": model, "size": size, "tpot_limit_ms": limit, **row})
            print(f"{model}, steps of {size}, a long prompt, limit {limit} ms: {row}", flush=True)
    if options.save:
        report = {
            "requests": options.requests,
            "launch_ms": options.launch_ms,
            "clients": results,
            "long_prompts": prompts,
        }
        print(f"saved {save('step_sizes', report)}")


if __name__ == "__main__":
    main()
