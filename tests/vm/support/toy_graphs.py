"""Small programs that the compiler makes of toy graphs, for one rank and for several."""

from __future__ import annotations

import functools
from typing import Any

from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, DType, TensorKind, TensorSpec


def mlp(rows: int, dtype: DType, counted: bool) -> Graph:
    """y = x + down(silu(gate(norm(x))) * up(norm(x)))"""
    row_count = TensorSpec("row_count", (1,), I32, TensorKind.INPUT)
    graph = Graph(rows, row_count if counted else None)
    x = graph.tensor("x", (rows, 8), F32, TensorKind.STATE)
    normed = graph.rms_norm("norm", x, graph.weight("gain", (8,), dtype), 1e-5)
    gate, up = (
        graph.linear(name, normed, graph.weight(f"{name}.w", (12, 8), dtype), dtype=dtype)
        for name in ("gate", "up")
    )
    wide = graph.silu_mul("gate_up", gate, up)
    down = graph.linear("down", wide, graph.weight("down.w", (8, 12), dtype), dtype=dtype)
    graph.output(graph.add("residual", down, x), "y")
    return graph


def llama(
    rows: int,
    layers: int,
    decode: bool,
    parallel: Parallel = ONE_RANK,
    *,
    sampled: bool = False,
) -> Graph:
    """A Llama of heads of two elements: two, or one for each rank."""
    heads = max(parallel.ranks, 2)
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=8 * parallel.ranks if parallel.gathers else 4,
        intermediate_size=6,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=2,
    )
    bucket = Bucket(rows, rows, 8, decode, sampled)
    return llama_graph(config, Limits(2, 8, 2, 2, 4, 4), bucket, F32, parallel)


def gathers(rows: int, ranks: int) -> Graph:
    """whole = all ranks' x * w, which a product reads and, copied, the host."""
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, 8), F32, TensorKind.STATE)
    mine = graph.linear("mine", x, graph.weight("w", (4, 8), F32), dtype=F32)
    whole = graph.all_gather("whole", mine)
    last = graph.linear("last", whole, graph.weight("last.w", (8, 4 * ranks), F32), dtype=F32)
    y = graph.output(graph.add("residual", last, x), "y")
    graph.output(graph.all_gather("copied", y), "copied")
    return graph


def scatters(rows: int, ranks: int) -> Graph:
    """sum := x + all ranks' sums of x * w, each added up on one rank; kept := the rank's share of it.

    twice := a gather of sums that all ranks have.
    """
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, 4 * ranks), F32, TensorKind.STATE)
    weight = graph.weight("w", (4 * ranks, 4 * ranks), F32)
    part = graph.linear("part", x, weight, dtype=F32)
    total = graph.all_reduce("total", part, None, F32)
    more = graph.all_reduce("more", graph.linear("third", x, weight, dtype=F32), None, F32)
    graph.output(graph.all_gather("gathered", more), "twice")
    again = graph.linear("again", total, weight, dtype=F32)
    share = graph.output(graph.reduce_scatter("share", again, None, F32), "kept")
    last = graph.linear("last", graph.all_gather("all", share), weight, dtype=F32)
    graph.output(graph.add("y", last, x), "sum")
    return graph


def sums(rows: int, ranks: int) -> Graph:
    """y = x + the sum of down(silu(gate(x)) * up(x)) over all ranks, twice."""
    row_count = TensorSpec("row_count", (1,), I32, TensorKind.INPUT)
    graph = Graph(rows, row_count, ranks=ranks)
    y = graph.tensor("x", (rows, 4), F32, TensorKind.STATE)
    for layer in range(2):
        gate, up = (
            graph.linear(f"{n}{layer}", y, graph.weight(f"{n}{layer}.w", (4, 4), F32), dtype=F32)
            for n in ("gate", "up")
        )
        wide = graph.silu_mul(f"wide{layer}", gate, up)
        down = graph.weight(f"down{layer}.w", (4, 4), F32)
        part = graph.linear(f"down{layer}", wide, down, dtype=F32)
        total = graph.all_reduce(f"sum{layer}", part, None, F32)
        y = graph.add(f"y{layer}", total, y)
    graph.output(y, "y")
    return graph


