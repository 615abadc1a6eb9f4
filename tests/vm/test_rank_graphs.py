"""Graphs of several ranks: what they gather, sum and scatter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from choices_of_ranks import Kept, check_choices_of_ranks, choice_of_ranks, gathers_peaks_alone
from copy_programs import INPUT

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.sample import Sample
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import AllReduce, CompileOptions, default_options
from megavm.vm.config import NONE
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32

MACHINES = pytest.mark.parametrize(
    "machine", [CpuMachine(), ReferenceMachine()], ids=lambda m: m.name
)
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        CompileOptions(2),
        CompileOptions(3, exchange="tagged"),
        CompileOptions(3, exchange="preferred", all_reduce="scatter"),
        CompileOptions(2, exchange="tagged", assignment="dynamic", waves=2),
    ],
    ids=["barrier", "tagged", "scatter", "dynamic"],
)


@MACHINES
@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_graph_gathers_and_sums_over_ranks(
    ranks: int, options: CompileOptions, machine: Machine
) -> None:
    graph = Graph(rows=3, ranks=ranks)
    x = graph.tensor("x", (3, 16), F32, INPUT)
    weight = graph.weight("weight", (8, 16), F32)
    y = graph.linear("y", x, weight, dtype=F32)
    graph.output(graph.all_reduce("sum", y, None, F32), "sum")
    whole = graph.all_gather("whole", graph.linear("z", x, weight, dtype=F32))
    graph.output(
        graph.linear("end", whole, graph.weight("last", (4, 8 * ranks), F32), dtype=F32), "end"
    )
    program = compile_graph(graph, options)
    memory = Memory(ranks=ranks)
    memory.allocate(program.tensors)
    torch.manual_seed(0)
    parts = []
    for rank in memory.ranks:
        for name in ("x", "weight", "last"):
            rank.write(name, torch.randn(rank.spec(name).shape))
        parts.append(rank["x"] @ rank["weight"].T)
    machine.load(program, memory).run(3)
    for rank in memory.ranks:
        torch.testing.assert_close(rank["sum"], sum(parts, torch.zeros(3, 8)))
        torch.testing.assert_close(rank["end"], torch.cat(parts, dim=1) @ rank["last"].T)
        assert torch.equal(rank["sum"], memory["sum"])


@OPTIONS
def test_a_gather_with_another_reader_is_a_copy(options: CompileOptions) -> None:
    graph = Graph(rows=2, ranks=2)
    x = graph.tensor("x", (2, 8), F32, INPUT)
    y = graph.linear("y", x, graph.weight("weight", (8, 8), F32), dtype=F32)
    graph.output(graph.all_gather("all", y), "all")
    graph.output(graph.linear("z", y, graph.weight("w2", (8, 8), F32), dtype=F32), "z")
    program = compile_graph(graph, options)
    assert any(isinstance(i, Copy) for i in program.instructions)
    memory = Memory(ranks=2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", torch.full((2, 8), number + 1.0))
        rank.write("weight", torch.eye(8))
        rank.write("w2", torch.eye(8))
    CpuMachine().load(program, memory).run(2)
    for number, rank in enumerate(memory.ranks):
        assert rank["all"].tolist() == [[1.0] * 8 + [2.0] * 8] * 2
        assert rank["z"].tolist() == [[number + 1.0] * 8] * 2


@MACHINES
@OPTIONS
@pytest.mark.parametrize("kept", ["nothing", "own", "whole"])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 3), (3, 2), (4, 1)])
def test_ranks_choose_the_first_of_the_largest_of_all_their_logits(
    ranks: int, rows: int, kept: Kept, options: CompileOptions, machine: Machine
) -> None:
    check_choices_of_ranks(machine, ranks, rows, options, kept=kept)


@pytest.mark.parametrize("kept", ["nothing", "own"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_greedy_choice_on_gpus_waits_for_peaks_of_all_ranks_alone(rows: int, kept: Kept) -> None:
    """In a step of one row they are words: no barrier of the step holds the choice back."""
    graph = choice_of_ranks(rows, 4, 512, BF16, kept)
    program = compile_graph(graph, default_options("cuda", 8, rows))
    assert gathers_peaks_alone(program)
    products = [i for i in program.instructions if isinstance(i, Matmul)]
    choices = [i for i in program.instructions if isinstance(i, Sample)]
    assert len(products) + len(choices) == len(program)
    assert all(any(w.target for w in choice.waits) == (rows > 1) for choice in choices)
    assert len({i.tile for i in products}) == 8
    assert program.tensors[products[0].peaks].columns == 4 * 2 * 8
    assert program.tensors[products[0].peaks].tagged == (rows == 1)
    assert program.tensors[products[0].out].shares == 1


def test_logits_that_have_no_peaks_are_gathered() -> None:
    """All ranks have more columns than float32 counts exactly; one rank alone has not."""
    for share in (8, 1 << 23):
        program = compile_graph(choice_of_ranks(1, 2, share), CompileOptions(1))
        assert gathers_peaks_alone(program) == (share == 8)
        (out,) = {i.out for i in program.instructions if isinstance(i, Matmul)}
        assert program.tensors[out].shares == (1 if share == 8 else 2)


@OPTIONS
@MACHINES
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_sums_gathered_are_the_whole_sums(
    ranks: int, options: CompileOptions, machine: Machine
) -> None:
    graph = Graph(rows=3, ranks=ranks)
    x = graph.tensor("x", (3, 8), F32, INPUT)
    weight = graph.weight("weight", (8, 8), F32)
    bias, own_bias = graph.weight("bias", (8,), F32), graph.weight("own_bias", (8 // ranks,), F32)
    y = graph.linear("y", x, weight, dtype=F32)
    share = graph.output(graph.reduce_scatter("share", y, own_bias, F32), "kept")
    graph.output(graph.all_gather("all", share), "all")
    graph.output(graph.all_reduce("sum", y, bias, F32), "sum")
    program = compile_graph(graph, options)
    memory = Memory(ranks=ranks)
    memory.allocate(program.tensors)
    torch.manual_seed(0)
    all_bias = torch.randn(8)
    for number, rank in enumerate(memory.ranks):
        for name in ("x", "weight"):
            rank.write(name, torch.randn(rank.spec(name).shape))
        rank.write("bias", all_bias)
        rank.write("own_bias", all_bias.reshape(ranks, -1)[number])
    machine.load(program, memory).run(3)
    sums = torch.stack([rank["x"] @ rank["weight"].T for rank in memory.ranks]).sum(0)
    for number, rank in enumerate(memory.ranks):
        torch.testing.assert_close(rank["sum"], sums + all_bias)
        assert torch.equal(rank["all"], rank["sum"])
        width = 8 // ranks
        assert torch.equal(rank["kept"], rank["sum"][:, number * width : (number + 1) * width])


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "expected"),
    [
        (4, 1, 2048, False),
        (4, 128, 2048, True),  # 1 MiB
        (4, 4096, 2046, False),  # cannot be shared by four
        (2, 2048, 2048, False),  # 16 MiB took as long in either form on two H200s
        (2, 8192, 2048, True),  # 64 MiB, 7 % less
    ],
)
def test_a_large_sum_on_gpus_is_added_up_by_shares(
    ranks: int, rows: int, columns: int, expected: bool
) -> None:
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, columns), F32, INPUT)
    graph.output(graph.all_reduce("sum", x, None, F32), "sum")
    program = compile_graph(graph, CompileOptions(132, machine="cuda"))
    copies = [i for i in program.instructions if isinstance(i, Copy)]
    assert any(copy.only != NONE for copy in copies) == expected


@pytest.mark.parametrize("all_reduce", ["gather", "scatter"])
def test_sums_may_be_gathered_again(all_reduce: AllReduce) -> None:
    """All ranks have the sums, and a gather puts those of each rank side by side."""
    graph = Graph(rows=3, ranks=2)
    x = graph.tensor("x", (3, 8), F32, INPUT)
    graph.output(graph.all_gather("all", graph.all_reduce("sum", x, None, F32)), "all")
    memory = run_sums(graph, all_reduce)
    total = memory.ranks[0]["x"] + memory.ranks[1]["x"]
    for rank in memory.ranks:
        assert torch.equal(rank["all"], torch.cat([total, total], dim=1))


@pytest.mark.parametrize("all_reduce", ["gather", "scatter"])
def test_a_sum_over_ranks_of_parts_of_rows_is_not_cut(all_reduce: AllReduce) -> None:
    """Four parts of four columns, two of each rank: a rank's share of x has parts of the whole sum."""
    graph = Graph(rows=1, ranks=2)
    x = graph.tensor("x", (1, 8), F32, INPUT)
    parts = graph.all_gather("parts", x)
    graph.output(graph.append("reduce", "sum", {"parts": parts}, 4, F32), "sum")
    memory = run_sums(graph, all_reduce)
    want = sum((rank["x"].reshape(2, 4).sum(0) for rank in memory.ranks), torch.zeros(4))
    for rank in memory.ranks:
        assert torch.equal(rank["sum"][0], want)


