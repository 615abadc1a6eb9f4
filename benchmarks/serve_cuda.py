"""`megavm serve` under the load of `megavm bench serve`, beside `LLM.generate`.

    python benchmarks/serve_cuda.py --model 1b 8b --save
    python benchmarks/serve_cuda.py --model tiny --machine cpu --concurrency 1 8 --scale 0.1

Server and client are processes of this computer. Prompts are random tokens, 160 of them; every
answer has 128. The client keeps 1, 8, 64 and 256 requests in flight. Weights are random with the
shapes of Llama-3.2-1B and Llama-3.1-8B, and the vocabulary has as many tokens as theirs, so that
text costs what it does there.

The server is the command `megavm serve` in all but two things. Weights are made on the GPU and not
read from a file. Requests have the model's default parameters, which are greedy or `--sampling`:
kernels of programs of the other kind are not compiled behind its start. All others are compiled
before the first server starts, side by side.

For each model:

1. If one of the concurrencies is 1, `LLM.generate` in a process of its own, one prompt at a time:
   TPOT as the client computes it, (time of the last token - time of the first) / (tokens - 1), and
   the time of the first token.
2. For each concurrency: requests that do not count, until the programs of this size are there; a
   pause until the server does nothing any more; then `megavm bench serve`.

3. As many requests that begin at once, with long answers: steps in which all of them decode. The
   machine's time is its own; the share of the time in which it does nothing is what is left. This
   is measured twice: at first, the programs of these contexts are compiled meanwhile.

A row has medians and the client's share of a core. "step" is the time in which the engine had work,
divided by its steps; "host" is the share of planning and collecting in it, "idle" that in which the
machine ran nothing. Rows are saved as soon as they are measured, also into $OUT if that is set.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench_server import INPUT, OUTPUT, Server, bench, bench_command
from environment import save, version
from megavm.vm.target import TARGETS
from random_llama import (
    FIRST_TOKEN,
    MODELS,
    VOCABULARY,
    compile_everything,
    make_random,
    multiply_last_norm,
    samples,
    write_model,
)

GAIN: Final = 6.0  # the last norm is multiplied by it if requests sample
STEADY_OUTPUT: Final = 3000
STEADY_SECONDS: Final = 1.0
# Measured requests by concurrency; those that do not count are as many as fly at once, twice.
REQUESTS: Final = {
    "1b": {1: 60, 8: 160, 64: 640, 256: 1280},
    "8b": {1: 24, 8: 80, 64: 384, 256: 1024},
    "tiny": {1: 60, 8: 160, 64: 640, 256: 1280},
}
# vLLM 0.26.0, its HTTP server on one H200 of the same kind (torch 2.11, bfloat16, random weights,
# its defaults): TTFT in ms, TPOT in ms, tokens/s. Its report does not say if medians or means.
VLLM: Final = {
    "1b": {
        1: (13.3, 2.05, 458),
        8: (39.0, 2.44, 2_926),
        64: (128.0, 3.57, 13_903),
        256: (268.0, 13.0, 14_194),
    }
}
# With one request in flight, TPOT may exceed that of LLM.generate by this share.
TPOT_LIMIT: Final = 0.03
PACKAGES: Final = (
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "aiohttp",
    "tokenizers",
)


# Processes: this file again, with a role.


def run_server(machine: str, event_loop: str, directory: str, options: list[str]) -> int:
    """`megavm serve` with random weights, with uvloop and httptools or as if they were absent."""
    if event_loop == "asyncio":
        for name in ("uvloop", "httptools"):
            sys.modules[name] = None  # type: ignore[assignment]
    from megavm.cli import main as megavm
    from megavm.server.engine import warm_up

    make_random(machine)
    if samples(directory):
        multiply_last_norm(GAIN)
    # No request is of the other kind; compiling its kernels would compete with the measurement.
    warm_up._other_programs = lambda runner, sampled: []
    return megavm(["serve", directory, *options])


def run_generate(machine: str, directory: str, requests: int, sizes: dict[str, int]) -> None:
    """`LLM.generate` of one prompt after the other; prints medians as JSON."""
    from megavm import LLM

    make_random(machine)
    if samples(directory):
        multiply_last_norm(GAIN)
    draw = random.Random(1)
    tpot, ttft, seconds = [], [], []
    with LLM(directory, machine=machine, **sizes) as llm:  # type: ignore[arg-type]
        params = llm.default_params(max_tokens=OUTPUT, ignore_eos=True)
        for number in range(requests + 3):
            prompt = [draw.randrange(FIRST_TOKEN, VOCABULARY - 1) for _ in range(INPUT)]
            begin = time.perf_counter()
            timings = llm.generate(prompt, params)[0].timings
            if number >= 3:  # the first ones compile programs
                seconds.append(time.perf_counter() - begin)
                tpot.append(1e3 / timings["output_tokens_per_second"])
                ttft.append(1e3 * timings["time_to_first_token_seconds"])
    result = {
        "requests": requests,
        "median_tpot_ms": statistics.median(tpot),
        "median_ttft_ms": statistics.median(ttft),
        "output_throughput": OUTPUT / statistics.median(seconds),
    }
    print("generate", json.dumps(result), flush=True)


def role(name: str, machine: str, *rest: str) -> list[str]:
    """The command line of a process of this file."""
    return [sys.executable, __file__, "--role", name, "--machine", machine, "--", *rest]


def generate(
    machine: str, directory: Path, requests: int, sizes: dict[str, int]
) -> dict[str, float]:
    """Results of ``run_generate`` in a process of its own."""
    command = role("generate", machine, str(directory), str(requests), json.dumps(sizes))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    result: dict[str, float] = json.loads(done.stdout.split("generate ", 1)[1])
    return result


# The measurement.


class Progress:
    """Prints lines with the time since the beginning, and knows the deadline."""

    def __init__(self, limit: float) -> None:
        self.begin, self.limit = time.perf_counter(), limit

    def __call__(self, line: str) -> None:
        print(f"[{self.seconds:6.1f} s] {line}", flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    @property
    def late(self) -> bool:
        return self.seconds > self.limit


def measure_row(server: Server, concurrency: int, requests: int, folder: Path) -> dict[str, Any]:
    """One concurrency: requests that do not count, a pause, and the measurement."""
    warm_up = max(2 * concurrency, 4)
    bench(server.url, concurrency, warm_up, 1000 + concurrency, folder / "warm_up.json")
    settled = server.settle()
    before, cpu = server.metrics(), server.cpu_seconds()
    report = bench(server.url, concurrency, requests, concurrency, folder / "bench.json")
    server_cpu = server.cpu_seconds() - cpu
    counters = {n: v - before[n] for n, v in server.metrics().items() if n.endswith("_total")}
    busy, steps = counters["engine_busy_seconds_total"], counters["engine_steps_total"]
    host = counters["engine_plan_seconds_total"] + counters["engine_collect_seconds_total"]
    return {
        "concurrency": concurrency,
        "settled": settled,
        "step_ms": 1e3 * busy / max(steps, 1),
        "host_share": host / busy if busy else 0.0,
        "idle_share": 1 - counters["engine_run_seconds_total"] / busy if busy else 0.0,
        "server_cores": server_cpu / report["duration"],
        "engine": counters,
        "bench": report,
    }


def measure_steady(server: Server, concurrency: int, folder: Path) -> dict[str, Any]:
    """Steps in which all requests decode, each to a client that reads its stream.

    Raises RuntimeError if the requests do not all run at the same time.
    """
    report = folder / "steady.json"
    command = bench_command(server.url, concurrency, concurrency, 77, report, STEADY_OUTPUT)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        try:
            limit = time.perf_counter() + 30
            while True:
                now = server.metrics()
                if now["num_requests_running"] == concurrency and not now["num_requests_waiting"]:
                    break
                if client.poll() is not None or time.perf_counter() > limit:
                    raise RuntimeError(f"{concurrency} requests never ran at the same time")
            time.sleep(STEADY_SECONDS / 4)  # until all have left their prompts behind
            before, begin = server.end_of_launch()
            while time.perf_counter() < begin + STEADY_SECONDS:
                time.sleep(STEADY_SECONDS / 10)
                after, end = server.end_of_launch()
                if after["num_requests_running"] != concurrency:
                    raise RuntimeError("requests ended meanwhile: STEADY_OUTPUT is too short")
            seconds = end - begin
        finally:
            client.kill()
    took = {
        name.removeprefix("engine_"): after[f"{name}_total"] - before[f"{name}_total"]
        for name in ("engine_steps", "engine_launches", "engine_late_launches",
                     "engine_plan_seconds", "engine_collect_seconds",
                     "engine_run_seconds", "engine_busy_seconds")
    }  # fmt: skip
    steps = took["steps"]
    return {
        "concurrency": concurrency,
        "seconds": seconds,
        "steps": steps,
        "launches": took["launches"],
        "late_launches": took["late_launches"],
        "step_ms": 1e3 * seconds / steps,
        "machine_ms": 1e3 * took["run_seconds"] / steps,
        "plan_ms": 1e3 * took["plan_seconds"] / steps,
        "collect_ms": 1e3 * took["collect_seconds"] / steps,
        "host_share": (took["plan_seconds"] + took["collect_seconds"]) / took["run_seconds"],
        "idle_share": 1 - took["run_seconds"] / seconds,
    }


def describe_steady(model: str, row: dict[str, Any]) -> str:
    """What a steady step takes."""
    return (
        f"{model:>5} {row['concurrency']:5} decode: a step {row['step_ms']:.2f} ms, the machine"
        f" {row['machine_ms']:.2f} and idle {row['idle_share']:.1%}, {row['late_launches']:.0f} of"
        f" {row['launches']:.0f} launches were late; planning and collecting"
        f" {row['plan_ms']:.2f} + {row['collect_ms']:.2f} ms, {row['host_share']:.1%} of the"
        " machine's time"
    )


def describe_row(model: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    report = row["bench"]
    text = (
        f"{model:>5} {row['event_loop']:>7} {row['concurrency']:5} {report['median_ttft_ms']:9.1f}"
        f" {report['median_tpot_ms']:8.2f} {report['output_throughput']:9.0f}"
        f" {row['step_ms']:8.2f} {row['host_share']:6.0%} {row['idle_share']:6.1%}"
        f" {report['client']['load']:7.0%}"
    )
    other = VLLM.get(model, {}).get(row["concurrency"])
    if other is None or row["layers"] < MODELS[model].num_layers:
        return text
    ahead = (
        report["median_ttft_ms"] < other[0],
        report["median_tpot_ms"] < other[1],
        report["output_throughput"] > other[2],
    )
    said = (
        "yes"
        if all(ahead)
        else "no: "
        + ", ".join(
            name
            for name, first in zip(("TTFT", "TPOT", "tokens/s"), ahead, strict=True)
            if not first
        )
    )
    return f"{text}   {other[0]:7.1f} {other[1]:6.2f} {other[2]:8.0f} {said}"


HEAD: Final = (
    f"{'model':>5} {'loop':>7} {'conc.':>5} {'TTFT ms':>9} {'TPOT ms':>8} {'tokens/s':>9}"
    f" {'step ms':>8} {'host':>6} {'idle':>6} {'client':>7}"
    f"   {'vLLM':>7} {'TPOT':>6} {'tokens/s':>8} ahead"
)


def measure_model(
    model: str, args: argparse.Namespace, progress: Progress, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yields the results so far after every measurement."""
    directory = folder / model
    config = MODELS[model]
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    write_model(directory, config, args.sampling)
    sizes = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.concurrency),
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    result: dict[str, Any] = {"model": model, "machine": args.machine, **sizes}
    result |= {"starts": [], "rows": []}
    # Answers are equally long, so that requests come in waves: two at least, and all whole.
    counts = {c: c * max(2, round(args.scale * n / c)) for c, n in REQUESTS[model].items()}
    if 1 in args.concurrency:
        progress(f"{model}: LLM.generate")
        result["generate"] = generate(args.machine, directory, counts[1], sizes)
        progress(
            f"{model}: LLM.generate: TPOT {result['generate']['median_tpot_ms']:.3f} ms,"
            f" TTFT {result['generate']['median_ttft_ms']:.1f} ms"
        )
        yield result
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    options += ["--machine", args.machine, "--port", "0", "--max-queue", "1024", "--quiet"]
    for event_loop in args.event_loop:
        if progress.late:
            break
        command = role("serve", args.machine, event_loop, str(directory), *options)
        log = folder / f"{model}_{event_loop}.log"
        with contextlib.closing(Server(command, log)) as server:
            settled = server.settle()
            start = {"event_loop": event_loop, "seconds": server.seconds, "settled": settled}
            result["starts"].append(start)
            progress(f"{model}: ready after {server.seconds:.1f} s, settled: {settled}")
            for concurrency in args.concurrency:
                if progress.late:
                    progress(f"{model}: no time is left for concurrency {concurrency}")
                    break
                row = {"event_loop": event_loop, "layers": config.num_layers}
                row |= measure_row(server, concurrency, counts[concurrency], folder)
                try:
                    for name in ("steady_at_first", "steady"):
                        row[name] = measure_steady(server, concurrency, folder)
                        progress(describe_steady(model, row[name]))
                        server.settle()
                except RuntimeError as error:  # the client may be too slow for that
                    progress(f"{model}: {error}")
                result["rows"].append(row)
                progress(f"{describe_row(model, row)}  settled: {row['settled']}")
                yield result


