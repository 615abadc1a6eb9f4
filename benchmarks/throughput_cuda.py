"""Steps of many rows on a GPU: batches that decode, and prompts, beside what libraries reach.

    python benchmarks/throughput_cuda.py --model 1b 8b --decode 1 8 16 64 256 \\
        --prefill 1x4096 8x1024 1x8000 --torch --products --save

Weights are random with the model's shapes. Times are medians of GPU events around a launch and
include everything from embedding to choice of tokens. The floor is the larger of two times of the
same run: reading the weights and the keys and values, and the multiplications at the rate of
cuBLAS for a product of 8192 x 8192 x 8192.

``--tensor-parallel-size``: several GPUs divide the model; the floor is then that of all of them.
``--torch``: a step of torch.compile at the same batch (torch_baseline.py). ``--products``: the
products of a layer by cuBLAS, and causal attention of a prompt by torch (the fastest of its
kernels), each alone.

At the end it says which batches stand out: those that take longer than a larger one, or more time
for a row than a smaller one. A model whose shapes nobody has measured may have such sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from environment import save
from llama_cuda import (
    MODELS,
    add_option_argument,
    kv_bytes,
    make_runner,
    measure,
    prepare,
    record_steps,
    weight_bytes,
    with_contexts,
)
from megavm.profiler.environment import measure_multiplication
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.parallel import Parallel
from megavm.scheduler.run.runner import Runner
from megavm.vm.cuda.machine import CudaMachine
from read_floor import ReadFloor, time_gpu


def layer_products(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """The weights of a layer and of the LM head: name -> (rows, columns)."""
    hidden, wide, d = config.hidden_size, config.intermediate_size, config.head_dim
    return {
        "qkv": ((config.num_heads + 2 * config.num_kv_heads) * d, hidden),
        "out": (hidden, config.num_heads * d),
        "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
        "lm_head": (config.vocab_size, hidden),
    }


def operations(config: LlamaConfig, rows: int, logit_rows: int, pairs: int) -> int:
    """Floating-point operations of a step whose rows attend to ``pairs`` tokens altogether."""
    shapes = layer_products(config)
    head_rows, head_columns = shapes.pop("lm_head")
    layer = sum(2 * rows * n * k for n, k in shapes.values())
    attention = 4 * pairs * config.num_heads * config.head_dim
    return config.num_layers * (layer + attention) + 2 * logit_rows * head_rows * head_columns


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A step of ``count`` prompts of ``length`` tokens after ``before`` tokens each.

    ``beside``: so many other sequences decode a token each, with a context of ``context`` tokens.
    """

    count: int
    length: int
    before: int = 0
    beside: int = 0
    context: int = 0

    @property
    def sequences(self) -> int:
        return self.beside + self.count

    @property
    def rows(self) -> int:
        return self.beside + self.count * self.length

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.before + self.length, self.context if self.beside else 0)

    @property
    def pairs(self) -> int:
        """Tokens to which all rows attend."""
        causal = self.length * self.before + self.length * (self.length + 1) // 2
        return self.count * causal + self.beside * self.context

    @property
    def earlier(self) -> int:
        """Tokens whose keys and values are read."""
        return self.count * self.before + self.beside * self.context

    def __str__(self) -> str:
        text = f"{self.count}x{self.length}" + (f"+{self.before}" if self.before else "")
        return text + (f" beside {self.beside}" if self.beside else "")

    def step(self, runner: Runner) -> Step:
        """The step, after preparing the runner's memory for it."""
        prepare(runner, self.sequences, 1)
        each = np.arange(self.before, self.before + self.length, dtype=np.int32)
        last = self.beside + np.arange(1, self.count + 1, dtype=np.int32) * self.length - 1
        decoding = np.arange(self.beside, dtype=np.int32)
        sequences = np.arange(self.beside, self.sequences, dtype=np.int32)
        return Step(
            np.concatenate([decoding, np.repeat(sequences, self.length)]),
            np.concatenate(
                [np.full(self.beside, self.context - 1, np.int32), np.tile(each, self.count)]
            ),
            np.concatenate([decoding, last.astype(np.int32)]),
            self.longest,
            wants_logits=False,
        )