def run_sums(graph: Graph, all_reduce: AllReduce) -> Memory:
    """The memory of two ranks after a graph of whole numbers in ``x`` has run."""
    program = compile_graph(graph, CompileOptions(3, all_reduce=all_reduce))
    memory = Memory(ranks=2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        shape = rank.spec("x").shape
        rank.write("x", torch.arange(float(math.prod(shape))).reshape(shape) + 100 * number)
    CpuMachine().load(program, memory).run(2)
    return memory


def test_programs_of_all_sizes_have_the_same_outputs() -> None:
    """Only large steps add up by shares, but what the host reads is one tensor."""
    memory = Memory(ranks=4)
    for rows in (1, 512):
        graph = Graph(rows, capacity=512, ranks=4)
        x = replace(graph.tensor("x", (512, 2048), F32, INPUT), rows=rows)
        graph.output(graph.all_reduce("sum", x, None, F32), "sum")
        memory.allocate(compile_graph(graph, CompileOptions(8, machine="cuda")).tensors)


@pytest.mark.parametrize("rows", [64, 1024])
def test_what_ranks_add_up_is_not_split_along_k(rows: int) -> None:
    """Parts of a product would have to be added up first; both forms add up the same sums."""
    graph = Graph(rows, ranks=4)
    x = graph.tensor("x", (rows, 8192), BF16, INPUT)
    y = graph.linear("y", x, graph.weight("weight", (512, 8192), BF16), dtype=F32)
    graph.output(graph.all_reduce("sum", y, None, F32), "sum")
    for form in ("gather", "scatter"):
        options = replace(default_options("cuda", 132, rows), all_reduce=form)
        program = compile_graph(graph, options)
        assert {i.part for i in program.instructions if isinstance(i, Matmul)} == {0}


def test_what_cannot_be_added_up_by_shares_is_refused() -> None:
    graph = Graph(rows=1, ranks=3)
    narrow = graph.tensor("narrow", (1, 9), BF16, INPUT)
    with pytest.raises(ValueError, match="sum: x is BF16, but sums over ranks are added in F32"):
        graph.all_reduce("sum", narrow, None, F32)
    with pytest.raises(ValueError, match="share: x has 8 columns, which 3 ranks cannot share"):
        graph.reduce_scatter("share", graph.tensor("x", (1, 8), F32, INPUT), None, F32)
