"""Rows that a product takes through an index, or that a copy gathers before a matrix product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.config import NONE
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.machine import MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, TensorKind

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


def memory_of(program: Program, live: int) -> Memory:
    torch.manual_seed(live)
    memory = Memory()
    memory.allocate(program.tensors)
    for spec in program.tensors:
        if spec.dtype is not I32 and spec.kind is not TensorKind.ACTIVATION:
            memory.write(spec.name, torch.randn(spec.shape) * spec.shape[-1] ** -0.5)
    memory.write("index", torch.randint(ROWS, (CHOSEN,), dtype=torch.int32))
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
