"""Steps by the programs of more rows that may stand in for their own (scheduler/run/stand_ins.py).

    python benchmarks/stand_ins_cuda.py [--model 1b 8b] [--save]
    python benchmarks/stand_ins_cuda.py --model tiny --machine cpu --most-rows 256

Weights are random. A step has as many rows as its own program, of prompts of 128 tokens; times are
the machine's own, medians of ``--rounds``, in ms. The last column: what its parts of 64 rows take
together, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from environment import save
from megavm import LLM
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run.runner import Runner
from megavm.scheduler.run.stand_ins import STAND_IN_ROWS
from random_llama import MODELS, make_random, write_model

CHUNK: Final = 128


def step(rows: int) -> Step:
    """Prompts of CHUNK tokens, each with the logits of its last row."""
    places = np.arange(rows, dtype=np.int32)
    last = np.flatnonzero((places % CHUNK == CHUNK - 1) | (places == rows - 1)).astype(np.int32)
    return Step(places // CHUNK, places % CHUNK, last, min(rows, CHUNK))


def milliseconds(runner: Runner, rows: int, bucket: Bucket, rounds: int) -> float:
    """What a step takes by the program of a bucket."""
    taken = []
    for _ in range(rounds + 1):  # the first one loads the program
        before = runner.machine_seconds
        runner.run(step(rows), 1, None, bucket)
        taken.append(1e3 * (runner.machine_seconds - before))
    return statistics.median(taken[1:])


def measure(model: str, machine: str, most_rows: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each size of step; prints it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / model
        write_model(directory, MODELS[model])
        llm = LLM(
            directory,
            machine=machine,  # type: ignore[arg-type]
            max_model_len=2 * CHUNK,
            max_num_seqs=-(-most_rows // CHUNK),
            max_num_batched_tokens=most_rows,
        )
    results = []
    with llm:
        runner = llm.runner
        runner.close()  # compile nothing in the background
        blocks = runner.block_table.shape[1]
        for slot in range(runner.max_num_seqs):
            runner.write_blocks(
                slot, 0, np.arange(slot * blocks, (slot + 1) * blocks, dtype=np.int32)
            )
        part = milliseconds(runner, STAND_IN_ROWS, runner.programs.stand_in(STAND_IN_ROWS), rounds)
        rows = 2 * STAND_IN_ROWS
        while rows <= most_rows:
            by_program, size = {}, rows
            while size <= most_rows:
                by_program[size] = milliseconds(
                    runner, rows, runner.programs.stand_in(size), rounds
                )
                size *= 2
            parts = rows // STAND_IN_ROWS * part
            results.append({"rows": rows, "by_program_ms": by_program, "parts_ms": parts})
            programs = "  ".join(f"{size}: {ms:.2f}" for size, ms in by_program.items())
            print(f"{model} {rows:5} rows  {programs}  in parts: {parts:.2f}", flush=True)
            rows *= 2
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b"])
    parser.add_argument("--machine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--most-rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write results/stand_ins_cuda.json")
    args = parser.parse_args()
    make_random(args.machine)
    results = {m: measure(m, args.machine, args.most_rows, args.rounds) for m in args.model}
    if args.save:
        save(f"stand_ins_{args.machine}", {"results": results})


if __name__ == "__main__":
    main()