def summary(results: dict[str, dict[str, Any]]) -> str:
    """The table of all rows, and TPOT beside that of LLM.generate."""
    lines = [HEAD]
    for model, result in results.items():
        lines += [describe_row(model, row) for row in result["rows"]]
    for model, result in results.items():
        lines += [describe_steady(model, r["steady"]) for r in result["rows"] if "steady" in r]
    for model, result in results.items():
        for row in result["rows"]:
            if row["concurrency"] > 1:
                continue
            served, direct = row["bench"]["median_tpot_ms"], result["generate"]["median_tpot_ms"]
            share = served / direct - 1
            lines.append(
                f"{model}: TPOT at concurrency 1 {served:.3f} ms, of LLM.generate {direct:.3f} ms:"
                f" {share:+.1%} (limit {TPOT_LIMIT:+.0%}), {row['event_loop']}"
            )
    slow = [
        f"{model} at {row['concurrency']}"
        for model, result in results.items()
        for row in result["rows"]
        if row["bench"]["client"]["was_bottleneck"]
    ]
    if slow:
        lines.append(f"the client was a bottleneck: {', '.join(slow)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b", "8b"])
    parser.add_argument("--machine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", choices=(1, 8, 64, 256), default=[1, 8, 64, 256]
    )
    parser.add_argument(
        "--event-loop",
        choices=("uvloop", "asyncio"),
        nargs="+",
        default=["asyncio" if version("uvloop") == "absent" else "uvloop"],
        help="of the server; asyncio: without uvloop and httptools",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    parser.add_argument(
        "--layers", type=int, help="fewer layers: steps are as short as those of a faster GPU"
    )
    parser.add_argument(
        "--sampling",
        type=json.loads,
        metavar="JSON",
        help='default parameters, for all requests, such as \'{"temperature": 0.6, "top_p": 0.9}\';'
        " the distributions are like a trained model's (greedy)",
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    size = TARGETS["cuda"].max_num_batched_tokens
    parser.add_argument("--max-num-batched-tokens", type=int, default=size)
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="begin no row after this time (420)"
    )
    parser.add_argument("--save", action="store_true", help="write results/serve_cuda.json")
    parser.add_argument("--role", choices=("serve", "generate"), help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "serve":
        event_loop, directory, *options = args.rest
        raise SystemExit(run_server(args.machine, event_loop, directory, options))
    if args.role == "generate":
        folder, requests, sizes = args.rest
        run_generate(args.machine, folder, int(requests), json.loads(sizes))
        return

    progress = Progress(args.seconds)
    results: dict[str, dict[str, Any]] = {}
    facts = {
        "sampling": args.sampling or "greedy",
        "input_tokens": INPUT,
        "output_tokens": OUTPUT,
        "packages": {name: version(name) for name in PACKAGES},
        "vllm_0_26_on_another_h200": [
            {"model": model, "concurrency": concurrency}
            | dict(zip(("ttft_ms", "tpot_ms", "tokens_per_second"), figures, strict=True))
            for model, rows in VLLM.items()
            for concurrency, figures in rows.items()
        ],
    }
    if args.machine == "cuda":
        progress("compiling kernels")
        count = compile_everything(args.model, (args.sampling is not None,))
        facts["kernels"] = {"compiled": count, "seconds": round(progress.seconds, 1)}
        progress(f"compiled {count} kernels")
    out = os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.model:
            try:
                for result in measure_model(model, args, progress, Path(folder)):
                    results[model] = result
                    _write(args, {**facts, "results": list(results.values())}, out)
            except (RuntimeError, subprocess.SubprocessError, OSError) as error:
                # The other model can still be measured.
                progress(f"{model} failed: {error}")
            finally:
                if out is not None:
                    for log in Path(folder).glob(f"{model}_*.log"):
                        shutil.copy(log, out)
    print(summary(results), flush=True)


def _write(args: argparse.Namespace, report: dict[str, Any], out: str | None) -> None:
    name = f"serve_{args.machine}{'_sampled' if args.sampling else ''}"
    if args.save:
        path = save(name, report)
    if out is not None:
        if args.save:
            shutil.copy(path, out)
        else:
            (Path(out) / f"{name}.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
