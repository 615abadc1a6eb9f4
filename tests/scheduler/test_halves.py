"""Steps of several ranks in halves of rows: the same results, and work beside every exchange.

Results are held against one rank, or against the program without halves; the tests of ranks, of a
fixed order and of withholding run over programs with halves too.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from parallel_llamas import logits_of_ranks, memory_of_ranks
from random_llamas import Case, fresh_memory

from megavm.instructions.attention import Attention
from megavm.instructions.embed import Embed
from megavm.instructions.noop import Noop
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.compiler.rewrites import rewrite
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import ONE_RANK, Exchange, Parallel
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Instruction
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, DType, TensorKind

EXCHANGES: tuple[Exchange, ...] = ("all_reduce", "all_gather")
CONTEXT, BLOCK = 64, 16


def prompts(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and position of each row, of prompt chunks and single rows."""
    pick = random.Random(seed)
    sequences: list[int] = []
    positions: list[int] = []
    while len(sequences) < rows:
        count = min(pick.choice([1, 1, 5, rows]), rows - len(sequences), CONTEXT // 2)
        begin = pick.randint(0, CONTEXT - count - 1)
        sequences += [len(set(sequences))] * count
        positions += range(begin, begin + count)
    return torch.tensor(sequences, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)


def random_case(seed: int, parallel: Parallel) -> Case:
    """A Llama of several ranks, a step of it compiled for one rank, and options with halves."""
    ranks = parallel.ranks
    pick = random.Random(seed)
    kv_heads = ranks * pick.choice([1, 1, 2])
    config = LlamaConfig(
        vocab_size=ranks * pick.randint(16, 64),
        hidden_size=8 * ranks * pick.choice([1, 2, 3]),
        intermediate_size=pick.choice([48, 100, 33]),
        num_layers=pick.randint(1, 2),
        num_heads=kv_heads * pick.choice([1, 2, 3]),
        num_kv_heads=kv_heads,
        head_dim=pick.choice([8, 16, 64]),
        tie_word_embeddings=pick.random() < 0.4,
        attention_bias=pick.random() < 0.4,
        mlp_bias=pick.random() < 0.4,
    )
    rows = pick.choice([2, 3, 5, 8, 17, 40, 63])
    live = pick.choice([rows, rows, pick.randint(1, rows), 1])
    limits = Limits(rows, CONTEXT, rows, rows, rows * CONTEXT // BLOCK, BLOCK)
    bucket = Bucket(rows, pick.choice([rows, 1]), CONTEXT, decode=pick.random() < 0.5)
    options = CompileOptions(
        pick.randint(1, 7),
        assignment=pick.choice(["balanced", "round_robin", "dynamic"]),
        exchange=pick.choice(["barrier", "tagged", "preferred"]),
        fuse_norm=parallel.gathers or pick.random() < 0.7,
        waves=pick.choice([1, 2]),
        column_unit=pick.choice([8, 16]),
        part_of_k=pick.choice([0, 0, 64]),
        fixed_order=parallel.gathers and pick.random() < 0.3,
        halves="all",
    )
    graph = llama_graph(config, limits, bucket, F32)
    plain = compile_graph(graph, CompileOptions(1))
    logit_rows = min(live, bucket.logit_rows)
    return Case(seed, config, limits, bucket, options, plain, plain, live, logit_rows, steps=1)


def memory_of(case: Case, dtype: DType = F32) -> Memory:
    """The memory of one rank, with the step of the case."""
    graph = llama_graph(case.config, case.limits, case.bucket, dtype)
    whole = fresh_memory(case, compile_graph(graph, CompileOptions(1)))
    if not case.bucket.decode:
        sequence, position = prompts(case.seed, case.bucket.rows)
        whole.write("step.row_sequence", sequence)
        whole.write("step.row_position", position)
    return whole


def logits_of(case: Case, program: Program, exchange: Exchange, dtype: DType = F32) -> torch.Tensor:
    """The logits that all ranks have after a step."""
    whole = memory_of(case, dtype)
    memory = whole
    if program.ranks > 1:
        memory = memory_of_ranks(case, Parallel(program.ranks, exchange), whole, program)
    else:
        memory.allocate(program.tensors)
    CpuMachine().load(program, memory, verify=False).run(1)
    logits = logits_of_ranks(case, memory)
    assert all(torch.equal(own, logits[0]) for own in logits)
    return logits[0]


def compiled(case: Case, parallel: Parallel, dtype: DType = F32, **changes: object) -> Program:
    graph = llama_graph(case.config, case.limits, case.bucket, dtype, parallel)
    return compile_graph(graph, replace(case.options, **changes))  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30), st.sampled_from([2, 4]))
