"""Tensor parallelism: all-gathers give the bits of one rank, all-reduces the same within rounding.

Ranks run as groups of threads of the CPU machine, and one after the other on the reference machine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_llamas import logits_of_ranks, memory_of_ranks
from random_llamas import Case, fresh_memory, outcome
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from megavm import LLM, SamplingParams
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.sample import Sample
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import Exchange, Parallel, shard
from megavm.scheduler.run.stand_ins import can_stand_in
from megavm.vm.config import NONE
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.differential import first_divergence
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32

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
    # With sums over ranks, rounding may choose another token: the logits of one step are compared.
    gathers = exchange == "all_gather"
    logits = logits_of_ranks(case, memory)
    for got in logits:
        assert torch.equal(got, want.logits if gathers else logits[0]), case
    for rank in memory.ranks:
        tokens = want.tokens if gathers else memory["step.tokens"]
        assert torch.equal(rank["step.tokens"], tokens), case
    if exchange == "all_reduce":
        one = replace(case, steps=1)
        whole = fresh_memory(one, case.plain)
        memory = run(one, parallel, case.program, whole)
        CpuMachine().load(case.plain, whole, verify=False).run(1)
        apart = logits_of_ranks(one, memory)[0] - whole["logits"][: case.logit_rows]
        assert apart.abs().max().item() < 1e-4, case


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
    for got in logits_of_ranks(case, memory):
        torch.testing.assert_close(got, whole["logits"])


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_lowest_of_equal_logits_is_chosen_whichever_rank_has_it(
    model: Path, tmp_path: Path, ranks: int
) -> None:
    """Each row of the LM head is there four times: on all ranks."""
    twins = LlamaForCausalLM.from_pretrained(model).float()
    head = twins.lm_head.weight.data
    head[:] = head[:48].repeat(4, 1)
    twins.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    results = []
    for count in (1, ranks):
        with LLM(tmp_path, machine="cpu", dtype="float32", tensor_parallel_size=count) as llm:
            outputs = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
            alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in PROMPTS]
            results += [outputs, alone]
    assert all(result == results[0] for result in results)
    assert all(token < 48 for tokens in results[0] for token in tokens)


def greedy_and_others(llm: LLM) -> tuple[list[Any], list[Any]]:
    """What greedy requests get before, beside and after others with log-probabilities; logits."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    wanted = [
        greedy,
        replace(greedy, logprobs=3),
        replace(greedy, logprobs=0, prompt_logprobs=2),
        replace(greedy, max_tokens=3, logprobs=2),
    ]
    made = [llm.generate([*PROMPTS, PROMPTS[0]], params) for params in (greedy, wanted, greedy)]
    made.append(llm.generate(PROMPTS[:1], greedy))
    found = [
        (r.prompt_logprobs, o.token_ids, o.logprobs)
        for requests in made
        for r in requests
        for o in r.outputs
    ]
    logits = [llm.logits(PROMPTS[2]) for _ in range(2)]
    made = [llm.generate(PROMPTS[1:], params) for params in (greedy, wanted[1])]
    found += [(None, o.token_ids, o.logprobs) for m in made for r in m for o in r.outputs]
    return found, logits


@pytest.mark.parametrize("fixed_order", [False, True])
def test_greedy_requests_beside_logprobs_get_what_one_rank_gives_them(
    model: Path, fixed_order: bool
) -> None:
    """Greedy programs of ranks gather no logits: others run steps whose logits the host reads."""
    results = []
    for ranks in (1, 2, 4):
        with LLM(
            model,
            machine="cpu",
            dtype="float32",
            max_num_batched_tokens=16,  # the long prompt is computed in chunks
            tensor_parallel_size=ranks,
            fixed_order=fixed_order,
        ) as llm:
            at_first = set(llm.runner.programs.compiled)
            results.append(greedy_and_others(llm))
            kinds = {bucket.sampled for bucket in set(llm.runner.programs.compiled) - at_first}
            assert kinds == ({False} if ranks == 1 else {False, True})
    reference = LlamaForCausalLM.from_pretrained(model).float().eval()
    with torch.no_grad():
        want = reference(torch.tensor([PROMPTS[2]])).logits[0].numpy()
    for found, logits in results:
        assert found == results[0][0]
        for values in logits:
            assert np.array_equal(values, results[0][1][0])
            np.testing.assert_allclose(values, want, atol=1e-3)


def test_a_step_that_wants_logits_of_ranks_never_runs_by_a_greedy_program(model: Path) -> None:
    rows = np.zeros(1, np.int32)
    step = Step(rows, rows, rows, 1, wants_logits=False)
    for ranks, exchange in ((1, "all_gather"), (2, "all_gather"), (2, "all_reduce")):
        with LLM(
            model,
            machine="cpu",
            tensor_parallel_size=ranks,
            tensor_parallel_exchange=exchange,  # type: ignore[arg-type]
        ) as llm:
            runner = llm.runner
            own = (
                runner.programs.own(step, 1),
                runner.programs.own(replace(step, wants_logits=True), 1),
            )
            assert [bucket.sampled for bucket in own] == [False, ranks > 1]
            assert can_stand_in(own[0], own[1]) == (ranks == 1)
            assert can_stand_in(own[1], own[0])
            runner.memory["logits"].fill_(torch.nan)
            runner.run(step)
            assert np.isnan(runner.logits[0]).all() == (ranks > 1)
            runner.run(replace(step, wants_logits=True))
            assert not np.isnan(runner.logits[0]).any()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_greedy_program_of_ranks_gathers_peaks_and_no_logits(
    ranks: int, rows: int, exchange: Exchange
) -> None:
    """On GPUs. In a step of one row all exchanges are of words: ranks share no barrier."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
    )
    limits = Limits(rows, 512, rows, rows, 8 * rows, 64)
    for sampled in (False, True):
        bucket = Bucket(rows, rows, 512, decode=rows > 1, sampled=sampled)
        graph = llama_graph(config, limits, bucket, BF16, Parallel(ranks, exchange))
        program = compile_graph(graph, default_options("cuda", 16, rows))
        tensors = {tensor.name: tensor for tensor in program.tensors}
        gathered = {name for name, tensor in tensors.items() if tensor.shares > 1}
        samples = [i for i in program.instructions if isinstance(i, Sample)]
        if sampled:
            assert tensors["logits"].shares == ranks
            assert "logits.own" not in tensors
            continue
        assert "logits" not in tensors
        assert tensors["logits.own"].shape == (rows, 4096 // ranks)
        assert tensors["logits.own"].shares == 1
        assert {sample.logits for sample in samples} == {NONE}
        (peaks,) = {program.tensors[sample.peaks].name for sample in samples}
        assert peaks in gathered
        assert (program.shared_barriers == 0) == (rows == 1)


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


@pytest.mark.parametrize(("size", "ranks"), [(7, 2), (6, 4), (8, 3), (1, 2)])
def test_an_mlp_too_narrow_to_be_divided_is_refused(size: int, ranks: int) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=ranks * 32,
        intermediate_size=size,
        num_layers=1,
        num_heads=ranks,
        num_kv_heads=ranks,
        head_dim=32,
    )
    Parallel(ranks, "all_gather").check(config)
    with pytest.raises(ValueError, match=f"cannot divide an intermediate size of {size} with"):
        Parallel(ranks, "all_reduce").check(config)


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
