"""Time to compile the kernels of a model, and time to load them from the cache.

    python benchmarks/kernel_compile.py [--model 1b 8b] [--rounds 3] [--save]

No GPU is needed. The cache is a temporary folder; every round begins with an empty one.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

from environment import save
from llama_cuda import MODELS
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.run.buckets import choose_bucket, compile_bucket
from megavm.scheduler.run.kernels import compile_kernels, default_limits, kernel_headers
from megavm.vm.cuda.compiler import compile_kernel
from megavm.vm.specialisation import program_header
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16

LONGEST = 131072  # context of the shapes that have no config.json


def config_of(model: str) -> LlamaConfig:
    """One of the known shapes, or the shipped model "stories"."""
    config = MODELS[model]
    return config if model == "stories" else replace(config, max_position_embeddings=LONGEST)


def measure(config: LlamaConfig, rounds: int) -> dict[str, Any]:
    """Median times of ``rounds``, for every kernel and for all kernels of a model.

    ``plan_s``: time to find out which kernels are needed; ``cold_s`` and ``warm_s`` include it.
    ``start_s``: time of a model's start with a warm cache: compile the program of one token and
    load its kernel.
    """
    plan, cold, warm, start = [], [], [], []
    seconds: dict[int, list[float]] = {}  # by number of the kernel
    facts: dict[int, dict[str, Any]] = {}
    before = os.environ.get("MEGAVM_CACHE_DIR")
    try:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="megavm-") as folder:
                os.environ["MEGAVM_CACHE_DIR"] = folder
                plan.append(_seconds(lambda: kernel_headers(config, BF16))[0])
                time_cold, compiled = _seconds(lambda: compile_kernels(config, BF16))
                time_warm, cached = _seconds(lambda: compile_kernels(config, BF16))
                start.append(_seconds(lambda: _start(config))[0])
            cold.append(time_cold)
            warm.append(time_warm)
            if any(c.kernel.cached for c in compiled) or not all(c.kernel.cached for c in cached):
                raise RuntimeError("the cache did not hold what was put there")
            for number, model_kernel in enumerate(compiled):
                kernel = model_kernel.kernel
                seconds.setdefault(number, []).append(kernel.seconds)
                facts[number] = {
                    "rows": list(model_kernel.rows),
                    "registers": kernel.registers,
                    "spill_stores": kernel.spill_stores,
                    "spill_loads": kernel.spill_loads,
                    "cubin_bytes": len(kernel.cubin),
                    "warnings": kernel.warnings,
                }
    finally:
        if before is None:
            os.environ.pop("MEGAVM_CACHE_DIR", None)
        else:
            os.environ["MEGAVM_CACHE_DIR"] = before
    kernels = [
        {"cold_s": statistics.median(seconds[number]), **found} for number, found in facts.items()
    ]
    return {
        "plan_s": statistics.median(plan),
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "start_s": statistics.median(start),
        "kernels": kernels,
    }


def _start(config: LlamaConfig) -> None:
    limits = default_limits(config)
    options_for = functools.partial(default_options, "cuda", TARGETS["cuda"].workers)
    bucket = choose_bucket(config, limits, options_for, 1, 1, 1)
    program = compile_bucket(config, limits, BF16, bucket, options_for)
    if not compile_kernel(program_header(program), TARGETS["cuda"].architecture).cached:
        raise RuntimeError("the kernel of one token is none of the model's kernels")


def _seconds(work: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    models = list(MODELS)
    parser.add_argument("--model", choices=models, nargs="+", default=models)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = {}
    print(f"{'model':12}{'rows':>10}{'cold s':>9}{'registers':>11}{'spills':>8}{'cubin KiB':>11}")
    for model in args.model:
        found = results[model] = measure(config_of(model), args.rounds)
        for kernel in found["kernels"]:
            rows = kernel["rows"]
            served = str(rows[0]) if len(rows) == 1 else f"{rows[0]}..{rows[-1]}"
            spills = kernel["spill_stores"] + kernel["spill_loads"]
            print(
                f"{model:12}{served:>10}{kernel['cold_s']:9.2f}{kernel['registers']:11}"
                f"{spills:8}{kernel['cubin_bytes'] / 1024:11.0f}"
            )
        print(
            f"{model:12}{'all':>10}{found['cold_s']:9.2f}   warm {found['warm_s']:.3f} s, "
            f"of which planning {found['plan_s']:.3f} s; start {found['start_s']:.3f} s",
            flush=True,
        )
    if args.save:
        print(f"saved {save('kernel_compile', {'rounds': args.rounds, 'models': results})}")


if __name__ == "__main__":
    main()
