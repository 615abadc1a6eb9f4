"""Decoding on a GPU against the time to read the weights, measured in the same run.

    python benchmarks/llama_cuda.py --model 1b --context 2 250 1000 4096 16384 --batch 1 8 --save

Weights are random with the model's shapes. The time of a token includes everything: embedding, all
layers, LM head and greedy choice. The chosen token feeds the next step without the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from environment import save
from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Integer, Real
from megavm.profiler.environment import describe_machine, measure_multiplication, of_all_gpus
from megavm.profiler.recorder import Recorder
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, default_logit_rows, rope_table
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.scheduler.run.buckets import weight_specs
from megavm.scheduler.run.runner import Runner
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.tensors import BF16
from read_floor import ReadFloor, time_gpu

MODELS = {
    "1b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True),
    "3b": LlamaConfig(128256, 3072, 8192, 28, 24, 8, 128, tie_word_embeddings=True),
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128),
    "70b": LlamaConfig(128256, 8192, 28672, 80, 64, 8, 128),
    "tinyllama": LlamaConfig(32000, 2048, 5632, 22, 32, 4, 64),
    # Narrow ones, whose rows do not fill pages, and ones with as many KV heads as heads.
    "smollm-135m": LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True),
    "smollm-360m": LlamaConfig(49152, 960, 2560, 32, 15, 5, 64, tie_word_embeddings=True),
    "llama2-7b": LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128),
    "llama2-13b": LlamaConfig(32000, 5120, 13824, 40, 40, 40, 128),
    "stories": Checkpoint.open(resolve("stories")).config,
}


def weight_bytes(config: LlamaConfig) -> int:
    """Bytes that one token must read, of all ranks: all weights except untied embeddings."""
    hidden, wide = config.hidden_size, config.intermediate_size
    attention = hidden * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * hidden * wide + 2 * hidden
    return 2 * (config.num_layers * layer + config.vocab_size * hidden + hidden)


def kv_bytes(config: LlamaConfig, context: int) -> int:
    """Bytes of the keys and values of ``context`` tokens."""
    return 4 * config.num_layers * config.num_kv_heads * config.head_dim * context


def fill_random(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Give a weight random values that preserve norms, and return it."""
    if value.dim() == 1:
        return value.uniform_(0.8, 1.2, generator=generator)
    return value.normal_(0.0, value.shape[1] ** -0.5, generator=generator)


