"""Whole programs on an emulated GPU: a Llama, several ranks, workers that are told to stop."""

from __future__ import annotations

import functools
import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bfloat16_llamas import (
    LIMITS,
    LLAMA,
    TOLERANCE,
    apart,
    check_random,
    random_case,
    runner_on,
    step_of,
)
from choices_of_ranks import check_choices_of_ranks
from scattering import check_scattering
from sums_and_gathers import check_sums_and_gathers
from two_choices import check_two_choices

from megavm.instructions.matmul import Matmul
from megavm.instructions.sample import Integer
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions, Halves, default_options
from megavm.scheduler.llama.graph import Limits
from megavm.scheduler.llama.parallel import shard
from megavm.scheduler.run.buckets import compile_bucket
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.emulated import EmulatedMachine, reason_unavailable
from megavm.vm.cuda.memory import kernel_memory
from megavm.vm.machine import MachineFault
from megavm.vm.specialisation import specialisation
from megavm.vm.target import Exchange
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason="no C++ compiler")


STEPS = [
    [(0, range(40)), (1, range(9))],  # prompts, the first of them longer than a tile
    [(0, range(40, 41)), (1, range(9, 40)), (2, range(17)), (3, range(1))],  # a chunk, a decode row
    [
        (s, range(41 if s == 0 else 17 if s == 2 else 1, 42 if s == 0 else 18 if s == 2 else 2))
        for s in (0, 2, 3)
    ],
    [(s, range(50, 51)) for s in range(20)],  # decode rows of matrix products
    [(s, range(51, 52)) for s in range(12)],  # decode rows in a group of 16
    [(7, range(60, 61))],
]


@pytest.mark.parametrize("stand_in", [False, True], ids=["own_programs", "one_of_64_rows"])
def test_a_llama_computes_what_the_cpu_does(stand_in: bool) -> None:
    """Prompts, chunks with decode rows, many decode rows: kernels of 64, 32, 9 to 16, 2 to 8, and one row.

    ``stand_in``: one program runs them all, as in a server whose others are still compiled.
    """
    emulated = runner_on(EmulatedMachine(seed=1), "cuda", 5)
    cpu = runner_on(CpuMachine(), "cpu", 1)
    every = emulated.programs.bucket(64, LIMITS.max_logit_rows, LIMITS.max_model_len)
    for rows in STEPS:
        for runner, bucket in ((emulated, every if stand_in else None), (cpu, None)):
            runner.run(step_of(rows), 1, bucket=bucket)
        difference = apart(emulated, cpu, len(rows))
        what = [(s, len(p)) for s, p in rows]
        assert difference < TOLERANCE, f"step of {what}: {difference:.3f} deviations"


# Heads of 32; of 128, and rows that are no whole boxes; of 64, and rows longer than a kernel holds at a time.
@pytest.mark.parametrize("seed", [0, 133, 143])
def test_a_random_llama_computes_what_the_cpu_does(seed: int) -> None:
    """scripts/fuzz-llamas --bfloat16 runs many."""
    assert not check_random(random_case(seed), EmulatedMachine(seed=seed))


@pytest.mark.parametrize("rows", [7, 12])
def test_rows_of_three_pages_and_of_five_are_multiplied_three_pages_at_a_time(rows: int) -> None:
    """As in models of a hidden size of 3072 or 5120, and attention to more rows and heads than workers."""
    config = replace(
        LLAMA, hidden_size=2112, intermediate_size=4160, num_layers=1, num_heads=34
    )  # q has 2176 columns
    emulated = runner_on(EmulatedMachine(seed=rows), "cuda", 5, config=config)
    cpu = runner_on(CpuMachine(), "cpu", 1, config=config)
    step = step_of([(s, range(40 + s, 41 + s)) for s in range(rows)])
    for runner in (emulated, cpu):
        runner.run(step, 1)
    (bucket,) = emulated.programs.compiled
    program = emulated.programs.program(bucket)
    memory = kernel_memory(specialisation(program.instructions, program.tensors).common)
    assert (memory.group_rows, memory.chunk_pages) == (8 if rows == 7 else 16, 3)
    assert apart(emulated, cpu, rows) < TOLERANCE