def measure_prompts(runner: Runner, prompts: Prompts, rounds: int) -> float:
    """Median microseconds of a step of prompts."""
    step = prompts.step(runner)
    runner.run(step)
    executable: Any = runner.programs.executable(
        runner.programs.bucket(prompts.rows, prompts.sequences, step.context, decode=False)
    )
    time = time_gpu(executable.launch, rounds, warm_up=1)
    executable.finish()
    return time


def measure_products(config: LlamaConfig, rows: int) -> dict[str, float]:
    """Microseconds of each product of a layer by cuBLAS, for ``rows`` rows."""
    times = {}
    for name, (n, k) in layer_products(config).items():
        # Several copies of the weights: none of them stays in the L2 cache.
        copies = max(1, (200 << 20) // (2 * n * k))
        weights = [torch.randn(n, k, device="cuda").to(torch.bfloat16) for _ in range(copies)]
        x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)

        def work(x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> None:
            for weight in weights:
                F.linear(x, weight)

        times[name] = time_gpu(work, 20) / copies
    return times


def measure_attention(config: LlamaConfig, count: int, length: int) -> float:
    """Microseconds of causal attention of prompts by the fastest kernel of torch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads(number: int) -> torch.Tensor:
        shape = (count, number, length, config.head_dim)
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    q, k, v = (heads(config.num_heads) for _ in range(3))
    times = []
    for kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kind):
            times.append(
                time_gpu(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 20)
            )
    return min(times)


def prompts(text: str) -> Prompts:
    """Parse "8x1024", or "8x1024+512": prompts x tokens, after tokens read before."""
    size, _, before = text.partition("+")
    count, length = size.split("x")
    return Prompts(int(count), int(length), int(before or 0))


def contexts_of(batch: int, args: argparse.Namespace) -> npt.NDArray[np.int32]:
    """The context of each sequence of a batch that decodes."""
    contexts = np.full(batch, args.context, np.int32)
    if args.spread:
        draw = np.random.default_rng(1).lognormal(np.log(args.context), args.spread, batch)
        contexts[:] = np.clip(draw, args.steps, args.longest)
    if args.longest:
        contexts[batch // 2] = args.longest
    return contexts


def standing_out(times: Mapping[int, float]) -> Iterator[str]:
    """A sentence for each batch of ``times``, us by batch, that takes longer than the next larger
    one, or more time for a row than the next smaller one."""
    for (few, before), (many, after) in itertools.pairwise(sorted(times.items())):
        pair = f"{few} rows take {before:.0f} us and {many} take {after:.0f}"
        if after < before:
            yield f"{pair}: more rows take less time"
        elif after / many > before / few:
            yield f"{pair}: a row takes {after / many:.1f} in place of {before / few:.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b"])
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--decode", type=int, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--context", type=int, default=256, help="of the batches that decode")
    parser.add_argument(
        "--longest", type=int, default=0, metavar="TOKENS", help="context of one of a batch"
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="SIGMA",
        help="contexts are lognormal: the median is --context, this the deviation of the logarithm,"
        " and --longest the largest",
    )
    parser.add_argument("--prefill", type=prompts, nargs="*", default=[], metavar="NxLENGTH")
    parser.add_argument(
        "--beside", type=int, default=0, metavar="BATCH", help="rows that decode beside the prompts"
    )
    parser.add_argument("--steps", type=int, default=8, help="decode steps per launch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torch", action="store_true", help="torch.compile beside the batches")
    parser.add_argument("--products", action="store_true", help="cuBLAS and torch's attention")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--exchange", choices=("all_reduce", "all_gather"), default="all_gather")
    add_option_argument(parser)
    parser.add_argument("--trace", type=Path, help="folder for a trace of each measured step")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.spread and not args.longest:
        parser.error("--spread needs --longest")
    if args.torch and args.longest:
        parser.error("--torch has batches whose contexts are all the same, so not with --longest")
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)

    ranks: int = args.tensor_parallel_size
    machine = CudaMachine(range(ranks))
    parallel = Parallel(ranks, args.exchange)
    rate = measure_multiplication("cuda")["flops_per_second_median"]
    floor = ReadFloor(4 << 30)
    bandwidth = floor.bandwidth()
    print(f"{rate / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s")
    results: list[dict[str, Any]] = []

    def limit(config: LlamaConfig, rows: int, logit_rows: int, pairs: int, read: int) -> float:
        flops = operations(config, rows, logit_rows, pairs)
        return 1e6 / ranks * max(flops / rate, (weight_bytes(config) + read) / bandwidth)

    def add(model: str, found: dict[str, Any]) -> None:
        results.append(found)
        others = (f"{k} {v:.0f}" for k, v in found.items() if k.endswith("_us") and k != "floor_us")
        text = f"{model} {found['kind']} {found['what']:>12}: {found['us']:9.1f} us, floor "
        share = 100 * found["floor_us"] / found["us"]
        print(f"{text}{found['floor_us']:8.1f} ({share:.1f} %)", *others, flush=True)
        if args.save:  # a run that is cut off keeps what it has
            name = f"throughput_cuda_{model}" + (f"_{ranks}" if ranks > 1 else "")
            facts = {"model": model, "flops": rate, "bandwidth": bandwidth}
            facts |= {"options": dict(args.option)} if args.option else {}
            save(name, facts | {"results": results})

    for model in args.model:
        results.clear()
        config = MODELS[model]
        if args.layers:
            config = dataclasses.replace(config, num_layers=args.layers)
        batch = max(args.decode, default=1)
        measured = [
            dataclasses.replace(size, beside=args.beside, context=args.context)
            for size in args.prefill
        ]
        rows = max([batch, *(step.rows for step in measured)])
        if args.decode:
            length = max(args.context, args.longest) + 2 * args.steps
            runner = make_runner(config, machine, length, batch, parallel, **dict(args.option))
            for batch in args.decode:
                # Contexts of the middle of a launch are those that are asked for.
                context, contexts = args.context - args.steps // 2, contexts_of(batch, args)
                cached = contexts - args.steps // 2
                us = measure(runner, batch, context, args.steps, args.rounds, cached)["us_per_step"]
                tokens = int(contexts.sum())
                least = limit(config, batch, batch, tokens, kv_bytes(config, tokens))
                found = {"kind": "decode", "what": batch, "context": args.context, "us": us}
                if args.longest:
                    found["longest"], found["mean"] = args.longest, tokens / batch
                if args.spread:
                    found["spread"] = args.spread
                found["floor_us"] = least
                if args.torch:
                    from torch_baseline import measure as measure_torch

                    found["torch_us"] = measure_torch(config, batch, args.context - 8, args.rounds)
                if args.products:
                    each = measure_products(config, batch)
                    head = each.pop("lm_head")
                    found["products_us"] = config.num_layers * sum(each.values()) + head
                add(model, found)
                if args.trace:
                    path = str(args.trace / f"{model}_decode_{batch}.megatrace")
                    step = with_contexts(prepare(runner, batch, context), cached)
                    record_steps(runner, step, 2, path)
            del runner
            gc.collect()
            torch.cuda.empty_cache()
            for sentence in standing_out({found["what"]: found["us"] for found in results}):
                print(f"{model} stands out: {sentence}")
        if not args.prefill:
            continue
        runner = make_runner(
            config,
            machine,
            max(step.longest for step in measured) + 1,
            max(step.sequences for step in measured),
            parallel,
            rows=rows,
            **dict(args.option),
        )
        for step in measured:
            us = measure_prompts(runner, step, max(3, args.rounds // 4))
            read = kv_bytes(config, step.earlier)
            least = limit(config, step.rows, step.sequences, step.pairs, read)
            found = {"kind": "prefill", "what": str(step), "us": us, "floor_us": least}
            if args.products:
                times = measure_products(config, step.rows)
                times.pop("lm_head")
                found["products_us"] = config.num_layers * sum(times.values())
                if not step.earlier:
                    alone = measure_attention(config, step.count, step.length)
                    found["attention_us"] = config.num_layers * alone
            add(model, found)
            if args.trace:
                path = args.trace / f"{model}_prefill_{step}.megatrace".replace(" ", "_")
                record_steps(runner, step.step(runner), 1, str(path))
        del runner
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