@functools.cache
def toy_programs() -> tuple[Program, ...]:
    """Compiled toy graphs, with both exchanges and with static and dynamic queues."""
    unit: dict[str, Any] = {"column_unit": 2, "min_chunk": 4}
    dynamic: dict[str, Any] = {**unit, "assignment": "dynamic"}
    tagged: dict[str, Any] = {**unit, "exchange": "tagged"}
    preferred: dict[str, Any] = {**unit, "exchange": "preferred"}
    return tuple(
        compile_graph(graph, CompileOptions(workers, **options))
        for graph, workers, options in (
            (mlp(2, F32, True), 2, unit),
            (mlp(2, F32, True), 3, tagged),
            (mlp(3, F32, False), 3, {**unit, "waves": 2}),
            (mlp(2, BF16, True), 4, tagged),
            (mlp(2, F32, True), 2, {**dynamic, "exchange": "tagged"}),
            (mlp(1, F32, False), 3, dynamic),
            (mlp(2, F32, True), 2, {**unit, "assignment": "round_robin"}),
            (llama(1, 1, True), 2, tagged),
            (llama(2, 1, True), 3, preferred),
            (llama(2, 1, False), 2, unit),
            (llama(1, 1, True), 3, {**dynamic, "exchange": "tagged"}),
            (llama(2, 1, True), 2, dynamic),
            (llama(1, 2, True), 2, tagged),
            (llama(1, 1, True, sampled=True), 2, preferred),
            (llama(2, 1, False, sampled=True), 3, tagged),
            (llama(2, 1, True, sampled=True), 2, dynamic),
        )
    )


@functools.cache
def toy_programs_of_ranks(ranks: int) -> tuple[Program, ...]:
    """Compiled toy graphs of several ranks, as in ``toy_programs``, some in halves of their rows."""
    unit: dict[str, Any] = {"column_unit": 2, "min_chunk": 4}
    halves: dict[str, Any] = {**unit, "halves": "all"}
    dynamic: dict[str, Any] = {**unit, "assignment": "dynamic"}
    tagged: dict[str, Any] = {**unit, "exchange": "tagged"}
    preferred: dict[str, Any] = {**unit, "exchange": "preferred"}
    scatter: dict[str, Any] = {**unit, "all_reduce": "scatter"}
    gather, reduce = Parallel(ranks, "all_gather"), Parallel(ranks, "all_reduce")
    return tuple(
        compile_graph(graph, CompileOptions(workers, **options))
        for graph, workers, options in (
            (gathers(2, ranks), 2, unit),
            (gathers(2, ranks), 2, tagged),
            (gathers(1, ranks), 3, preferred),
            (gathers(2, ranks), 2, {**dynamic, "exchange": "tagged"}),
            (sums(2, ranks), 2, unit),
            (sums(1, ranks), 2, tagged),
            (sums(2, ranks), 3, {**tagged, "waves": 2}),
            (sums(2, ranks), 2, dynamic),
            (scatters(2, ranks), 2, scatter),
            (scatters(1, ranks), 3, {**scatter, "exchange": "tagged"}),
            (scatters(2, ranks), 2, {**scatter, "assignment": "dynamic"}),
            (llama(1, 1, True, reduce), 1, tagged),
            (llama(2, 1, False, reduce), 2, dynamic),
            (llama(1, 1, True, gather), 2, preferred),
            (llama(2, 1, True, gather, sampled=True), 2, preferred),
            (gathers(2, ranks), 2, halves),
            (gathers(2, ranks), 3, {**halves, "exchange": "tagged"}),
            (sums(2, ranks), 2, halves),
            (sums(2, ranks), 2, {**halves, "assignment": "dynamic"}),
            (llama(2, 1, False, gather), 2, {**halves, "exchange": "preferred"}),
        )
    )
