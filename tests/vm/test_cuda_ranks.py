"""Programs of several ranks on the CudaMachine. With one GPU the ranks share it.

What they compute is held against torch, transformers and the CPU machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choices_of_ranks import Kept, check_choices_of_ranks
from copy_programs import ACTIVATION, INPUT, copy
from scattering import check_scattering
from sums_and_gathers import check_sums_and_gathers, sums_and_gathers
from two_choices import check_two_choices

from megavm import LLM, SamplingParams
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.parallel import Exchange
from megavm.scheduler.run import machines
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda import machine as cuda_machines
from megavm.vm.cuda.launch import BARRIER_STRIDE
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec
from megavm.vm.verify import verify

MakeMachine = Callable[..., CudaMachine]
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        CompileOptions(5, machine="cuda"),
        CompileOptions(4, machine="cuda", exchange="tagged"),
        CompileOptions(7, machine="cuda", exchange="preferred", all_reduce="scatter"),
        CompileOptions(3, machine="cuda", exchange="tagged", assignment="dynamic", waves=2),
    ],
    ids=["barrier", "tagged", "scatter", "dynamic"],
)


@OPTIONS
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_graph_gathers_and_sums_over_ranks(
    cuda_ranks: MakeMachine, ranks: int, rows: int, dtype: DType, options: CompileOptions
) -> None:
    check_sums_and_gathers(cuda_ranks(ranks), ranks, rows, dtype, options)


@OPTIONS
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", ["own", "whole"])
def test_ranks_choose_the_first_of_the_largest_of_all_their_logits(
    cuda_ranks: MakeMachine,
    ranks: int,
    rows: int,
    dtype: DType,
    kept: Kept,
    options: CompileOptions,
) -> None:
    check_choices_of_ranks(cuda_ranks(ranks), ranks, rows, options, dtype, kept)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("ranks", [1, 2])
@OPTIONS
def test_one_program_has_greedy_and_sampled_choices(
    cuda_ranks: MakeMachine, ranks: int, rows: int, options: CompileOptions
) -> None:
    check_two_choices(cuda_ranks(ranks), CpuMachine(), rows, ranks, options)


@pytest.mark.parametrize("ranks", [2, 3])
@OPTIONS
def test_halves_of_the_rows_gather_and_sum(
    cuda_ranks: MakeMachine, ranks: int, options: CompileOptions
) -> None:
    """32 and 18 rows: matrix products, the second with a tile that is not full."""
    options = replace(options, halves="all")
    check_sums_and_gathers(cuda_ranks(ranks), ranks, 50, BF16, options)


X, ALL, Y, Z = range(4)


def words_program(columns: int, dtype: DType, tagged: bool, ranks: int = 3) -> Program:
    """Every rank sends its x to all ranks, in pieces that share words, and copies what came."""
    tensors = [
        TensorSpec("x", (2, columns), dtype, INPUT),
        TensorSpec("all", (2, ranks * columns), dtype, ACTIVATION, tagged=tagged, shares=ranks),
        TensorSpec("y", (2, ranks * columns), dtype, TensorKind.STATE),
    ]
    half = columns // 4 * 2 if tagged else columns // 2
    instructions = [
        copy(X, ALL, (0, half), rows=(0, 2), waits=[(1, 0)], signal=0),
        copy(X, ALL, (half, columns), rows=(0, 2), waits=[(1, 0)], signal=0),
        copy(ALL, Y, (0, ranks * columns), rows=(0, 2), waits=[(0, 2 * ranks)], signal=1),
    ]
    return Program.build(
        tensors,
        instructions,
        [[0], [1], [2]],
        barriers=["sent", "read"],
        ranks=ranks,
        shared_barriers=2,
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
def test_shares_of_any_width_arrive_whole(
    cuda_ranks: MakeMachine, dtype: DType, tagged: bool
) -> None:
    machine = cuda_ranks(3)
    for columns in (4, 6, 10, 12, 32):
        program = words_program(columns, dtype, tagged)
        verify(program, "cuda")
        memory = machine.memory(3)
        memory.allocate(program.tensors)
        parts = []
        for number, rank in enumerate(memory.ranks):
            parts.append(torch.arange(2.0 * columns).reshape(2, columns) + 70 * number)
            rank.write("x", parts[-1])
        machine.load(program, memory).run(20)
        for rank in memory.ranks:
            assert torch.equal(rank["y"].cpu().float(), torch.cat(parts, 1)), columns


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_what_ranks_scatter_arrives_on_one_rank_alone(
    cuda_ranks: MakeMachine, dtype: DType
) -> None:
    check_scattering(cuda_ranks(3), dtype, (1, 2, 3, 4, 8, 12, 33, 64))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "tagged"])
def test_a_gpu_that_is_late_loses_nothing_of_the_first_launch(
    cuda_ranks: MakeMachine, tagged: bool
) -> None:
    """Its counters and words are filled with zeros before other ranks write them.

    Ranks that share a GPU cannot show it: their launches wait for what that GPU was asked before.
    """
    machine = cuda_ranks(2, timeout=2.0)
    program = words_program(8, F32, tagged, ranks=2)
    for late in range(2):
        memory = machine.memory(2)
        with torch.cuda.device(late):
            torch.cuda._sleep(500_000_000)  # clock cycles: a quarter of a second or more
        memory.allocate(program.tensors)
        executable = machine.load(program, memory)
        executable.run()


def stopping_program() -> Program:
    tensors = [
        TensorSpec("x", (1, 4), F32, INPUT),
        TensorSpec("all", (1, 8), F32, ACTIVATION, shares=2),
        TensorSpec("y", (1, 8), F32, TensorKind.STATE),
        TensorSpec("z", (1, 8), F32, TensorKind.STATE),
    ]
    instructions = [
        copy(X, ALL, (0, 4), waits=[(1, 0)], signal=0),
        copy(ALL, Y, (0, 8), waits=[(0, 2), (2, 0)], signal=1),
        copy(Y, Z, (0, 8), waits=[(1, 2)], signal=2),
    ]
    return Program.build(
        tensors,
        instructions,
        [[0, 1], [2]],
        barriers=["b0", "b1", "b2"],
        ranks=2,
        shared_barriers=2,
    )


def test_a_rank_that_stops_is_named_and_stops_all(cuda_ranks: MakeMachine) -> None:
    program = stopping_program()
    machine = cuda_ranks(2, timeout=0.3)
    memory = machine.memory(2)
    memory.allocate(program.tensors)
    executable = machine.load(program, memory)
    executable.run(2)
    executable._ranks[1].counters[2 * BARRIER_STRIDE] -= 1
    torch.cuda.synchronize(memory.ranks[1].device)
    with pytest.raises(MachineFault) as caught:
        executable.run(1)
    assert "gave up after 0.3 s" in caught.value.cause
    text = str(caught.value)
    assert "rank 1, worker 0 (waiter): instruction 1" in text
    assert "waits for barrier 2 (b2): value 1, target 2" in text
    assert {state.rank for state in caught.value.workers} == {0, 1}
    with pytest.raises(MachineFault, match="reset it"):
        executable.run(1)
    executable.reset()
    executable.run(3)
    assert executable.barriers == [6, 6, 3, 6, 6, 3]


def test_instructions_of_a_rank_run_alone(cuda_ranks: MakeMachine) -> None:
    program = stopping_program()
    machine = cuda_ranks(2)
    memory = machine.memory(2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", torch.full((1, 4), number + 1.0))
    executable = machine.load(program, memory)
    executable.execute_one(0, rank=1)
    for rank in memory.ranks:
        assert rank["all"].cpu().tolist() == [[0.0] * 4 + [2.0] * 4]
    with pytest.raises(IndexError, match="instruction 0 of rank 2: the program has 3 on each of 2"):
        executable.execute_one(0, rank=2)


def test_what_does_not_fit_is_refused(
    cuda_ranks: MakeMachine, cuda_machine: CudaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = stopping_program()
    machine = cuda_ranks(2)
    with pytest.raises(ValueError, match="the machine has 2 ranks, not 3"):
        machine.memory(3)
    with pytest.raises(ValueError, match="the machine has 1 ranks, not 2"):
        cuda_machine.memory(2)
    elsewhere = Memory([f"cuda:{number}" for number in machine.devices])
    elsewhere.allocate(program.tensors)
    with pytest.raises(ValueError, match="tensor all has shares and is not in memory that all"):
        machine.load(program, elsewhere)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match="CUDA_LAUNCH_BLOCKING is set"):
        cuda_ranks(2)


def test_a_copy_of_a_memory_runs_on_its_own(cuda_ranks: MakeMachine) -> None:
    program = stopping_program()
    machine = cuda_ranks(2)
    memory = machine.memory(2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", torch.full((1, 4), number + 1.0))
    twin = memory.copy()
    machine.load(program, twin).run(2)
    assert memory["all"].cpu().tolist() == [[0.0] * 8]
    assert twin.ranks[1]["z"].cpu().tolist() == [[1.0] * 4 + [2.0] * 4]


def test_the_clocks_of_gpus_are_compared(cuda_ranks: MakeMachine) -> None:
    machine = cuda_ranks(2)
    first, offset = machine.clock_offsets()
    assert (first.nanoseconds, first.uncertainty) == (0, 0)
    assert 0 < offset.uncertainty < 20_000
    again = machine.clock_offsets()[1]
    near = offset.uncertainty + again.uncertainty + 1000  # they drift meanwhile
    assert abs(again.nanoseconds - offset.nanoseconds) <= near
    if machine.devices[0] == machine.devices[1]:
        assert abs(offset.nanoseconds) <= offset.uncertainty


def test_traces_have_the_workers_of_all_ranks_on_one_clock(cuda_ranks: MakeMachine) -> None:
    program = stopping_program()
    machine = cuda_ranks(2, trace=True)
    memory = machine.memory(2)
    memory.allocate(program.tensors)
    executable = machine.load(program, memory)
    executable.run(3)
    (notes,) = executable.trace()
    workers, _, _, instruction = notes.places(program)
    assert set(workers.tolist()) == {0, 1, 2, 3}
    times = notes.times.cpu().numpy()
    begin, end = (times[:, notes.events[name]] for name in ("begin", "end"))
    assert (end >= begin).all()
    # A step waits for the other rank, so the gathers of a step are near each other, but for turns
    # that other processes of the GPU take.
    gathers = np.sort(begin[instruction == 0])
    assert len(gathers) == 6
    assert gathers[-1] - gathers[0] < 100_000_000
    uncertainty = machine.clock_offsets()[1].uncertainty
    # Nothing that was gathered is copied before both ranks have begun to send it.
    for step in range(3):
        sent = begin[(instruction == 0)].reshape(2, 3)[:, step]
        copied = end[(instruction == 1)].reshape(2, 3)[:, step]
        assert copied.min() + 2 * uncertainty + 1000 >= sent.max()


# Llama.


@pytest.fixture
def shared_gpus(cuda_ranks: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLMs of several ranks run on the GPUs that there are."""
    like, count = cuda_ranks(1), torch.cuda.device_count()
    unavailable, free = cuda_machines.reason_unavailable, cuda_machines.free_memory

    class OnSharedGpus(CudaMachine):
        def __init__(self, devices: Sequence[int]) -> None:
            super().__init__([number % count for number in devices], like.timeout, root=like.root)

    monkeypatch.setattr(machines, "CudaMachine", OnSharedGpus)
    monkeypatch.setattr(cuda_machines, "reason_unavailable", lambda i=0: unavailable(i % count))
    monkeypatch.setattr(cuda_machines, "free_memory", lambda i=0: free(i % count) // 8)


PROMPTS = [[5, 9, 33, 7, 150, 2, 8], [100], [17] * 40]
SHAPE = {
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather"])
@pytest.mark.usefixtures("shared_gpus")
def test_an_llm_of_several_ranks_answers_as_transformers(
    make_llama: Callable[..., tuple[Path, Any]], ranks: int, exchange: Exchange
) -> None:
    directory, model = make_llama(7, **SHAPE)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    with LLM(
        directory,
        machine="cuda",
        max_num_batched_tokens=16,  # the long prompt is computed in chunks
        tensor_parallel_size=ranks,
        tensor_parallel_exchange=exchange,
    ) as llm:
        got = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params)]
        alone = list(llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids)
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        with torch.no_grad():
            want = model.generate(
                torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None
            )
        assert tokens == want[0, len(prompt) :].tolist()
    assert alone == got[0]