def make_runner(
    config: LlamaConfig,
    machine: CudaMachine,
    max_context: int,
    batch: int,
    parallel: Parallel = ONE_RANK,
    rows: int = 8,
    **options: Any,
) -> Runner:
    """A runner with random weights on the GPUs (``fill_random``).

    ``rows``: of its largest step, if that is more than ``batch``.
    """
    blocks = -(-max_context // 64)
    rows = max(batch, rows)
    logit_rows = default_logit_rows(batch, rows)
    limits = Limits(batch, blocks * 64, rows, logit_rows, batch * blocks, 64)
    memory = machine.memory(parallel.ranks)
    for rank in memory.ranks:
        generator = torch.Generator(rank.device).manual_seed(0)
        for spec in weight_specs(config, limits, BF16, parallel):
            if spec.name == "rope":
                rank.bind(spec, rope_table(config, limits.max_model_len).to(rank.device))
                continue
            value = torch.empty(spec.shape, dtype=torch.bfloat16, device=rank.device)
            rank.bind(spec, fill_random(value, generator))

    def options_for(rows: int) -> Any:
        return dataclasses.replace(default_options("cuda", machine.workers, rows), **options)

    return Runner(config, memory, limits, BF16, machine, options_for, parallel)


def prepare(runner: Runner, batch: int, context: int) -> Step:
    """A decode step of ``batch`` sequences with ``context`` cached tokens each.

    Their keys and values are arbitrary.
    """
    limits = runner.limits
    rng = np.random.default_rng(1)
    real = np.zeros(REAL_COLUMNS, np.float32)
    real[Real.TOP_P] = real[Real.REPETITION_PENALTY] = 1.0
    integer = np.zeros(INTEGER_COLUMNS, np.int32)
    integer[Integer.ENABLED] = 1
    per_sequence = limits.blocks_per_sequence
    blocks = rng.permutation(limits.num_blocks)[: batch * per_sequence].astype(np.int32)
    for slot in range(batch):
        tokens = rng.integers(0, runner.vocab_size, limits.max_model_len).astype(np.int32)
        runner.write_tokens(slot, tokens)
        runner.write_blocks(slot, 0, blocks[slot * per_sequence : (slot + 1) * per_sequence])
        runner.sampling_real[slot] = real
        runner.sampling_integer[slot] = integer
    rows = np.arange(batch, dtype=np.int32)
    positions = np.full(batch, context, np.int32)
    return Step(rows, positions, rows, context + 1, wants_logits=False)


def with_contexts(step: Step, contexts: npt.NDArray[np.int32]) -> Step:
    """A step that decodes, with so many cached tokens of each sequence."""
    return dataclasses.replace(step, row_position=contexts, context=int(contexts.max()) + 1)


def measure(
    runner: Runner,
    batch: int,
    context: int,
    steps: int,
    rounds: int,
    contexts: npt.NDArray[np.int32] | None = None,
) -> dict[str, float | int]:
    """Median microseconds per step, in which every sequence gets one token.

    ``contexts``: cached tokens of each sequence, if not ``context``.
    """
    step = prepare(runner, batch, context)
    if contexts is not None:
        step = with_contexts(step, contexts)
    runner.run(step, steps)
    bucket = runner.programs.bucket(batch, batch, step.context + steps - 1, decode=True)
    executable = runner.programs.executable(bucket)

    def launch() -> None:
        executable.launch(steps)  # type: ignore[attr-defined]

    time = time_gpu(launch, rounds)
    executable.finish()  # type: ignore[attr-defined]
    return {"batch": batch, "context": context, "steps": steps, "us_per_step": time / steps}


def record_steps(runner: Runner, step: Step, steps: int, path: str, launches: int = 2) -> None:
    """Write a trace of some launches, after a warm-up launch."""
    recorder = Recorder()
    machine, config = runner.machine, runner.config
    recorder.machine |= describe_machine(machine)
    recorder.model |= {"name": f"Llama, {config.num_layers} layers of {config.hidden_size}"}
    runner.record(recorder)
    runner.run(step, steps)
    recorder.clear()
    for _ in range(launches):
        runner.run(step, steps)
    # After the steps: the multiplications lower the GPU's clock for a while.
    found = ReadFloor(1 << 30).ceiling() | measure_multiplication(machine.memory_device)
    recorder.machine |= of_all_gpus(machine, found)
    recorder.trace().save(path)
    runner.record(None)


def add_option_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--option NAME=VALUE``, a list of (name, value); a value is an int if it is a number."""

    def option(text: str) -> tuple[str, int | str]:
        name, _, value = text.partition("=")
        return name, int(value) if value.isdigit() else value

    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of a compile option (scheduler/compiler/options.py)",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--context", type=int, nargs="+", default=[250])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=8, help="tokens per launch")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--baseline", action="store_true", help="torch.compile beside it")
    parser.add_argument("--save", action="store_true")
    add_option_argument(parser)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--exchange", choices=("all_reduce", "all_gather"), default="all_reduce")
    parser.add_argument("--trace", help="file for a trace of the last batch and context")
    parser.add_argument("--launches", type=int, default=2, help="launches in the trace")
    args = parser.parse_args()

    config = MODELS[args.model]
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    parallel = Parallel(args.tensor_parallel_size, args.exchange)
    machine = CudaMachine(range(parallel.ranks))
    size = weight_bytes(config) // parallel.ranks
    floor = ReadFloor(min(size, 4 << 30))
    results = []
    longest = max(args.context) + 2 * args.steps
    runner = make_runner(config, machine, longest, max(args.batch), parallel, **dict(args.option))
    for batch in args.batch:
        for context in args.context:
            read = size + batch * kv_bytes(config, context) // parallel.ranks
            before = floor.microseconds(read)
            found = measure(runner, batch, context, args.steps, args.rounds)
            limit = statistics.mean((before, floor.microseconds(read)))
            found |= {"floor_us": limit, "percent_of_floor": 100 * limit / found["us_per_step"]}
            ratio = ""
            if args.baseline and context == args.context[0]:
                from torch_baseline import measure as measure_torch

                found["torch_us"] = measure_torch(config, batch, context, args.rounds)
                found["times_torch"] = found["torch_us"] / found["us_per_step"]
                ratio = f", torch.compile {found['torch_us']:.0f} us: {found['times_torch']:.2f} x"
            results.append(found)
            print(
                f"{args.model} batch {batch} context {context:6d}: "
                f"{found['us_per_step']:8.1f} us per token, floor {limit:7.1f} us, "
                f"{found['percent_of_floor']:.1f} %{ratio}",
                flush=True,
            )
    if args.save:
        facts = {"model": args.model, "results": results}
        name = f"llama_cuda_{args.model}"
        if parallel.ranks > 1:
            name += f"_tp{parallel.ranks}_{parallel.exchange}"
            facts |= {"ranks": parallel.ranks, "exchange": parallel.exchange}
        path = save(name, facts)
        print(f"saved {path}")
    if args.trace:
        step = prepare(runner, args.batch[-1], args.context[-1])
        record_steps(runner, step, args.steps, args.trace, args.launches)
        print(f"saved {args.trace}")


if __name__ == "__main__":
    main()