def test_steps_of_a_launch_read_what_those_before_wrote() -> None:
    """Attention of many decode rows copies keys and values before its queries are there."""
    emulated = runner_on(EmulatedMachine(seed=2), "cuda", 5)
    cpu = runner_on(CpuMachine(), "cpu", 1)
    rows, steps = 20, 3
    for runner in (emulated, cpu):
        step = replace(step_of([(s, range(60, 61)) for s in range(rows)]), distinct=True)
        runner.run(step, steps)
    used = [bucket for bucket in emulated.programs.compiled if bucket.decode and bucket.rows == 32]
    assert len(used) == 1
    tokens = [np.array(r.tokens[:rows, 61 : 61 + steps]) for r in (emulated, cpu)]
    assert np.array_equal(tokens[0], tokens[1])
    assert apart(emulated, cpu, rows) < TOLERANCE


# A prompt of 40 rows, 20 decode rows. Of 63: a chunk beside decode rows and a prompt. Of 4 rows.
MIXED_STEPS = [
    [(0, range(40))],
    [(s, range(100 + s, 101 + s)) for s in range(20)],
    [(0, range(40, 80)), *((s, range(90 + s, 91 + s)) for s in range(1, 17)), (18, range(7))],
    [(0, range(80, 83)), (4, range(125, 126))],
]


def logits_of_steps(
    workers: int, ranks: int = 1, fixed_order: bool = False, halves: Halves = "preferred"
) -> list[Any]:
    machine = EmulatedMachine(seed=1, ranks=ranks)
    runner = runner_on(machine, "cuda", workers, ranks, fixed_order, halves)
    shape = (40, LLAMA.num_kv_heads, 64, LLAMA.head_dim)
    for name in (f"layers.{i}.{part}_cache" for i in range(LLAMA.num_layers) for part in "kv"):
        own = (shape[0], shape[1] // ranks, *shape[2:])
        runner.memory.allocate([TensorSpec(name, own, BF16, TensorKind.STATE)])
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator)
        for number, rank in enumerate(runner.memory.ranks):
            rank.write(name, shard(values, own, number))
    logits = []
    for rows in MIXED_STEPS:
        runner.run(step_of(rows), 1)
        logits.append(np.array(runner.logits[: len(rows)]))
    return logits


