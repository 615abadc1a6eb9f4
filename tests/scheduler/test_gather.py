"""Rows that a product takes through an index, or that a copy gathers before a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph, Value
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.config import NONE
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.target import Exchange
from megavm.vm.tensors import BF16, F32, I32, DType, TensorKind

ROWS, CHOSEN, HIDDEN, COLUMNS = 40, 32, 64, 48


def options_of_gpu(rows: int) -> CompileOptions:
    """A GPU's options, for few workers."""
    return replace(default_options("cuda", 5, rows), workers=5)


def chosen_rows(norm: bool) -> Graph:
    """h = x . first^T of all rows, and y = norm(h)[chosen] . last^T."""
    graph = Graph(ROWS)
    x = graph.tensor("x", (ROWS, HIDDEN), BF16, TensorKind.INPUT)
    index = graph.tensor("index", (CHOSEN,), I32, TensorKind.INPUT)
    count = graph.tensor("count", (1,), I32, TensorKind.INPUT)
    h = graph.linear("h", x, graph.weight("first", (HIDDEN, HIDDEN), BF16), dtype=F32)
    if norm:
        h = graph.rms_norm("norm", h, graph.weight("gain", (HIDDEN,), BF16), 1e-5)
    else:
        h = graph.linear("i", x, graph.weight("second", (HIDDEN, HIDDEN), BF16))
    chosen = graph.gather("chosen", h, index, count, CHOSEN)
    y = graph.linear("y", chosen, graph.weight("last", (COLUMNS, HIDDEN), BF16), dtype=F32)
    graph.output(y, "y")
    return graph


def memory_of(program: Program, live: int, memory: Memory | None = None) -> Memory:
    torch.manual_seed(live)
    memory = memory or Memory()
    memory.allocate(program.tensors)
    for spec in program.tensors:
        if spec.dtype is not I32 and spec.kind is not TensorKind.ACTIVATION:
            memory.write(spec.name, torch.randn(spec.shape) * spec.shape[-1] ** -0.5)
    chosen = memory.spec("index").rows
    memory.write("index", torch.randint(ROWS, (chosen,), dtype=torch.int32))
    memory.write("count", torch.tensor([live], dtype=torch.int32))
    return memory


def copies_with_index(program: Program) -> list[Copy]:
    return [i for i in program.instructions if isinstance(i, Copy) and i.row_index != NONE]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("live", [0, 1, 7, CHOSEN])
def test_copies_gather_for_a_matrix_product(norm: bool, live: int) -> None:
    graph = chosen_rows(norm)
    program = compile_graph(graph, options_of_gpu(ROWS))
    copies = copies_with_index(program)
    sources = {program.tensors[copy.x].dtype for copy in copies}
    assert sources == ({BF16, F32} if norm else {BF16})  # the rows, and their squares
    products = [i for i in program.instructions if isinstance(i, Matmul)]
    assert all(i.matrix and i.row_index == NONE for i in products)
    memory = memory_of(program, live)
    CpuMachine().load(program, memory).run(2)
    # Held against torch, and against a program whose product takes the rows by itself.
    x, index = memory["x"].float(), memory["index"][:live].long()
    if norm:
        h = x @ memory["first"].float().T
        scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        want = ((h * memory["gain"].float()).bfloat16().float() * scale)[index]
    else:
        want = (x @ memory["second"].float().T).bfloat16().float()[index]
    want = want @ memory["last"].float().T
    torch.testing.assert_close(memory["y"][:live], want, rtol=2e-2, atol=2e-2)
    plain = compile_graph(graph, CompileOptions(5))
    assert not copies_with_index(plain)
    other = memory_of(plain, live)
    CpuMachine().load(plain, other).run(2)
    torch.testing.assert_close(memory["y"][:live], other["y"][:live], rtol=1e-2, atol=1e-2)


def test_a_row_beyond_the_source_is_named() -> None:
    program = compile_graph(chosen_rows(norm=False), options_of_gpu(ROWS))
    memory = memory_of(program, CHOSEN)
    memory.write("index", torch.full((CHOSEN,), ROWS, dtype=torch.int32))
    with pytest.raises(MachineFault, match=f"row_index of row .* is {ROWS}, expected below {ROWS}"):
        CpuMachine().load(program, memory).run(1)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 512])
