"""With ``fixed_order`` logits have the same bits for any number of workers and ranks.

tests/vm/test_emulated_programs.py and test_cuda_ranks.py say the same of a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_llamas import logits_of_ranks, memory_of_ranks
from random_llamas import Case, fresh_memory

from megavm import LLM
from megavm.instructions.attention import Attention
from megavm.instructions.attention.lower import attention_tiling
from megavm.instructions.matmul import Matmul
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.scheduler.run.buckets import choose_bucket
from megavm.scheduler.run.kernels import default_limits, kernel_headers
from megavm.vm.config import NONE
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.specialisation import program_header
from megavm.vm.tensors import BF16, F32, DType

CONTEXT = 512  # long enough that many workers split it
MIN_CHUNK = 32


def case_of(pick: random.Random, rows: int, dtype: DType) -> Case:
    """A Llama that 1, 2 and 4 ranks can divide, and a step of it, compiled for one worker."""
    kv_heads = 4 * pick.choice([1, 2])
    config = LlamaConfig(
        vocab_size=pick.choice([4 * pick.randint(16, 64), pick.randint(64, 256)]),
        hidden_size=32 * pick.choice([1, 2, 3]),
        intermediate_size=pick.choice([48, 100, 128, 33]),
        num_layers=pick.randint(1, 2),
        num_heads=kv_heads * pick.choice([1, 2]),
        num_kv_heads=kv_heads,
        head_dim=pick.choice([8, 16]),
        tie_word_embeddings=pick.random() < 0.4,
        attention_bias=pick.random() < 0.4,
        mlp_bias=pick.random() < 0.4,
    )
    limits = Limits(rows, CONTEXT, rows, rows, rows * CONTEXT // 16, 16)
    bucket = Bucket(rows, rows, CONTEXT, decode=pick.random() < 0.5)
    options = CompileOptions(1, min_chunk=MIN_CHUNK, fixed_order=True)
    plain = compile_graph(llama_graph(config, limits, bucket, dtype), options)
    seed = pick.getrandbits(20)
    return Case(seed, config, limits, bucket, options, plain, plain, rows, rows, steps=1)


def memory_of(case: Case) -> Memory:
    """The memory of one rank. Steps that are no decode steps have prompts of 50 rows."""
    whole = fresh_memory(case, case.plain)
    if not case.bucket.decode:
        rows = torch.arange(case.rows, dtype=torch.int32)
        whole.write("step.row_sequence", rows // 50)
        whole.write("step.row_position", CONTEXT - 60 + rows % 50)
    return whole


def program_of(case: Case, dtype: DType, ranks: int, options: CompileOptions) -> Program:
    # On several ranks logits that the host reads are those of programs that sample.
    bucket = replace(case.bucket, sampled=ranks > 1 and case.seed % 2 == 0)
    graph = llama_graph(case.config, case.limits, bucket, dtype, Parallel(ranks))
    return compile_graph(graph, options)


def logits_of(case: Case, program: Program) -> torch.Tensor:
    memory = memory_of(case)
    if program.ranks > 1:
        memory = memory_of_ranks(case, Parallel(program.ranks), memory, program)
    else:
        memory.allocate(program.tensors)
    CpuMachine().load(program, memory, verify=False).run(1)
    return logits_of_ranks(case, memory)[0]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 8, 40, 200])
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30))
def test_logits_have_the_same_bits_for_any_workers_and_ranks(
    rows: int, dtype: DType, seed: int
) -> None:
    pick = random.Random(seed)
    case = case_of(pick, rows, dtype)
    want = logits_of(case, case.plain)
    assert want.isfinite().all()
    for ranks in (1, 2, 4):
        options = replace(
            case.options,
            workers=pick.randint(2, 24),
            assignment=pick.choice(["balanced", "round_robin", "dynamic"]),
            exchange=pick.choice(["barrier", "preferred"]),
            waves=pick.choice([1, 2]),
            column_unit=pick.choice([8, 16]),
            part_of_k=pick.choice([0, 64]),
            halves=pick.choice(["none", "all"]),
        )
        got = logits_of(case, program_of(case, dtype, ranks, options))
        assert torch.equal(got, want), (case, ranks, options)


def test_without_it_a_split_context_has_other_bits() -> None:
    """In float32: bfloat16 rounds most of such differences away."""
    case = case_of(random.Random(1), 1, F32)
    want = logits_of(case, case.plain)
    for fixed in (False, True):
        options = replace(case.options, workers=24, fixed_order=fixed)
        program = program_of(case, F32, 1, options)
        splits = {i.num_splits for i in program.instructions if isinstance(i, Attention)}
        assert (splits == {1}) == fixed
        assert torch.equal(logits_of(case, program), want) == fixed


LLAMA = LlamaConfig(
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=8192,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)


@pytest.mark.parametrize("rows", [1, 4, 40, 200])
def test_programs_of_a_gpu_split_nothing(rows: int) -> None:
    def instructions(fixed_order: bool, ranks: int) -> list[object]:
        parallel = Parallel(ranks)
        limits = default_limits(LLAMA)

        def options(rows: int) -> CompileOptions:
            return default_options("cuda", 132, rows, fixed_order=fixed_order)

        bucket = choose_bucket(LLAMA, limits, options, rows, min(rows, 64), 8192, parallel=parallel)
        graph = llama_graph(LLAMA, limits, bucket, BF16, parallel)
        return list(compile_graph(graph, options(rows), verified=False).instructions)

    def is_split(inst: object) -> bool:
        if isinstance(inst, Attention):
            return inst.num_splits > 1
        return isinstance(inst, Matmul) and inst.part > 0

    for ranks in (1, 2):
        assert not any(map(is_split, instructions(True, ranks)))
    assert any(map(is_split, instructions(False, 1)))


def test_rows_that_attend_together_do_not_depend_on_workers_or_ranks() -> None:
    """A GPU adds up a row alone in another order than rows of a run."""
    for rows in (17, 40, 200, 512, 768, 1536):
        tilings = {
            attention_tiling(
                rows, heads, 64, 8192, default_options("cuda", workers, rows, fixed_order=True), 512
            ).rows
            for heads in (1, 2, 4, 8)
            for workers in (2, 66, 132)
        }
        assert len(tilings) == 1


@pytest.mark.parametrize("parallel", [ONE_RANK, Parallel(2)])
@pytest.mark.parametrize("rows", [16, 32, 128])
def test_the_newest_keys_pass_apart_whatever_the_share_of_a_rank(
    rows: int, parallel: Parallel
) -> None:
    """A kernel adds up a row's own token apart, and two ranks have half of the bytes each."""
    limits = Limits(128, 8192, 128, 128, 128 * 128, 64)
    graph = llama_graph(LLAMA, limits, Bucket(rows, rows, 8192, decode=True), BF16, parallel)
    for fixed in (False, True):
        options = default_options("cuda", 132, rows, fixed_order=fixed)
        program = compile_graph(graph, options, verified=False)
        attentions = [i for i in program.instructions if isinstance(i, Attention)]
        assert attentions
        assert all(i.k_new != NONE != i.v_new for i in attentions)
        assert program.tensors[attentions[0].k_new].tagged == (rows == 16)