def test_in_a_fixed_order_workers_and_ranks_do_not_change_a_bit() -> None:
    """Neither another number of workers nor two ranks that gather, nor halves of their steps."""
    one = logits_of_steps(2, fixed_order=True)
    ranks = logits_of_steps(5, ranks=2, fixed_order=True)
    halves = logits_of_steps(5, ranks=2, fixed_order=True, halves="all")
    for i in range(len(MIXED_STEPS)):
        assert np.array_equal(one[i], ranks[i]), i
        assert np.array_equal(one[i], halves[i]), i


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_in_a_fixed_order_the_columns_of_a_worker_do_not_change_a_bit(rows: int) -> None:
    """Of long rows, whose chunks are added up: a worker has 200 columns, 100 or 48."""
    graph = Graph(rows)
    x = graph.tensor("x", (rows, 2304), BF16, TensorKind.INPUT)
    graph.output(graph.linear("y", x, graph.weight("w", (200, 2304), BF16), dtype=F32), "y")
    found = []
    for workers in (1, 2, 5):
        machine = EmulatedMachine(workers, seed=1)
        options = default_options("cuda", workers, rows, fixed_order=True)
        program = compile_graph(graph, options)
        memory = machine.memory()
        memory.allocate(program.tensors)
        torch.manual_seed(rows)
        for name in ("x", "w"):
            memory.write(name, torch.randn(memory.spec(name).shape))
        machine.load(program, memory).run()
        found.append(memory["y"].clone())
    torch.testing.assert_close(
        found[0], memory["x"].float() @ memory["w"].float().T, rtol=1e-4, atol=1e-2
    )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_greedy_launches_of_ranks_choose_what_one_rank_does(rows: int) -> None:
    """Each rank keeps its own logits. In steps of one row, peaks pass as words."""
    steps, tokens, logits = 3, [], []
    for ranks in (1, 2):
        machine = EmulatedMachine(seed=3, ranks=ranks)
        runner = runner_on(machine, "cuda", 4, ranks, fixed_order=True)
        runner.sampling_integer[:, Integer.ENABLED] = 1
        step = step_of([(s, range(60 + s, 61 + s)) for s in range(rows)])
        runner.run(replace(step, wants_logits=False), steps)
        assert {bucket.sampled for bucket in runner.programs.compiled} == {False}
        name = "logits.own" if ranks > 1 else "logits"
        logits.append(torch.cat([rank[name][:rows] for rank in runner.memory.ranks], dim=1))
        tokens.append(np.array([runner.tokens[s, 61 + s : 61 + s + steps] for s in range(rows)]))
    assert torch.equal(logits[0], logits[1])
    assert np.array_equal(tokens[0], tokens[1])
    assert np.array_equal(tokens[0][:, -1], logits[0].argmax(1))


def test_halves_of_rows_gather_and_sum_over_ranks() -> None:
    """32 and 18 rows: matrix products, the second with a tile that is not full."""
    options = CompileOptions(3, machine="cuda", halves="all")
    machine = EmulatedMachine(seed=1, ranks=2)
    check_sums_and_gathers(machine, 2, 50, BF16, options, steps=2)


@pytest.mark.parametrize("exchange", ["preferred", "tagged"])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, F32), (3, BF16), (12, BF16), (20, BF16)], ids=["1", "3", "12", "20"]
)
def test_ranks_choose_the_first_of_the_largest_of_all_their_logits(
    rows: int, dtype: DType, exchange: Exchange
) -> None:
    options = CompileOptions(3, machine="cuda", exchange=exchange)
    machine = EmulatedMachine(seed=rows, ranks=2)
    check_choices_of_ranks(machine, 2, rows, options, dtype, "own")


