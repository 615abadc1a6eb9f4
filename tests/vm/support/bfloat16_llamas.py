"""Llamas of bfloat16 with random weights, by the kernels of real models: shapes, steps, and what a GPU makes of them.

Their other machine is the CPU's, with one worker. It has other kernels, and rounds elsewhere.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megavm.instructions.sample import Real
from megavm.scheduler.compiler.options import CompileOptions, Halves, default_options
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, rope_table
from megavm.scheduler.llama.parallel import Parallel, shard
from megavm.scheduler.run.buckets import weight_specs
from megavm.scheduler.run.runner import Runner
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.tensors import BF16, TensorSpec

TOLERANCE = 0.1  # standard deviations of the logits

LLAMA = LlamaConfig(
    vocab_size=192,
    hidden_size=256,
    intermediate_size=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
LIMITS = Limits(20, 128, 64, 32, 40, 64)


def shapes_of(spec: TensorSpec) -> list[tuple[int, ...]]:
    """The shapes of the parts of a weight, or its own."""
    return [(part.rows, *spec.shape[1:]) for part in spec.parts] or [spec.shape]


def bind_weights(memory: Memory, limits: Limits, config: LlamaConfig = LLAMA) -> None:
    """Random weights, the same whatever the number of ranks that divide them."""
    parallel = Parallel(len(memory.ranks))
    for whole, spec in zip(
        weight_specs(config, limits, BF16),
        weight_specs(config, limits, BF16, parallel),
        strict=True,
    ):
        values = []
        for name, shape in zip(whole.part_names, shapes_of(whole), strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            width = shape[-1] if len(shape) > 1 else 1
            random = torch.randn(shape, generator=generator) * width**-0.5
            values.append((random if width > 1 else 1 + 0.1 * random).bfloat16())
        if spec.name == "rope":
            values = [rope_table(config, limits.max_model_len)]
        for number, rank in enumerate(memory.ranks):
            own = zip(values, shapes_of(spec), strict=True)
            rank.bind(spec, *(shard(value, shape, number) for value, shape in own))


def runner_on(
    machine: Machine,
    target: str,
    workers: int,
    ranks: int = 1,
    fixed_order: bool = False,
    halves: Halves = "preferred",
    config: LlamaConfig = LLAMA,
    limits: Limits = LIMITS,
) -> Runner:
    memory = machine.memory(ranks)
    bind_weights(memory, limits, config)

    def options(rows: int) -> CompileOptions:
        chosen = default_options(target, workers, rows, fixed_order=fixed_order)
        return replace(chosen, halves=halves)

    runner = Runner(config, memory, limits, BF16, machine, options, Parallel(ranks))
    slots, blocks = limits.max_num_seqs, np.random.default_rng(5).permutation(limits.num_blocks)
    shape = slots, limits.max_model_len + 1
    tokens = np.random.default_rng(4).integers(0, config.vocab_size, shape).astype(np.int32)
    for slot in range(slots):
        runner.write_tokens(slot, tokens[slot])
        runner.write_blocks(slot, 0, blocks.reshape(slots, -1)[slot].astype(np.int32))
        runner.sampling_real[slot, [Real.TOP_P, Real.REPETITION_PENALTY]] = 1.0
    return runner


def step_of(rows: list[tuple[int, range]]) -> Step:
    """A step of ranges of positions of some sequences; the last row of each has logits."""
    sequences = [s for s, positions in rows for _ in positions]
    positions = [p for _, positions in rows for p in positions]
    ends = np.cumsum([len(positions) for _, positions in rows]) - 1
    row_sequence, row_position = np.array(sequences, np.int32), np.array(positions, np.int32)
    return Step(row_sequence, row_position, ends.astype(np.int32), max(positions) + 1)


def apart(one: Runner, other: Runner, rows: int) -> float:
    """The largest difference of the logits of the first rows, in standard deviations of the other's."""
    mine, theirs = (torch.as_tensor(np.array(r.logits[:rows])).float() for r in (one, other))
    return float((mine - theirs).abs().max() / theirs.std())


Rows = list[tuple[int, range]]


@dataclass(frozen=True)
class Case:
    """A model, and some steps: ranges of positions of some sequences each."""

    seed: int
    config: LlamaConfig
    limits: Limits
    workers: int
    steps: Sequence[Rows]

    def __str__(self) -> str:
        c = self.config
        return (
            f"seed {self.seed}: vocabulary {c.vocab_size}, hidden {c.hidden_size}, intermediate "
            f"{c.intermediate_size}, {c.num_layers} layers, {c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}, "
            f"biases {c.attention_bias} and {c.mlp_bias}; {self.workers} workers"
        )


def random_case(seed: int, most_workers: int = 6) -> Case:
    """A case made from ``seed``: any shape, with prompts, chunks of prompts and rows that decode in its steps."""
    pick = random.Random(seed)

    def size() -> int:
        if pick.random() < 0.03:  # more than a kernel of few rows holds at a time
            return 64 * pick.randint(33, 40)
        unit = pick.choices([64, 32, 8], [2, 2, 1])[0]  # mostly whole boxes of columns, or halves
        return unit * pick.randint(max(1, 32 // unit), 640 // unit)

    kv_heads, group = pick.choice([1, 1, 2, 3, 4]), pick.choice([1, 2, 3, 4, 5, 7, 8])
    config = LlamaConfig(
        vocab_size=pick.randint(33, 400),
        hidden_size=size(),
        intermediate_size=size(),
        num_layers=pick.randint(1, 2),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=pick.choice([64, 64, 64, 128, 128, 32, 80, 16, 96]),
        tie_word_embeddings=pick.random() < 0.3,
        attention_bias=pick.random() < 0.2,
        mlp_bias=pick.random() < 0.1,
    )
    sequences, length = 24, 192
    rows, logit_rows = pick.choice([64, 150]), pick.choice([24, 24, 64])
    limits = Limits(sequences, length, rows, logit_rows, sequences * -(-length // 64), 64)
    steps = [_random_step(pick, limits) for _ in range(3)]
    return Case(seed, config, limits, pick.randint(1, most_workers), steps)


def _random_step(pick: random.Random, limits: Limits) -> Rows:
    most, length = limits.max_num_batched_tokens, limits.max_model_len - 1
    sequences = pick.sample(range(limits.max_num_seqs), limits.max_num_seqs)
    left = pick.choice(
        [1, pick.randint(2, 8), pick.randint(9, 16), pick.randint(17, 32), most, most]
    )
    if pick.random() < 0.4:  # one token of each sequence
        return [(s, range(p := pick.randrange(length), p + 1)) for s in sequences[:left]]
    rows: Rows = []
    while left > 0 and sequences:
        count = 1 if pick.random() < 0.4 else pick.randint(1, min(left, length))
        begin = pick.choice([0, pick.randint(0, length - count)])
        rows.append((sequences.pop(), range(begin, begin + count)))
        left -= count
    return rows


def check_random(case: Case, machine: Machine) -> str:
    """What a GPU, emulated or not, computes otherwise than the CPU, in words; "" if nothing."""
    gpu = runner_on(machine, "cuda", case.workers, config=case.config, limits=case.limits)
    cpu = runner_on(CpuMachine(), "cpu", 1, config=case.config, limits=case.limits)
    for rows in case.steps:
        for runner in (gpu, cpu):
            runner.run(step_of(rows), 1)
        difference = apart(gpu, cpu, len(rows))
        if not difference < TOLERANCE:
            ranges = [(s, p.start, p.stop) for s, p in rows]
            return f"{case}: logits differ by {difference:.3f} standard deviations after {ranges}"
    return ""
