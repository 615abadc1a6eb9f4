"""`LLM.generate`: the first token of one prompt, and tokens/s of many prompts at once.

    python benchmarks/offline_cuda.py --model 1b 8b --save
    python benchmarks/offline_cuda.py --model tiny --machine cpu --load 4x8+4 --first 4

Prompts are random tokens, without a common beginning. Weights are random with the shapes of
Llama-3.2-1B and Llama-3.1-8B; on a GPU they are made there. All kernels are compiled before.

- ``--first``: for each of these lengths, the median time of `LLM.generate` for one prompt and one
  token, and how much of it the machine's own time is. The rest is the host's. It begins when
  nothing is compiled any more.
- ``--load``: "512x512+256" are 512 prompts of 512 tokens with answers of 256 tokens, all given to
  `LLM.generate` at once. It runs twice; the first time, programs are compiled meanwhile. The second
  time counts: tokens of answers per second.

Beside them stands what vLLM 0.26 reached on another H200, where that is known, with its defaults
for the number of sequences and the tokens of a step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench_server import settle
from environment import save
from megavm import LLM, SamplingParams
from random_llama import (
    FIRST_TOKEN,
    MODELS,
    VOCABULARY,
    compile_everything,
    make_random,
    write_model,
)

# vLLM 0.26 on one H200 (torch 2.11, bfloat16, random weights, its defaults): the first token in ms,
# tokens of answers per second.
VLLM_FIRST: Final = {("1b", 16): 8.4}
VLLM_LOADS: Final = {
    ("1b", "512x512+256"): 31_100,
    ("8b", "512x512+256"): 10_000,
    ("1b", "1024x128+128"): 32_400,
    ("8b", "1024x128+128"): 16_200,
}
WARM_UP: Final = 5  # prompts of each length that do not count


class Load(NamedTuple):
    """So many requests with prompts and answers of so many tokens."""

    requests: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Parse "512x512+256"."""
        requests, _, tokens = text.partition("x")
        prompt, _, output = tokens.partition("+")
        return cls(int(requests), int(prompt), int(output))

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.output}"


def prompt_of(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(FIRST_TOKEN, VOCABULARY - 1) for _ in range(length)]


def measure_first(llm: LLM, length: int, rounds: int) -> dict[str, Any]:
    """The first token of a prompt: medians."""
    draw = random.Random(length)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    times, machine = [], []
    llm.generate(prompt_of(draw, length), params)
    settle(os.getpid())  # programs for what may follow this prompt are being compiled
    for number in range(WARM_UP + rounds):
        prompt, before = prompt_of(draw, length), llm.runner.machine_seconds
        begin = time.perf_counter()
        output = llm.generate(prompt, params)[0]
        seconds = time.perf_counter() - begin
        assert len(output.outputs[0].token_ids) == 1
        if number >= WARM_UP:
            times.append(1e3 * seconds)
            machine.append(1e3 * (llm.runner.machine_seconds - before))
    return {
        "tokens": length,
        "first_token_ms": statistics.median(times),
        "machine_ms": statistics.median(machine),
        "rounds": rounds,
    }


def measure_load(llm: LLM, load: Load) -> dict[str, Any]:
    """Many prompts at once; the second of two runs."""
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    seconds = 0.0
    for seed in range(2):
        draw = random.Random(f"{load} {seed}")
        prompts = [prompt_of(draw, load.prompt) for _ in range(load.requests)]
        machine = llm.runner.machine_seconds
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        machine = llm.runner.machine_seconds - machine
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {load.output}:
            raise RuntimeError(f"answers have {counts} tokens, expected {load.output}")
    return {
        "load": str(load),
        "seconds": seconds,
        "machine_seconds": machine,
        "tokens_per_second": load.requests * load.output / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b", "8b"])
    parser.add_argument("--machine", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--first", type=int, nargs="*", default=[16, 128, 512], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=30, help="prompts of each length")
    parser.add_argument(
        "--load",
        type=Load.parse,
        nargs="*",
        default=[Load(512, 512, 256), Load(1024, 128, 128)],
        metavar="NxPROMPT+OUTPUT",
    )
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--save", action="store_true", help="write results/offline_cuda.json")
    args = parser.parse_args()
    if args.machine == "cuda":
        compile_everything(args.model)
    make_random(args.machine)
    longest = max([*args.first, *(load.prompt + load.output for load in args.load)])
    requests = max([1, *(load.requests for load in args.load)])
    sizes = {
        "max_model_len": longest + 1,
        "max_num_seqs": min(args.max_num_seqs, requests),
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    results: list[dict[str, Any]] = []

    def add(model: str, text: str, vllm: float | None, found: dict[str, Any]) -> None:
        results.append({"model": model, **found, "vllm": vllm})
        print(f"{model} {text}" + (f" (vLLM {vllm:,})" if vllm else ""), flush=True)
        if args.save:  # a run that is cut off keeps what it has
            save("offline_cuda", {"machine": args.machine, **sizes, "results": results})

    for model in args.model:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), MODELS[model])
            with LLM(folder, machine=args.machine, **sizes) as llm:
                for length in args.first:
                    found = measure_first(llm, length, args.rounds)
                    text = (
                        f"first token of {length}: {found['first_token_ms']:.2f} ms, "
                        f"of which the machine {found['machine_ms']:.2f}"
                    )
                    add(model, text, VLLM_FIRST.get((model, length)), found)
                for load in args.load:
                    found = measure_load(llm, load)
                    text = (
                        f"{load}: {found['tokens_per_second']:,.0f} tokens/s, the machine worked "
                        f"{found['machine_seconds'] / found['seconds']:.0%} of the time"
                    )
                    add(model, text, VLLM_LOADS.get((model, str(load))), found)


if __name__ == "__main__":
    main()
