"""The time per token with the usual sampling parameters, beside that of greedy choices, on a GPU.

    python benchmarks/sampling_cuda.py --save
    python benchmarks/sampling_cuda.py --model tiny --machine cpu --batch 2 --tokens 8 --rounds 1

Batches of Llama-3.2-1B (random weights) through `LLM.generate`, all sequences with the same
parameters, in turns on the same machine. A choice costs what its distribution makes it cost:

- flat: the logits of random weights, whose standard deviation is about 1. Of 128,256 tokens some
  90,000 share nine tenths of the probability.
- peaked: the last norm's gain is ``--gain`` times as large, so that a few tokens have most of it,
  as in a trained model.

The figure is the median over sequences of the ms per token after the first; the least of the
rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment import save
from megavm import LLM, SamplingParams
from megavm.scheduler.llama.checkpoint import Checkpoint
from offline_cuda import prompt_of
from random_llama import (
    MODELS,
    compile_everything,
    make_random,
    multiply_last_norm,
    write_model,
)

PROMPT = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "top-p": {"temperature": 0.6, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "all": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "bias": {"temperature": 0.0, "logit_bias": {500: 1.0}},
}


def milliseconds(llm: LLM, batch: int, tokens: int, setting: dict[str, Any]) -> float:
    """Median ms per token of a batch."""
    draw = random.Random(batch)
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **setting) for i in range(batch)
    ]
    outputs = llm.generate([prompt_of(draw, PROMPT) for _ in range(batch)], params)
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise RuntimeError(errors[0])
    return statistics.median(1e3 / o.timings["output_tokens_per_second"] for o in outputs)


def least(
    llm: LLM, batch: int, tokens: int, rounds: int, settings: Sequence[str]
) -> dict[str, float]:
    """The least ms per token of each setting, in turns, after a round that does not count."""
    runs = [
        {name: milliseconds(llm, batch, tokens, SETTINGS[name]) for name in settings}
        for _ in range(1 + rounds)
    ][1:]
    return {name: min(run[name] for run in runs) for name in settings}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b"])
    parser.add_argument("--machine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--setting", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--gain", type=float, nargs="+", default=[1.0, 6.0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write results/sampling_cuda.json")
    args = parser.parse_args()
    if args.machine == "cuda":
        compile_everything(args.model, (False, True))
    make_random(args.machine)
    random_tensor = Checkpoint.tensor
    sizes: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": max(args.batch),
        "max_num_batched_tokens": 512,
    }
    results = []
    for model in args.model:
        for gain in args.gain:
            Checkpoint.tensor = random_tensor  # type: ignore[method-assign]
            multiply_last_norm(gain)
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder), MODELS[model])
                with LLM(folder, machine=args.machine, **sizes) as llm:
                    for batch in args.batch:
                        best = least(llm, batch, args.tokens, args.rounds, args.setting)
                        results.append({"model": model, "gain": gain, "batch": batch, "ms": best})
                        text = ", ".join(f"{name} {ms:.3f}" for name, ms in best.items())
                        print(f"{model}, gain {gain:g}, batch {batch}, ms: {text}", flush=True)
                        if args.save:  # a run that is cut off keeps what it has
                            save("sampling_cuda", {"results": results})


if __name__ == "__main__":
    main()
