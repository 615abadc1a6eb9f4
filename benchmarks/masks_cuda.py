"""The time per token beside a sequence whose masks depend on its last token, on a GPU.

    python benchmarks/masks_cuda.py --save
    python benchmarks/masks_cuda.py --model tiny --machine cpu --batch 2 --tokens 8 --rounds 1

Batches of Llama-3.2-1B (random weights) in which one sequence has a grammar (any JSON object) or
words to avoid, through `LLM.generate`. Three ways, in turns on the same machine:

- free: no sequence is restricted; launches have several steps.
- in turn: the host makes the masks of a step after the one before, then begins the step.
- behind: a step begins behind the one before, and what follows its LM head waits for the masks.
  Only a GPU does that.

Tokens of the last two must be equal. ``others`` and ``restricted``: median ms per token after the
first, of the unrestricted sequences and of the other one. ``machine``: share of the time in which
the GPU worked. With a grammar the restricted sequence may end early; then the others go on alone.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import save
from megavm import LLM, SamplingParams
from megavm.structured_outputs import StructuredOutputsParams
from megavm.vm.cuda.copies import Copies
from offline_cuda import prompt_of
from random_llama import MODELS, compile_everything, make_random, write_model

PROMPT = 16
KINDS = ["words", "grammar"]
WAYS = {"free": True, "in turn": False, "behind": True}  # whether copies reach a running kernel


def measure(
    llm: LLM, batch: int, tokens: int, special: dict[str, Any]
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """One batch: its times, and the tokens of every sequence."""
    draw = random.Random(batch)
    prompts = [prompt_of(draw, PROMPT) for _ in range(batch)]
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    params = [SamplingParams(**base)] * (batch - 1) + [SamplingParams(**base, **special)]
    machine, begin = llm.runner.machine_seconds, time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise RuntimeError(errors[0])
    rates = [output.timings["output_tokens_per_second"] for output in outputs]
    each = [1e3 / rate if rate else math.nan for rate in rates]
    times = {
        "others_ms": statistics.median(each[:-1] or each),
        "restricted_ms": each[-1],
        "machine": (llm.runner.machine_seconds - machine) / seconds,
    }
    return times, [tuple(output.outputs[0].token_ids) for output in outputs]


def compare(llm: LLM, batch: int, tokens: int, rounds: int, kind: str) -> dict[str, Any]:
    """The three ways in turns, after a round that does not count."""
    special: dict[str, Any] = {"bad_words": [llm.tokenizer.decode([500, 600])]}
    if kind == "grammar":
        special = {"structured_outputs": StructuredOutputsParams(json_object=True)}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    chosen = set()
    for number in range(1 + rounds):
        for way, beside in WAYS.items():
            Copies.beside = beside
            times, answers = measure(llm, batch, tokens, {} if way == "free" else special)
            if number:
                found[way].append(times)
            if way != "free":
                chosen.add(tuple(answers))
    if len(chosen) != 1:
        raise RuntimeError(f"batch {batch}, {kind}: tokens differ between ways or rounds")
    return {
        "batch": batch,
        "kind": kind,
        **{
            way: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for way, runs in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--machine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/masks_cuda.json")
    args = parser.parse_args()
    if args.machine == "cuda":
        compile_everything([args.model], (False, True))
    make_random(args.machine)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MODELS[args.model])
        sizes: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
        }
        with LLM(folder, machine=args.machine, **sizes) as llm:
            for batch in args.batch:
                for kind in args.kind:
                    found = compare(llm, batch, args.tokens, args.rounds, kind)
                    results.append(found)
                    text = "; ".join(
                        f"{way} {found[way]['others_ms']:.3f}, restricted "
                        f"{found[way]['restricted_ms']:.3f} ms, machine {found[way]['machine']:.1%}"
                        for way in WAYS
                    )
                    print(f"{args.model}, batch {batch}, {kind}: {text}", flush=True)
                    if args.save:  # a run that is cut off keeps what it has
                        save("masks_cuda", {"model": args.model, "results": results})


if __name__ == "__main__":
    main()