@pytest.mark.parametrize("sampled", [False, True])
def test_logits_of_large_steps_are_of_copied_rows(rows: int, sampled: bool) -> None:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
    )
    limits = Limits(64, 256, 512, 64, 256, 64)
    bucket = Bucket(rows, 1 if rows == 1 else max(32, min(rows, 64)), 256, sampled=sampled)
    if rows == 16:
        bucket = replace(bucket, logit_rows=16)
    program = compile_graph(llama_graph(config, limits, bucket, BF16), options_of_gpu(rows))
    heads = [
        i
        for i in program.instructions
        if isinstance(i, Matmul) and program.tensors[i.out].name == "logits"
    ]
    is_matrix = rows > 16
    assert {i.matrix for i in heads} == {int(is_matrix)}
    assert {i.row_index != NONE for i in heads} == {not is_matrix}
    assert bool(copies_with_index(program)) == is_matrix


# What reads the chosen rows in place of a product. Each gets the graph and these rows.
Take = Callable[[Graph, Value], Value]


def nothing_else(graph: Graph, chosen: Value) -> Value:
    return chosen


def host_and_product(graph: Graph, chosen: Value) -> Value:
    chosen = graph.output(chosen, "chosen")
    weight = graph.weight("last", (COLUMNS, chosen.columns), BF16)
    return graph.linear("y", chosen, weight, dtype=F32)


def norm(graph: Graph, chosen: Value) -> Value:
    return graph.rms_norm("norm", chosen, graph.weight("gain", (chosen.columns,), BF16), 1e-5)


def sum_with_product(graph: Graph, chosen: Value) -> Value:
    x = graph.tensor("other", (chosen.rows, HIDDEN), BF16, TensorKind.INPUT)
    product = graph.linear("y", x, graph.weight("last", (chosen.columns, HIDDEN), BF16))
    return graph.add("sum", product, chosen)


def second_gather(graph: Graph, chosen: Value) -> Value:
    index = graph.tensor("second", (3,), I32, TensorKind.INPUT)
    return graph.gather("second", chosen, index, None, 3)


def in_torch(take: Take, values: Mapping[str, torch.Tensor], chosen: torch.Tensor) -> torch.Tensor:
    if take is host_and_product:
        torch.testing.assert_close(values["chosen"], chosen, rtol=2e-2, atol=2e-2)
        return chosen.bfloat16().float() @ values["last"].T
    if take is norm:
        return chosen * torch.rsqrt(chosen.square().mean(-1, True) + 1e-5) * values["gain"]
    if take is sum_with_product:
        return values["other"] @ values["last"].T + chosen
    return chosen[values["second"].long()] if take is second_gather else chosen


def machine_of(name: str, ranks: int, request: pytest.FixtureRequest) -> Machine:
    if name == "cuda":
        made: Machine = request.getfixturevalue("gpu_ranks")(ranks)
        return made
    return CpuMachine() if name == "cpu" else ReferenceMachine()