def test_halves_of_gathered_results_have_the_bits_of_one_rank(seed: int, ranks: int) -> None:
    """Prompts and single rows, in float32; any number of rows is live."""
    case = random_case(seed, Parallel(ranks))
    program = compiled(case, Parallel(ranks), part_of_k=0)  # parts are added up in another order
    want = logits_of(case, case.plain, "all_gather")
    assert want.isfinite().all()
    assert torch.equal(logits_of(case, program, "all_gather"), want), case


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30), st.sampled_from([2, 4]), st.sampled_from(EXCHANGES))
def test_halves_have_the_bits_of_the_whole(seed: int, ranks: int, exchange: Exchange) -> None:
    """Whatever the options: halves change what is computed when, not what."""
    parallel = Parallel(ranks, exchange)
    case = random_case(seed, parallel)
    halves, whole = (compiled(case, parallel, halves=h) for h in ("all", "none"))
    assert len(halves) > len(whole)
    got, want = (logits_of(case, program, exchange) for program in (halves, whole))
    assert torch.equal(got, want), case


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30), st.sampled_from([2, 4]))
@example(214, 4)  # more columns than are added up at once, and halves of fewer rows than the whole
def test_in_bfloat16_a_fixed_order_has_the_bits_of_one_rank(seed: int, ranks: int) -> None:
    case = random_case(seed, Parallel(ranks))
    case = replace(case, options=replace(case.options, exchange="barrier", fixed_order=True))
    program = compiled(case, Parallel(ranks), BF16)
    want = logits_of(case, compiled(case, ONE_RANK, BF16), "all_gather", BF16)
    assert torch.equal(logits_of(case, program, "all_gather", BF16), want), case


# What is cut, and in which order.

LLAMA_8B = LlamaConfig(
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)


def llama_8b(rows: int, parallel: Parallel) -> Graph:
    limits = Limits(1, 8192, rows, 16, 128, 64)
    return llama_graph(LLAMA_8B, limits, Bucket(rows, 16, 8192), BF16, parallel)


def preferred(rows: int) -> CompileOptions:
    return replace(default_options("cuda", 132, rows), halves="preferred")


def order(rows: int, parallel: Parallel, options: CompileOptions) -> list[tuple[str, int | None]]:
    """Names of the operations of the second layer, with the number of the half."""
    return [
        (operation.label.removeprefix("layers.1."), operation.rows and int(operation.rows[0] > 0))
        for operation in rewrite(llama_8b(rows, parallel), options)
        if operation.label.startswith("layers.1.")
    ]


def test_the_first_half_of_an_operation_comes_before_the_second() -> None:
    assert order(4096, Parallel(2), preferred(4096)) == [
        ("qkv", None),  # in 247 us instead of 275: see ``_is_preferred``
        ("attention", None),
        *(("o_proj", half) for half in (0, 1)),
        *(("gate_up", half) for half in (0, 1)),
        *(("down_proj", half) for half in (0, 1)),
    ]


def test_what_lies_between_two_sums_is_done_half_by_half() -> None:
    assert order(8192, Parallel(2, "all_reduce"), preferred(8192)) == [
        *(("qkv", half) for half in (0, 1)),
        ("attention", None),
        *(("o_proj", half) for half in (0, 1)),
        *((name, half) for half in (0, 1) for name in ("o_proj.sum", "gate_up", "down_proj")),
        *(("down_proj.sum", half) for half in (0, 1)),
    ]


