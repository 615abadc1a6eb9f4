"""Tensor parallelism: all-gathers give the bits of one rank, all-reduces the same within rounding.

Ranks run as groups of threads of the CPU machine, and one after the other on the reference machine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_llamas import memory_of_ranks
from random_llamas import Case, fresh_memory, outcome
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from megavm import LLM, SamplingParams
from megavm.instructions.attention_merge import AttentionMerge
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import Exchange, Parallel, shard
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.differential import first_divergence
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import F32

EXCHANGES: tuple[Exchange, ...] = ("all_reduce", "all_gather")


def random_parallel_case(seed: int, ranks: int, exchange: Exchange) -> tuple[Case, Parallel]:
    """A Llama of any shape that ``ranks`` can divide, compiled in any way for them."""
    pick = random.Random(seed)
    kv_heads = ranks * pick.choice([1, 1, 2])
    config = LlamaConfig(
        vocab_size=pick.choice([ranks * pick.randint(16, 64), pick.randint(64, 512)]),
        hidden_size=8 * ranks * pick.choice([1, 2, 3]),
        intermediate_size=pick.choice([48, 100, 128, 33]),
        num_layers=pick.randint(1, 2),
        num_heads=kv_heads * pick.choice([1, 2, 3]),
        num_kv_heads=kv_heads,
        head_dim=pick.choice([8, 16]),
        tie_word_embeddings=pick.random() < 0.4,
        attention_bias=pick.random() < 0.4,
        mlp_bias=pick.random() < 0.4,
    )
    rows = pick.choice([1, 2, 3, 8])
    limits = Limits(rows, 64, rows, rows, rows * 4, 16)
    decode = pick.random() < 0.7
    bucket = Bucket(rows, rows, 64, decode, sampled=random.Random(f"sampled {seed}").random() < 0.5)
    options = CompileOptions(
        pick.randint(1, 6),
        assignment=pick.choice(["balanced", "round_robin", "dynamic"]),
        exchange=pick.choice(["barrier", "tagged", "preferred"]),
        waves=pick.choice([1, 2]),
        column_unit=pick.choice([8, 16]),
        halves=pick.choice(["none", "all"]),
    )
    parallel = Parallel(ranks, exchange)
    plain = compile_graph(llama_graph(config, limits, bucket, F32), CompileOptions(1))
    graph = llama_graph(config, limits, bucket, F32, parallel)
    live = pick.randint(1, rows)
    return (
        Case(
            seed=seed,
            config=config,
            limits=limits,
            bucket=bucket,
            options=options,
            program=compile_graph(graph, options),
            plain=plain,
            rows=live,
            logit_rows=live,
            steps=4,
        ),
        parallel,
    )


def run(case: Case, parallel: Parallel, program: Program, whole: Memory) -> Memory:
    memory = memory_of_ranks(case, parallel, whole)
    CpuMachine().load(program, memory, verify=False).run(case.steps)
    return memory


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30), st.sampled_from([2, 4, 8]), st.sampled_from(EXCHANGES))
def test_ranks_compute_what_one_does(seed: int, ranks: int, exchange: Exchange) -> None:
    case, parallel = random_parallel_case(seed, ranks, exchange)
    whole = fresh_memory(case, case.plain)
    memory = run(case, parallel, case.program, whole)
    CpuMachine().load(case.plain, whole, verify=False).run(case.steps)
    want = outcome(case, whole)
    for rank in memory.ranks:
        got = rank["logits"][: case.logit_rows], rank["step.tokens"]
        if exchange == "all_gather":
            assert torch.equal(got[0], want.logits), case
            assert torch.equal(got[1], want.tokens), case
        else:
            # Rounding may choose another token in a step before: compare the logits of one step.
            assert torch.equal(got[0], memory["logits"][: case.logit_rows]), case
            assert torch.equal(got[1], memory["step.tokens"]), case
    if exchange == "all_reduce":
        one = replace(case, steps=1)
        whole = fresh_memory(one, case.plain)
        memory = run(one, parallel, case.program, whole)
        CpuMachine().load(case.plain, whole, verify=False).run(1)
        apart = (memory["logits"] - whole["logits"])[: case.logit_rows].abs().max().item()
        assert apart < 1e-4, case


@pytest.mark.parametrize(("seed", "ranks"), [(876, 8), (135, 4)])
def test_the_end_of_a_step_has_no_barrier_that_is_awaited_in_it(seed: int, ranks: int) -> None:
    """Attention once waited for a barrier that down_proj signals too: a deadlock.

    In these two programs attention reads earlier rows of so many writers that their barriers are
    merged, and some of these writers are the last of a step, whose barriers are merged as well.
    """
    random_parallel_case(seed, ranks, "all_reduce")  # verifies the program


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("seed", range(4))
def test_the_cpu_machine_agrees_with_the_reference_instruction_by_instruction(
    seed: int, exchange: Exchange
) -> None:
    case, parallel = random_parallel_case(seed, 2, exchange)
    memory = memory_of_ranks(case, parallel, fresh_memory(case, case.plain))
    found = first_divergence(case.program, memory, ReferenceMachine(), CpuMachine())
    assert found is None, found


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_vocabulary_that_ranks_cannot_divide_is_computed_by_each(exchange: Exchange) -> None:
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
    )
    limits, bucket = Limits(2, 64, 2, 2, 8, 16), Bucket(2, 2, 64, decode=True)
    parallel = Parallel(2, exchange)
    graph = llama_graph(config, limits, bucket, F32, parallel)
    program = compile_graph(graph, CompileOptions(3, exchange="tagged"))
    plain = compile_graph(llama_graph(config, limits, bucket, F32), CompileOptions(1))
    case = Case(5, config, limits, bucket, CompileOptions(3), program, plain, 2, 2, steps=3)
    whole = fresh_memory(case, plain)
    memory = run(case, parallel, program, whole)
    CpuMachine().load(plain, whole, verify=False).run(case.steps)
    for rank in memory.ranks:
        torch.testing.assert_close(rank["logits"], whole["logits"])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_splits_of_a_context_are_merged_on_each_rank(exchange: Exchange) -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    limits, bucket = Limits(1, 64, 1, 1, 4, 16), Bucket(1, 1, 64)
    parallel, options = Parallel(2, exchange), CompileOptions(8, exchange="tagged", min_chunk=8)
    program = compile_graph(llama_graph(config, limits, bucket, F32, parallel), options)
    assert any(isinstance(inst, AttentionMerge) for inst in program.instructions)
    plain = compile_graph(llama_graph(config, limits, bucket, F32), CompileOptions(1))
    case = Case(6, config, limits, bucket, options, program, plain, 1, 1, steps=1)
    whole = fresh_memory(case, plain)
    memory = run(case, parallel, program, whole)
    CpuMachine().load(plain, whole, verify=False).run(1)
    for rank in memory.ranks:
        torch.testing.assert_close(rank["logits"], whole["logits"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four KV heads."""
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("llama")
    config = HFConfig(
        vocab_size=192,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


PROMPTS = [[5, 9, 33, 7, 150, 2, 8], [100], [17] * 40]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_llm_of_several_ranks_answers_as_transformers(
    model: Path, ranks: int, exchange: Exchange
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    with LLM(
        model,
        machine="cpu",
        dtype="float32",
        max_num_batched_tokens=16,  # the long prompt is computed in chunks
        tensor_parallel_size=ranks,
        tensor_parallel_exchange=exchange,
    ) as llm:
        got = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params)]
    reference = LlamaForCausalLM.from_pretrained(model).float().eval()
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        with torch.no_grad():
            want = reference.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        assert tokens == want[0, len(prompt) :].tolist()