@pytest.mark.usefixtures("shared_gpus")
def test_all_gathers_give_the_bits_of_one_rank(
    make_llama: Callable[..., tuple[Path, Any]],
) -> None:
    """If the order of additions is fixed: else it depends on how the work is cut for so many ranks."""
    directory, _ = make_llama(8, "bfloat16", **SHAPE)
    params = SamplingParams(
        max_tokens=40, temperature=0.9, top_p=0.9, seed=11, repetition_penalty=1.2, logprobs=3
    )
    results = []
    for ranks in (1, 2):
        with LLM(
            directory,
            machine="cuda",
            tensor_parallel_size=ranks,
            tensor_parallel_exchange="all_gather",
            fixed_order=True,
        ) as llm:
            made = [llm.generate(PROMPTS, params) for _ in range(2)]
            results.append([(o.token_ids, o.logprobs) for m in made for r in m for o in r.outputs])
    assert results[0] == results[1]


@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather"])
@pytest.mark.usefixtures("shared_gpus")
def test_2000_tokens_are_the_same_twice(
    make_llama: Callable[..., tuple[Path, Any]], exchange: Exchange
) -> None:
    directory, _ = make_llama(9, "bfloat16", **SHAPE | {"max_position_embeddings": 2048})
    params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
    with LLM(
        directory, machine="cuda", tensor_parallel_size=2, tensor_parallel_exchange=exchange
    ) as llm:
        first, second = (
            [o.outputs[0].token_ids for o in llm.generate([[5, 9], [7] * 30], params)]
            for _ in range(2)
        )
    assert first == second
    assert len(first[0]) == 2000


def test_a_rank_may_stop_at_any_instruction(cuda_ranks: MakeMachine) -> None:
    """A signal is lost, of a random barrier on a random rank: every run ends, names it, and runs again."""
    machine = cuda_ranks(2, timeout=0.05)
    graph = sums_and_gathers(3, 2, F32)
    program = compile_graph(graph, CompileOptions(4, machine="cuda"))
    memory = machine.memory(2)
    memory.allocate(program.tensors)
    executable = machine.load(program, memory)
    waited = sorted({w.barrier for inst in program.instructions for w in inst.waits})
    rng = np.random.default_rng(5)
    for _ in range(100):
        executable.run(2)
        rank, barrier = int(rng.integers(2)), int(rng.choice(waited))
        lost = int(program.signals[barrier]) + 1
        executable._ranks[rank].counters[barrier * BARRIER_STRIDE] -= lost
        torch.cuda.synchronize(memory.ranks[rank].device)
        with pytest.raises(MachineFault) as caught:
            executable.run(3)
        text = str(caught.value)
        assert f"barrier {barrier} ({program.barriers[barrier]})" in text, (rank, barrier)
        assert f"rank {rank}, worker" in text
        executable.reset()
    executable.run(5)
