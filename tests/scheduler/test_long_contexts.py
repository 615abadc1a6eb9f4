"""A batch in which one sequence is long: its context is split, though all workers have rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import megavm.scheduler.run.runner as runner_module
from megavm.instructions.attention import Attention
from megavm.instructions.attention.lower import attention_tiling
from megavm.instructions.sample import INTEGER_COLUMNS, Integer
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.step import Step
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, rope_table
from megavm.scheduler.run.buckets import weight_specs
from megavm.scheduler.run.runner import Runner
from megavm.vm.cuda.emulated import EmulatedMachine, reason_unavailable
from megavm.vm.cuda.machine import CudaMachine
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
    # Rows of prompts are tiles of their own, and an order that is fixed has no splits.
    assert attention_tiling(rows, 8, 64, context, options, queries=256).splits == 1
    fixed = replace(options, fixed_order=True)
    assert attention_tiling(rows, 8, 64, context, fixed).splits == 1


def test_few_rows_are_split_among_idle_workers_as_before() -> None:
    for rows, splits in ((1, 15), (2, 7), (4, 4)):
        options = default_options("cuda", 132, rows)
        assert attention_tiling(rows, 8, 64, 4096, options).splits == splits


@pytest.fixture(scope="module")
def gpu(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> CudaMachine:
    """A GPU, or an emulated one."""
    if torch.cuda.is_available():
        machine: CudaMachine = request.getfixturevalue("cuda_machine")
        return machine
    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return EmulatedMachine(timeout=60.0)


def logits(gpu: CudaMachine, rows: int) -> tuple[set[int], torch.Tensor]:
    """The splits and logits of a step whose sequences have 3, 7, 11, ... tokens, and one 500."""
    memory = gpu.memory()
    random = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        width = shape[-1] if len(shape) > 1 else 0
        values = torch.randn(shape, generator=random)
        return (values * width**-0.5 if width else 1 + 0.1 * values).bfloat16()

    for spec in weight_specs(LLAMA, LIMITS, BF16):
        if spec.name == "rope":
            memory.bind(spec, rope_table(LLAMA, LIMITS.max_model_len).to(memory.device))
        else:
            memory.bind(spec, draw(spec.shape).to(memory.device))
    runner = Runner(
        LLAMA, memory, LIMITS, BF16, gpu, lambda rows: default_options("cuda", WORKERS, rows)
    )
    contexts = np.array([500 if i == 5 else 3 + 4 * i for i in range(rows)], dtype=np.int32)
    numbers = np.arange(rows, dtype=np.int32)
    step = Step(numbers, contexts, numbers, 501)
    program = runner.program(runner.bucket(rows, rows, 501, decode=True))
    for spec in program.tensors:
        if spec.kind is TensorKind.STATE:
            memory.write(spec.name, draw(spec.shape) * spec.shape[-1] ** 0.5)
    blocks = iter(range(LIMITS.num_blocks))
    for slot, context in enumerate(contexts.tolist()):
        runner.write_tokens(slot, np.full(context + 1, 3 + slot, dtype=np.int32))
        count = context // 64 + 1
        runner.block_table[slot, :count] = [next(blocks) for _ in range(count)]
        integer = np.full(INTEGER_COLUMNS, -1, dtype=np.int32)
        integer[[Integer.ENABLED, Integer.NUM_STOP]] = 1, 0
        runner.sampling_integer[slot] = integer
    runner.run(step)
    splits = {i.num_splits for i in program.instructions if isinstance(i, Attention)}
    return splits, torch.from_numpy(runner.logits[:rows].copy())


@pytest.mark.parametrize("rows", [12, 24])
def test_a_step_with_splits_computes_what_one_without_does(
    gpu: CudaMachine, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in groups with tagged words, and matrix products with barriers."""
    monkeypatch.setattr(runner_module, "StepMemory", DeviceStepMemory)
    whole, expected = logits(gpu, rows)
    assert whole == {1}
    monkeypatch.setitem(TARGETS, "cuda", replace(TARGETS["cuda"], long_split=64))
    split, found = logits(gpu, rows)
    assert split == {8}
    assert torch.isfinite(expected).all()
    # Another order of additions, and results that are rounded to bfloat16 in between.
    assert (found - expected).abs().max() < 0.08 * expected.std()
    assert not torch.equal(found, expected)