@pytest.mark.parametrize(
    ("machine", "rows", "parallel", "halves"),
    [
        ("cuda", 8192, ONE_RANK, "all"),  # nothing travels
        ("cuda", 8192, Parallel(2), "none"),  # the default
        ("cuda", 64, Parallel(2), "preferred"),  # weights would be read twice
        ("cuda", 16, Parallel(2), "all"),  # too few rows for two matrix products
        ("cpu", 8192, Parallel(2), "preferred"),  # ranks share the memory
    ],
)
def test_some_steps_stay_whole(machine: str, rows: int, parallel: Parallel, halves: str) -> None:
    options = replace(default_options(machine, 132, rows), halves=halves)  # type: ignore[arg-type]
    assert all(half is None for _, half in order(rows, parallel, options))


def test_halves_begin_at_tiles_and_leave_no_row_out() -> None:
    for rows in (64, 96, 100, 300, 512, 1000):
        options = replace(default_options("cuda", 132, rows), halves="all")
        operations = rewrite(llama_8b(rows, Parallel(2)), options)
        cut = {operation.rows for operation in operations if operation.rows}
        (_, middle), (begin, end) = sorted(cut)
        assert (begin, end) == (middle, rows)
        assert middle % 32 == 0
        assert min(middle, rows - middle) >= 32
    few = rewrite(llama_8b(48, Parallel(2)), replace(options, halves="all"))
    assert not any(operation.rows for operation in few), "so few rows are no matrix"


# The program has work beside every exchange.


def rows_of(inst: Instruction) -> tuple[int, int]:
    fields = vars(inst)
    return fields["row_begin"], fields["row_end"]


def waits_for_ranks(program: Program) -> Counter[bool]:
    """How many waits for other ranks, in layers, stand behind work of the worker on other rows.

    Waits of attention are left out: it reads what its own rank computed, and waits to overwrite.
    """
    instructions = program.instructions
    signalled: dict[int, list[Instruction]] = {}
    for inst in instructions:
        if inst.signal is not None:
            signalled.setdefault(inst.signal, []).append(inst)
    count: Counter[bool] = Counter()
    for queue in program.queues:
        for before, number in itertools.pairwise(queue.tolist()):
            inst = instructions[number]
            if isinstance(inst, Attention | Noop) or not program.labels[number].startswith("layer"):
                continue
            for wait in inst.waits:
                awaited = signalled[wait.barrier]
                if not wait.target or wait.barrier >= program.shared_barriers:
                    continue
                if isinstance(awaited[0], Embed):
                    continue
                begin, end = rows_of(instructions[before])
                ranges = map(rows_of, awaited)
                count[all(end <= top or bottom <= begin for top, bottom in ranges)] += 1
    return count


def tower(rows: int, layers: int) -> Graph:
    """Products of ranks that gather each other's results."""
    graph = Graph(rows, ranks=2)
    x = graph.tensor("x", (rows, 2048), BF16, TensorKind.INPUT)
    for i in range(layers):
        weight = graph.weight(f"{i}.w", (1024, 2048), BF16)
        x = graph.all_gather(f"{i}.all", graph.linear(f"layers.{i}", x, weight))
    graph.output(x, "y")
    return graph


@pytest.mark.parametrize("assignment", ["round_robin", "balanced"])
def test_a_worker_has_other_rows_before_it_waits_for_an_exchange(assignment: str) -> None:
    for halves in ("none", "all"):
        options = CompileOptions(8, "cuda", assignment=assignment, halves=halves)  # type: ignore[arg-type]
        waits = waits_for_ranks(compile_graph(tower(512, 6), options))
        assert waits.total() > 0
        if halves == "all":
            assert not waits[False]
        else:
            assert waits[True] < waits[False]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_products_of_a_large_step_wait_behind_other_rows(exchange: Exchange) -> None:
    graph, options = llama_8b(8192, Parallel(2, exchange)), preferred(8192)
    waits = waits_for_ranks(compile_graph(graph, options, verified=False))
    assert waits.total() > 0
    assert not waits[False]
    whole = compile_graph(graph, replace(options, halves="none"), verified=False)
    assert waits_for_ranks(whole)[False] > 100


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="halves 'both' is not none, preferred or all"):
        CompileOptions(1, halves="both")  # type: ignore[arg-type]
