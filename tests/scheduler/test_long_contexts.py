"""A batch in which one sequence is long: its context is split, though all workers have rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_weights import bind_random_weights

import megavm.scheduler.run.runner as runner_module
from megavm.instructions.attention import Attention
from megavm.instructions.attention.lower import attention_tiling
from megavm.instructions.sample import INTEGER_COLUMNS, Integer
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.step import Step
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, default_logit_rows
from megavm.scheduler.run.buckets import choose_bucket, compile_bucket
from megavm.scheduler.run.runner import Runner
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import Machine
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16, TensorKind

WORKERS, ROWS = 6, 24
LLAMA = LlamaConfig(96, 128, 128, 2, 4, 2, 64)
LIMITS = Limits(
    max_num_seqs=ROWS,
    max_model_len=512,
    max_num_batched_tokens=ROWS,
    max_logit_rows=ROWS,
    num_blocks=64,
    block_size=64,
)


@pytest.mark.parametrize(
    ("context", "splits"), [(256, 1), (8192, 1), (12288, 3), (16384, 4), (32768, 8), (131072, 8)]
)
@pytest.mark.parametrize("rows", [16, 64, 256])
def test_long_contexts_of_a_batch_are_split(context: int, splits: int, rows: int) -> None:
    options = default_options("cuda", 132, rows)
    assert attention_tiling(rows, 8, 64, context, options).splits == splits
    # An order of additions that is fixed has no splits.
    fixed = replace(options, fixed_order=True)
    assert attention_tiling(rows, 8, 64, context, fixed).splits == 1


@given(st.integers(1, 512), st.sampled_from([1, 2, 4, 8]), st.integers(12288, 131072))
def test_a_cut_that_fills_the_workers_is_cut_further_only_as_a_whole(
    rows: int, heads: int, context: int
) -> None:
    """Else some workers would have a piece more than others, or longer ones than before."""
    options = default_options("cuda", 132, rows)
    found = attention_tiling(rows, heads, 64, context, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "cuda", replace(TARGETS["cuda"], long_split=0))
        before = attention_tiling(rows, heads, 64, context, options)
        prompts = attention_tiling(rows, heads, 64, context, options, queries=512)
    assert found.splits % before.splits == 0
    assert attention_tiling(rows, heads, 64, context, options, queries=512).splits >= prompts.splits


@pytest.mark.parametrize(
    ("rows", "decode", "contexts"),
    [
        (64, True, [8192, 16384, 131072]),
        (256, True, [8192, 16384, 131072]),
        (64, False, [4096, 8192, 16384, 131072]),
        (512, False, [131072]),
        (2048, False, [131072]),
    ],
)
def test_contexts_that_are_cut_alike_share_a_program(
    rows: int, decode: bool, contexts: list[int]
) -> None:
    config = LlamaConfig(128256, 4096, 14336, 1, 32, 8, 128)
    limits = Limits(256, 131072, 2048, default_logit_rows(256, 2048), 2048, 64)
    options = partial(default_options, "cuda", 132)
    found = {
        choose_bucket(config, limits, options, rows, 16, context, decode=decode).context
        for context in (1 << bit for bit in range(18))
    }
    assert sorted(found) == contexts


@pytest.mark.parametrize(
    ("rows", "context", "tile", "splits"),
    [
        (128, 4096, 8, 1),
        (128, 8192, 16, 2),
        (128, 32768, 32, 4),
        (32, 131072, 16, 8),
        (64, 131072, 32, 8),
        (256, 131072, 32, 2),
        (512, 131072, 32, 1),
        (2048, 131072, 32, 1),
    ],
)
def test_long_contexts_of_few_rows_of_prompts_are_split(
    rows: int, context: int, tile: int, splits: int
) -> None:
    """Heads of 128, of which a GPU attends to 32 rows of a prompt together."""
    options = default_options("cuda", 132, rows)
    found = attention_tiling(rows, 8, 64, context, options, queries=512)
    assert (found.rows, found.splits) == (tile, splits)
    fixed = attention_tiling(rows, 8, 64, context, replace(options, fixed_order=True), queries=512)
    assert (fixed.rows, fixed.splits) == (32, 1)


@pytest.mark.parametrize(
    ("rows", "decode", "context", "found"),
    [
        (9, False, 4097, 32),
        (16, False, 100_000, 32),
        (16, False, 4096, 16),
        (16, True, 100_000, 16),
        (8, False, 100_000, 8),
        (17, False, 100_000, 32),
    ],
)
def test_few_rows_of_a_long_prompt_run_in_a_program_where_they_attend_together(
    rows: int, decode: bool, context: int, found: int
) -> None:
    limits = replace(LIMITS, max_model_len=131072, max_num_batched_tokens=2048)

    def bucket(limits: Limits, machine: str = "cuda", fixed_order: bool = False) -> int:
        options = partial(default_options, machine, 132, fixed_order=fixed_order)
        return choose_bucket(LLAMA, limits, options, rows, 1, context, decode=decode).rows

    alone = 16 if 8 < rows <= 16 else found
    assert bucket(limits) == found
    assert bucket(limits, fixed_order=True) == alone
    assert bucket(limits, "cpu") == alone
    assert bucket(replace(limits, max_num_batched_tokens=16)) == min(alone, 16)


def test_few_rows_are_split_among_idle_workers_as_before() -> None:
    for rows, splits in ((1, 15), (2, 7), (4, 4)):
        options = default_options("cuda", 132, rows)
        assert attention_tiling(rows, 8, 64, 4096, options).splits == splits


@pytest.mark.parametrize(
    ("rows", "context"), [(16, 32768), (64, 16384), (64, 32768), (256, 131072)]
)
def test_the_pieces_of_a_row_are_spread_over_the_workers(rows: int, context: int) -> None:
    config = LlamaConfig(128, 256, 256, 1, 32, 8, 64)
    blocks = rows * context // 64
    limits = Limits(rows, context, 2048, default_logit_rows(rows, 2048), blocks, 64)
    options = partial(default_options, "cuda", 132)
    bucket = choose_bucket(config, limits, options, rows, rows, context, decode=True)
    program = compile_bucket(config, limits, BF16, bucket, options)
    owners = program.worker_of()
    # By first row of a range: how many pieces of that range each worker has.
    pieces: dict[int, Counter[int]] = {}
    for owner, inst in zip(owners.tolist(), program.instructions, strict=True):
        if isinstance(inst, Attention):
            pieces.setdefault(inst.row_begin, Counter())[owner] += 1
    for of_workers in pieces.values():
        assert max(of_workers.values()) <= -(-of_workers.total() // 132)


def decoding(rows: int) -> Step:
    """Sequences of 3, 7, 11, ... tokens and one of 500, each of which decodes."""
    contexts = np.array([500 if i == 5 else 3 + 4 * i for i in range(rows)], dtype=np.int32)
    numbers = np.arange(rows, dtype=np.int32)
    return Step(numbers, contexts, numbers, 501, distinct=True)


def beside_chunks() -> Step:
    """Four sequences that decode, 14 tokens of a long prompt, of which some see one chunk of 64
    tokens more than others, and a prompt that is too short for most splits."""
    slots = np.array([0, 1, 2, 3, *[4] * 14, *[5] * 6], dtype=np.int32)
    positions = np.array([400, 3, 70, 120, *range(441, 455), *range(6)], dtype=np.int32)
    logit_rows = np.array([0, 1, 2, 3, 17, 23], dtype=np.int32)
    return Step(slots, positions, logit_rows, 455, distinct=False)


def logits(
    machine: Machine,
    step: Step,
    config: LlamaConfig = LLAMA,
    limits: Limits = LIMITS,
    workers: int = WORKERS,
    target: str = "cuda",
) -> tuple[set[int], torch.Tensor]:
    """The splits of a step whose keys and values are random, and its logits."""
    memory = machine.memory()
    bind_random_weights(memory, config, limits)
    runner = Runner(
        config, memory, limits, BF16, machine, lambda rows: default_options(target, workers, rows)
    )
    count = len(step.logit_row)
    bucket = runner.programs.bucket(step.num_rows, count, step.context, decode=bool(step.distinct))
    program = runner.programs.program(bucket)
    random = torch.Generator().manual_seed(1)
    for spec in program.tensors:
        if spec.kind is TensorKind.STATE:
            memory.write(spec.name, torch.randn(spec.shape, generator=random))
    blocks = iter(range(limits.num_blocks))
    for slot in sorted(set(step.row_sequence.tolist())):
        tokens = int(step.row_position[step.row_sequence == slot].max()) + 1
        runner.write_tokens(slot, np.full(tokens, 3 + slot, dtype=np.int32))
        held = -(-tokens // limits.block_size)
        own = [next(blocks) for _ in range(held)]
        runner.write_blocks(slot, 0, np.array(own, dtype=np.int32))
        integer = np.full(INTEGER_COLUMNS, -1, dtype=np.int32)
        integer[[Integer.ENABLED, Integer.NUM_STOP]] = 1, 0
        runner.sampling_integer[slot] = integer
    runner.run(step)
    splits = {i.num_splits for i in program.instructions if isinstance(i, Attention)}
    return splits, torch.from_numpy(runner.logits[:count].copy())


@pytest.mark.parametrize(
    ("step", "splits"),
    [(decoding(12), 8), (decoding(24), 8), (beside_chunks(), 3)],
    ids=["rows in groups, words", "matrix products, barriers", "beside chunks of prompts"],
)
def test_a_step_with_splits_computes_what_one_without_does(
    gpu: CudaMachine, step: Step, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "StepMemory", DeviceStepMemory)
    monkeypatch.setitem(TARGETS, "cuda", replace(TARGETS["cuda"], long_split=0, few_splits=99))
    whole, expected = logits(gpu, step)
    assert whole == {1}
    monkeypatch.setitem(TARGETS, "cuda", replace(TARGETS["cuda"], long_split=64, few_splits=3))
    split, found = logits(gpu, step)
    assert split == {splits}
    assert torch.isfinite(expected).all()
    # Another order of additions, and results that are rounded to bfloat16 in between.
    assert (found - expected).abs().max() < 0.08 * expected.std()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(
    ("rows", "head_dim", "block_size", "workers"),
    [(20, 64, 64, 5), (20, 128, 16, 5), (48, 64, 64, 2)],
    ids=["four rows apart", "pages of parts of a block", "groups of eight rows"],
)
def test_a_batch_of_different_contexts_computes_what_the_cpu_does(
    gpu: CudaMachine,
    rows: int,
    head_dim: int,
    block_size: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are dealt out, warps help longer rows, and the loader begins pages of a row together."""
    config = replace(LLAMA, head_dim=head_dim)
    limits = Limits(rows, 1024, 64, rows, rows * 1024 // block_size, block_size)
    draw = np.random.default_rng(rows)
    contexts = draw.integers(0, np.where(draw.random(rows) < 0.6, 100, 1000)).astype(np.int32)
    contexts[rows // 2] = 1000
    numbers = np.arange(rows, dtype=np.int32)
    step = Step(numbers, contexts, numbers, 1001, distinct=True)
    _, expected = logits(CpuMachine(), step, config, limits, 1, "cpu")
    monkeypatch.setattr(runner_module, "StepMemory", DeviceStepMemory)
    _, found = logits(gpu, step, config, limits, workers)
    assert torch.isfinite(expected).all()
    assert (found - expected).abs().max() < 0.08 * expected.std()
