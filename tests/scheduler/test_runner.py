"""The runner picks the smallest program for a step, compiles it once, and keeps to its limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_directories import write_model

from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.engine.step import Step, bucket_sizes
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import expected_tensors
from megavm.scheduler.llama.graph import Bucket, Limits
from megavm.scheduler.run.buckets import weight_specs
from megavm.scheduler.run.inspect import describe_program
from megavm.scheduler.run.machines import choose_machine, make_machine
from megavm.scheduler.run.runner import Runner
from megavm.vm.program import Program

LIMITS = Limits(
    max_num_seqs=6,
    max_model_len=4096,
    max_num_batched_tokens=48,
    max_logit_rows=6,
    num_blocks=64,
    block_size=16,
)


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., tuple[Path, Any]]) -> Path:
    path, _ = make_llama(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
    )
    return path


def make_runner(directory: Path, workers: int = 2, limits: Limits = LIMITS) -> Runner:
    checkpoint = Checkpoint.open(directory)
    options = CompileOptions(workers)
    return Runner.for_checkpoint(
        checkpoint, limits, machine="cpu", workers=workers, options=options
    )


@pytest.mark.parametrize("bias", [False, True])
def test_the_cpu_reads_the_parts_of_weights_in_copies_of_the_file(
    tmp_path: Path, bias: bool
) -> None:
    """Which begin with a cache line; in the file they begin at any multiple of 8 bytes."""
    write_model(tmp_path, torch_dtype="bfloat16", attention_bias=bias, mlp_bias=bias)
    checkpoint = Checkpoint.open(tmp_path)
    runner = Runner.for_checkpoint(checkpoint, LIMITS, machine="cpu", workers=2)
    row = np.zeros(1, np.int32)
    runner.run(Step(row, row, row, 1))
    copied = []
    for spec in weight_specs(checkpoint.config, LIMITS, runner.dtype):
        if spec.name == "rope":
            continue
        stored = runner.memory.stored_parts(spec.name)
        for name, tensor in zip(spec.part_names, stored, strict=True):
            assert torch.equal(tensor, checkpoint.tensor(name))
            assert tensor.data_ptr() % 64 == 0
            copied.append(name)
    assert sorted(copied) == sorted(expected_tensors(checkpoint.config))


def test_small_buckets_are_powers_of_two_up_to_the_limits(directory: Path) -> None:
    runner = make_runner(directory, workers=1)
    assert runner.programs.bucket(1, 1, 1) == Bucket(1, 1, 4096)
    assert runner.programs.bucket(3, 2, 1) == Bucket(4, 2, 4096)
    assert runner.programs.bucket(33, 5, 1) == Bucket(48, 6, 4096)
    assert runner.programs.bucket(8, 0, 1) == Bucket(8, 1, 4096)


def test_from_512_rows_on_there_are_buckets_between_powers_of_two(directory: Path) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=3500, max_logit_rows=1700)
    runner = make_runner(directory, workers=1, limits=limits)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 3500]
    smaller = 0
    for size in sizes:
        for rows in (smaller + 1, size):
            assert runner.programs.bucket(rows, 1, 1) == Bucket(size, 1, 4096)
            logit_rows = min(size, 1700)
            assert runner.programs.bucket(3500, rows, 1) == Bucket(3500, logit_rows, 4096)
        smaller = size
    assert bucket_sizes(3500) == [*sizes[:-1], 4096]
    assert bucket_sizes(768) == sizes[:11]
    assert bucket_sizes(1) == [1]
    # Programs that can do these steps are compiled ahead of them.
    following = runner.programs.likely_next(runner.programs.bucket(1, 1, 1))
    assert {bucket.rows for bucket in following} == set(sizes)


def test_decode_steps_have_programs_of_their_own_where_words_pass_to_attention(
    directory: Path,
) -> None:
    runner = make_runner(directory, workers=1)
    assert runner.programs.bucket(4, 4, 1, decode=True) == Bucket(4, 4, 4096)
    runner.programs.options = lambda rows: CompileOptions(1, exchange="preferred")
    assert runner.programs.bucket(4, 4, 1, decode=True) == Bucket(4, 4, 4096, decode=True)
    assert (
        runner.programs.bucket(1, 1, 1, decode=True)
        == runner.programs.bucket(1, 1, 1)
        == Bucket(1, 1, 4096)
    )


@pytest.mark.parametrize(("sequences", "decode"), [([2, 0, 1], True), ([2, 0, 2], False)])
def test_a_step_decodes_if_its_rows_are_of_different_sequences(
    directory: Path, sequences: list[int], decode: bool
) -> None:
    runner = make_runner(directory)
    runner.programs.options = lambda rows: CompileOptions(2, exchange="preferred")
    rows = np.arange(3, dtype=np.int32)
    runner.run(Step(np.array(sequences, np.int32), rows, rows, 3))
    assert set(runner.programs.compiled) == {Bucket(4, 4, 4096, decode)}


def test_contexts_share_a_program_unless_attention_is_cut_otherwise(directory: Path) -> None:
    many = make_runner(directory, workers=8)
    contexts = {
        many.programs.bucket(1, 1, c).context for c in (1, 256, 257, 1000, 2048, 2049, 4096)
    }
    assert contexts == {512, 1024, 4096}  # 8 splits of 256 tokens from 2048 on


def test_a_program_is_compiled_once_per_bucket(directory: Path) -> None:
    runner = make_runner(directory)
    bucket = runner.programs.bucket(4, 1, 10)
    assert runner.programs.program(bucket) is runner.programs.program(bucket)


def test_a_step_beyond_the_limits_is_refused_with_its_size(directory: Path) -> None:
    runner = make_runner(directory)
    rows = np.zeros(49, np.int32)
    with pytest.raises(
        ValueError, match="a step of 49 rows and 1 logit rows is outside the limits"
    ):
        runner.run(Step(rows, rows, rows[:1], 1))


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        replace(LIMITS, block_size=0)


@pytest.mark.parametrize(
    ("name", "workers", "message"),
    [
        ("gpu", None, "machine 'gpu' is unknown"),
        ("cpu", 0, "workers is 0"),
    ],
)
def test_machines_that_are_not_to_be_had_are_refused(name: str, workers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_machine(name, workers)


def test_cuda_without_a_gpu_is_refused_and_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"machine 'cuda' is not available: (torch|this torch) "):
        make_machine("cuda")
    assert choose_machine("auto") == "cpu"


def test_gpu_programs_exchange_what_their_instructions_prefer() -> None:
    assert default_options("cuda", 132, 1).exchange == "preferred"
    assert default_options("cuda", 132, 2).exchange == "preferred"
    assert default_options("cpu", 8, 1) == CompileOptions(8)


def test_a_described_program_is_what_the_machine_runs(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "program.npz"
    text = describe_program(str(directory), machine="cuda", workers=132, save=str(path))
    assert any(spec.tagged for spec in Program.load(path).tensors), text
    assert "132 workers" in text
    text = describe_program(str(directory), machine="cpu", save=str(path))
    assert not any(spec.tagged for spec in Program.load(path).tensors), text
    with pytest.raises(ValueError, match="machine 'gpu' is unknown"):
        describe_program(str(directory), machine="gpu", workers=4)


def test_a_program_for_a_gpu_is_described_without_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = describe_program(str(directory), machine="cuda", verify=True)
    assert "132 workers" in text
    assert "a worker has 13 pages of 16 KiB and 6144 bytes of scratch" in text
    assert "no deadlock, no race, fits machine cuda" in text
    assert "adjust_logits" not in text
    text = describe_program(str(directory), machine="cuda", verify=True, sampled=True)
    assert "a worker has 13 pages of 16 KiB and 12416 bytes of scratch" in text
    assert "no deadlock, no race, fits machine cuda" in text
    assert "adjust_logits" in text


def test_a_program_for_the_cpu_is_described_with_its_working_memory(directory: Path) -> None:
    text = describe_program(str(directory), machine="cpu", workers=2, verify=True)
    assert re.search(r"the largest instruction takes \d+ of 359424 bytes of working memory", text)
    assert "no deadlock, no race, fits machine cpu" in text


def test_programs_are_compiled_for_the_machine_that_runs_them() -> None:
    for machine in ("cpu", "cuda", "reference"):
        assert default_options(machine, 4, 2).machine == machine


def test_a_described_program_can_be_saved_loaded_and_read(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "program.npz"
    text = describe_program(
        str(directory),
        rows=5,
        sequences=2,
        workers=3,
        verify=True,
        disassemble=True,
        save=str(path),
    )
    program = Program.load(path)
    assert str(program) in text
    assert "no deadlock, no race" in text
    for line in program.disassemble():
        assert line in text