def test_seeds_penalties_and_logprobs_are_those_of_one_rank(model: Path) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=0.9, top_p=0.9, seed=11, repetition_penalty=1.2, logprobs=3
    )
    results = []
    for ranks in (1, 2):
        with LLM(
            model,
            machine="cpu",
            dtype="float32",
            tensor_parallel_size=ranks,
            tensor_parallel_exchange="all_gather",
        ) as llm:
            first = llm.generate(PROMPTS, params)
            again = llm.generate(PROMPTS, params)  # finds prefixes in the cache
            results.append([(o.token_ids, o.logprobs) for r in (*first, *again) for o in r.outputs])
    assert results[0] == results[1]


def test_a_number_of_ranks_that_does_not_divide_the_kv_heads_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="is 3: it must divide the model's 4 KV heads"):
        LLM(model, machine="cpu", tensor_parallel_size=3)
    with pytest.raises(ValueError, match="expected all_reduce or all_gather"):
        LLM(model, machine="cpu", tensor_parallel_size=2, tensor_parallel_exchange="sum")  # type: ignore[arg-type]


def test_a_trace_has_the_workers_of_all_ranks(model: Path) -> None:
    from megavm.profiler.recorder import Recorder

    recorder = Recorder()
    with LLM(model, machine="cpu", tensor_parallel_size=2, workers=3) as llm:
        llm.record(recorder)
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0.0))
        trace = recorder.trace()
    assert trace.workers == 6
    assert len(trace.machine["ranks"]) == 2
    executed = np.bincount(trace.record_worker, minlength=6)
    assert executed[:3].tolist() == executed[3:].tolist()


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"), [((3, 8), 4, 0), ((12, 2), 4, 1), ((7, 8), 2, 0), ((12, 3), 3, 1)]
)
def test_shards_are_consecutive_ranges_with_zeros_at_the_end(
    shape: tuple[int, int], ranks: int, dim: int
) -> None:
    whole = torch.arange(12 * 8).reshape(12, 8)
    parts = [shard(whole, shape, rank) for rank in range(ranks)]
    assert all(tuple(part.shape) == shape for part in parts)
    joined = torch.cat(parts, dim)
    size, most = whole.shape[dim], joined.shape[dim]
    assert torch.equal(joined.narrow(dim, 0, size), whole)
    assert not joined.narrow(dim, size, most - size).any()


def test_a_shard_of_whole_rows_is_not_copied() -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    assert shard(whole, (3, 2), 1).data_ptr() == whole[3].data_ptr()
