"""Time to compile, to verify and to read the programs of a model's steps for a GPU. Needs no GPU.

    python benchmarks/program_compile.py [--model 1b 8b 70b] [--ranks 1 2 4] [--rounds 3] [--save]

Steps are named ROWSxSEQUENCES: 64x64 decodes 64 sequences, 8192x8 reads eight prompts of 1024
tokens.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import save
from llama_cuda import MODELS
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.graph import Limits, default_logit_rows, llama_graph
from megavm.scheduler.llama.parallel import Parallel
from megavm.scheduler.run.buckets import choose_bucket
from megavm.scheduler.run.program_cache import file_of, read
from megavm.vm.cache import write_whole
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16
from megavm.vm.verify import verify

STEPS = ("1x1", "8x8", "64x64", "256x256", "512x1", "4096x1", "8192x8")
CONTEXT = 256  # of decode steps


def measure(model: str, step: str, rounds: int, parallel: Parallel) -> dict[str, Any]:
    """Medians of ``rounds``, in seconds; ``compile_s`` is without ``verify_s``.

    ``read_s``: the same program from its file.
    """
    rows, sequences = map(int, step.split("x"))
    config, target = MODELS[model], TARGETS["cuda"]
    options_for = functools.partial(default_options, "cuda", target.workers)
    blocks = -(-max(CONTEXT, rows // sequences) // target.block_size)
    logit_rows = default_logit_rows(sequences, rows)
    context = blocks * target.block_size
    limits = Limits(sequences, context, rows, logit_rows, sequences * blocks, target.block_size)
    bucket = choose_bucket(
        config,
        limits,
        options_for,
        rows,
        sequences,
        context,
        decode=rows == sequences,
        parallel=parallel,
    )
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        graph = llama_graph(config, limits, bucket, BF16, parallel)
        program = compile_graph(graph, options_for(bucket.rows), verified=False)
        compiled = time.perf_counter()
        verify(program, "cuda")
        verified = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program"
            write_whole(path, file_of(program))
            begin_reading = time.perf_counter()
            again = read(path)
            read_s = time.perf_counter() - begin_reading
        assert again is not None
        assert again.fingerprint() == program.fingerprint()
        times.append((compiled - begin, verified - compiled, read_s))
    compile_s, verify_s, read_s = (statistics.median(t) for t in zip(*times, strict=True))
    return {
        "model": model,
        "step": step,
        "ranks": parallel.ranks,
        "instructions": len(program),
        "barriers": len(program.barriers),
        "compile_s": round(compile_s, 3),
        "verify_s": round(verify_s, 3),
        "read_s": round(read_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b", "8b", "70b"])
    parser.add_argument("--step", nargs="+", default=STEPS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/program_compile.json")
    arguments = parser.parse_args()
    print(
        f"{'model':6}{'ranks':>6}{'step':>10}{'instructions':>14}{'compile s':>11}{'verify s':>10}"
        f"{'read s':>9}"
    )
    results = []
    for model, ranks, step in itertools.product(arguments.model, arguments.ranks, arguments.step):
        r = measure(model, step, arguments.rounds, Parallel(ranks))
        results.append(r)
        print(
            f"{model:6}{ranks:6}{step:>10}{r['instructions']:14}{r['compile_s']:11.2f}"
            f"{r['verify_s']:10.2f}{r['read_s']:9.3f}",
            flush=True,
        )
    if arguments.save:
        print(f"saved {save('program_compile', {'rounds': arguments.rounds, 'results': results})}")


if __name__ == "__main__":
    main()