def test_its_kernels_are_others_and_the_header_says_so() -> None:
    plain = kernel_headers(LLAMA, BF16)
    fixed = kernel_headers(LLAMA, BF16, fixed_order=True)
    assert not any("kFixedOrder" in header for header in plain)
    assert all("constexpr unsigned int kFixedOrder = 1u;" in header for header in fixed)
    options = default_options("cuda", 132, 64, fixed_order=True)
    limits = default_limits(LLAMA)
    bucket = choose_bucket(LLAMA, limits, lambda rows: options, 64, 64, 1, decode=True)
    program = compile_graph(llama_graph(LLAMA, limits, bucket, BF16), options)
    assert 64 in fixed[program_header(program)]


def test_what_cannot_keep_the_order_is_refused() -> None:
    with pytest.raises(ValueError, match="machine reference has no fixed order"):
        LLM("stories", machine="reference", fixed_order=True)
    with pytest.raises(ValueError, match="needs tensor_parallel_exchange all_gather"):
        LLM(
            "stories",
            machine="cpu",
            tensor_parallel_size=2,
            tensor_parallel_exchange="all_reduce",
            fixed_order=True,
        )
    with pytest.raises(ValueError, match="needs exchange barrier or preferred"):
        CompileOptions(4, machine="cuda", exchange="tagged", fixed_order=True)