@pytest.mark.parametrize("exchange", ["barrier", "tagged"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_program_has_greedy_and_sampled_choices(
    rows: int, ranks: int, exchange: Exchange
) -> None:
    options = CompileOptions(4, machine="cuda", exchange=exchange)
    machine = EmulatedMachine(seed=rows, timeout=5.0, ranks=ranks)
    check_two_choices(machine, CpuMachine(), rows, ranks, options)


@pytest.mark.parametrize("rows", [3, 50])
def test_ranks_add_up_shares(rows: int) -> None:
    options = CompileOptions(5, machine="cuda", exchange="preferred", all_reduce="scatter")
    check_sums_and_gathers(EmulatedMachine(seed=2, ranks=2), 2, rows, BF16, options, steps=2)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_what_ranks_scatter_arrives_on_one_rank_alone(dtype: DType) -> None:
    check_scattering(EmulatedMachine(seed=3, ranks=3), dtype, (1, 3, 4, 33, 64))


def test_otherwise_the_bits_depend_on_the_number_of_workers() -> None:
    two, three = logits_of_steps(2), logits_of_steps(3)
    for i in range(len(MIXED_STEPS)):
        assert not np.array_equal(two[i], three[i]), i
        assert np.abs(two[i] - three[i]).max() < 0.05, i


def test_ranks_agree_within_rounding() -> None:
    """In steps of many rows, what ranks gather is stored by whole units, with squares of their own."""
    one, two = logits_of_steps(2), logits_of_steps(2, ranks=2)
    for i in range(len(MIXED_STEPS)):
        assert np.abs(one[i] - two[i]).max() < 0.05, i


def test_blocks_of_one_pass_and_of_two_share_the_scratch() -> None:
    """12 rows: x of down_proj does not fit into registers, that of the other products does."""
    config = replace(LLAMA, intermediate_size=2112, num_layers=2)
    limits = Limits(16, 64, 16, 16, 16, 64)
    step = step_of([(s, range(12 + s, 13 + s)) for s in range(12)])
    emulated = runner_on(EmulatedMachine(seed=4), "cuda", 3, config=config, limits=limits)
    cpu = runner_on(CpuMachine(), "cpu", 1, config=config, limits=limits)
    for runner in (emulated, cpu):
        runner.run(step, 1)
    assert apart(emulated, cpu, 12) < TOLERANCE


@pytest.mark.parametrize(("rows", "most"), [(400, 512), (530, 768)])
def test_a_prompt_of_several_tiles_of_rows_is_split_along_k(rows: int, most: int) -> None:
    """o_proj and down_proj in two parts, on an emulated GPU, beside one worker of the CPU."""
    config = replace(
        LLAMA, hidden_size=512, intermediate_size=1024, num_layers=1, num_heads=8, num_kv_heads=2
    )
    limits = Limits(1, 1024, 1024, 16, 16, 64)
    step = step_of([(0, range(rows))])
    workers = 20 * most // 512
    emulated = runner_on(EmulatedMachine(seed=1), "cuda", workers, config=config, limits=limits)
    cpu = runner_on(CpuMachine(), "cpu", 1, config=config, limits=limits)
    for runner in (emulated, cpu):
        runner.run(step, 1)
    assert apart(emulated, cpu, 1) < TOLERANCE
    bucket = emulated.programs.bucket(rows, 1, step.context)
    assert bucket.rows == most
    options = functools.partial(default_options, "cuda", workers)
    program = compile_bucket(config, limits, BF16, bucket, options)
    assert {i.part for i in program.instructions if isinstance(i, Matmul)} == {0, 1}


@pytest.mark.parametrize("number", [0, 3])
def test_workers_that_are_told_to_stop_at_any_time_do_nothing_that_a_gpu_forbids(
    number: int,
) -> None:
    """Steps of matrix products, whose warps go on together after some have been told.

    In other kernels a warp ends where it waits. Its lanes wait together on a GPU, but not here.
    """
    machine = EmulatedMachine(timeout=20.0)
    runner = runner_on(machine, "cuda", 5)
    step = step_of(STEPS[number])
    runner.run(step, 1)
    rows = len(step.logit_row)
    logits = np.array(runner.logits[:rows])
    rng = random.Random(number)
    faults: dict[tuple[int, int], str] = {}
    for _ in range(8):
        machine.stop_turn, machine.seed = when = rng.randrange(1, 8000), rng.randrange(100)
        try:
            runner.run(step, 1)
        except MachineFault as fault:
            faults[when] = str(fault)
    assert faults
    assert not {when: text for when, text in faults.items() if "the emulated kernel" in text}
    machine.stop_turn = 0
    runner.run(step, 1)
    assert np.array_equal(logits, runner.logits[:rows])


def test_a_fault_stops_no_warp_between_the_wgmmas_of_its_warpgroup() -> None:
    """One wgmma without all four warps, and the context of a GPU is lost: the emulation says so."""
    runner = runner_on(EmulatedMachine(seed=2), "cuda", 5)
    right = runner.block_table[:, :1].copy()
    step = step_of(STEPS[0])
    runner.run(step, 1)
    logits = np.array(runner.logits[:2])
    for sequence in (0, 1):
        runner.write_blocks(sequence, 0, np.array([1000], dtype=np.int32))
        with pytest.raises(MachineFault, match="block table entry"):
            runner.run(step, 1)
        runner.write_blocks(sequence, 0, right[sequence])
        runner.run(step, 1)
        assert np.array_equal(logits, runner.logits[:2])