@pytest.mark.parametrize("exchange", ["barrier", "preferred", "tagged"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("machine", ["reference", "cpu", "cuda"])
@pytest.mark.parametrize(
    "take", [nothing_else, host_and_product, norm, sum_with_product, second_gather]
)
def test_copies_gather_for_what_takes_no_index(
    machine: str, take: Take, dtype: DType, exchange: Exchange, request: pytest.FixtureRequest
) -> None:
    rows, chosen, live = 6, 5, 4 if take is nothing_else else 5
    graph = Graph(rows)
    x = graph.tensor("x", (rows, HIDDEN), BF16, TensorKind.INPUT)
    index, count = (
        graph.tensor(n, (k,), I32, TensorKind.INPUT) for n, k in (("index", chosen), ("count", 1))
    )
    h = graph.linear("h", x, graph.weight("first", (COLUMNS, HIDDEN), BF16), dtype=dtype)
    graph.output(take(graph, graph.gather("rows", h, index, count, chosen)), "found")
    options = CompileOptions(3, machine="cpu" if machine == "reference" else machine)
    program = compile_graph(graph, replace(options, exchange=exchange))
    made = machine_of(machine, 1, request)
    memory = memory_of(program, live, made.memory())
    memory.write("index", torch.tensor([4, 0, 5, 4, 1], dtype=torch.int32))
    if take is second_gather:
        memory.write("second", torch.tensor([3, 0, 2], dtype=torch.int32))
    made.load(program, memory).run(2)
    values = {name: memory[name].cpu().float() for name in memory}
    h_rows = values["x"] @ values["first"].T
    if dtype is BF16:
        h_rows = h_rows.bfloat16().float()
    want = in_torch(take, values, h_rows[values["index"].long()])
    found = values["found"]
    torch.testing.assert_close(found[:live], want[:live], rtol=2e-2, atol=2e-2)
    assert not found[live:].any()


@pytest.mark.parametrize("exchange", ["barrier", "tagged"])
@pytest.mark.parametrize("machine", ["cpu", "cuda"])
def test_a_copy_that_scatters_takes_rows_through_an_index(
    machine: str, exchange: Exchange, request: pytest.FixtureRequest
) -> None:
    """It is the first half of a reduce-scatter."""
    ranks, rows, chosen = 2, 6, 5
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, HIDDEN), BF16, TensorKind.INPUT)
    index = graph.tensor("index", (chosen,), I32, TensorKind.INPUT)
    h = graph.linear("h", x, graph.weight("first", (COLUMNS, HIDDEN), BF16), dtype=F32)
    picked = graph.gather("rows", h, index, None, chosen)
    graph.output(graph.reduce_scatter("share", picked, None, F32), "share")
    options = CompileOptions(3, machine=machine, exchange=exchange)
    program = compile_graph(graph, options)
    assert {copy.only for copy in copies_with_index(program)} == {0, 1}
    made = machine_of(machine, ranks, request)
    memory = made.memory(ranks)
    memory.allocate(program.tensors)
    sums = torch.zeros(chosen, COLUMNS)
    for number, rank in enumerate(memory.ranks):
        torch.manual_seed(number)
        rank.write("x", torch.randn(rows, HIDDEN))
        rank.write("first", torch.randn(COLUMNS, HIDDEN) / 8)
        rank.write("index", torch.tensor([4, 0, 5, 4, 1], dtype=torch.int32))
        values = {name: rank[name].cpu() for name in ("x", "first", "index")}
        sums += (values["x"].float() @ values["first"].float().T)[values["index"].long()]
    made.load(program, memory).run(2)
    for number, rank in enumerate(memory.ranks):
        own = sums[:, number * COLUMNS // ranks : (number + 1) * COLUMNS // ranks]
        torch.testing.assert_close(rank["share"].cpu(), own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("machine", [CpuMachine(), ReferenceMachine()], ids=lambda m: m.name)
def test_ranks_add_up_rows_that_they_have_gathered(machine: Machine, ranks: int) -> None:
    """A copy gathers rows for one rank alone."""
    graph = Graph(5, ranks=ranks)
    x = graph.tensor("x", (5, 24), F32, TensorKind.INPUT)
    index = graph.tensor("index", (3,), I32, TensorKind.INPUT)
    h = graph.linear("h", x, graph.weight("w", (24, 24), F32), dtype=F32)
    chosen = graph.gather("chosen", h, index, None, 3)
    graph.output(graph.all_gather("all", graph.reduce_scatter("sum", chosen, None, F32)), "y")
    program = compile_graph(graph, CompileOptions(3, machine=machine.name))
    memory = machine.memory(ranks)
    memory.allocate(program.tensors)
    torch.manual_seed(0)
    x_values, weight = torch.randn(ranks, 5, 24), torch.randn(24, 24)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", x_values[number])
        rank.write("w", weight)
        rank.write("index", rows)
    machine.load(program, memory).run(2)
    want = (x_values.sum(0) @ weight.T)[rows.long()]
    for rank in memory.ranks:
        torch.testing.assert_close(rank["y"][:3], want, rtol=1e-4, atol=1e-4)
