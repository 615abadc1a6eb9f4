"""A graph whose ranks sum and gather, on a machine of several GPUs."""

from __future__ import annotations

import torch

from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.tensors import F32, DType, TensorKind


def sums_and_gathers(rows: int, ranks: int, dtype: DType) -> Graph:
    """sum := all-reduce of a product, plus a bias; end := a product of gathered columns.

    shares := the gathered shares of the same sum and bias; plain := the sum alone. Each rank adds up a
    share of the plain one with CompileOptions.all_reduce "scatter", if ranks can share 32 columns.
    """
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, 64), dtype, TensorKind.INPUT)
    weight = graph.weight("weight", (32, 64), dtype)
    y = graph.linear("y", x, weight, dtype=F32)
    bias = graph.weight("bias", (32,), F32)
    graph.output(graph.all_reduce("sum", y, bias, F32), "sum")
    if 32 % ranks == 0:
        own_bias = graph.weight("own_bias", (32 // ranks,), F32)
        parts = graph.linear("parts", x, weight, dtype=F32)
        share = graph.reduce_scatter("share", parts, own_bias, F32)
        graph.output(graph.all_gather("shares", share), "shares")
    again = graph.linear("again", x, weight, dtype=F32)
    graph.output(graph.all_reduce("plain", again, None, F32), "plain")
    whole = graph.all_gather("whole", graph.linear("z", x, weight, dtype=dtype))
    last = graph.weight("last", (48, 32 * ranks), dtype)
    graph.output(graph.linear("end", whole, last, dtype=F32), "end")
    return graph


def check_sums_and_gathers(
    machine: CudaMachine,
    ranks: int,
    rows: int,
    dtype: DType,
    options: CompileOptions,
    steps: int = 50,
) -> None:
    """Run it with random numbers and hold the results against torch."""
    program = compile_graph(sums_and_gathers(rows, ranks, dtype), options)
    memory = machine.memory(ranks)
    memory.allocate(program.tensors)
    torch.manual_seed(rows)
    bias = torch.randn(32)
    products, last = [], []
    for number, rank in enumerate(memory.ranks):
        for name in ("x", "weight", "last"):
            rank.write(name, torch.randn(rank.spec(name).shape) / 8)
        rank.write("bias", bias)
        if 32 % ranks == 0:
            rank.write("own_bias", bias.reshape(ranks, -1)[number])
        products.append(rank["x"].cpu().float() @ rank["weight"].cpu().float().T)
        last.append(rank["last"].cpu().float())
    machine.load(program, memory).run(steps)
    total = bias + sum(products)
    whole = torch.cat(products, dim=1)
    near = 1e-4 if dtype is F32 else 2e-2
    for number, rank in enumerate(memory.ranks):
        torch.testing.assert_close(rank["sum"].cpu(), total, rtol=near, atol=near)
        torch.testing.assert_close(rank["end"].cpu(), whole @ last[number].T, rtol=near, atol=near)
        torch.testing.assert_close(rank["plain"].cpu(), total - bias, rtol=near, atol=near)
        assert torch.equal(rank["sum"].cpu(), memory["sum"].cpu())
        assert torch.equal(rank["plain"].cpu(), memory["plain"].cpu())
        if 32 % ranks == 0:
            assert torch.equal(rank["shares"].cpu(), rank["sum"].cpu())
