"""A lone matvec, an MLP and a Llama compile through one pipeline and mean what the graph says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from megavm.instructions.matmul import Matmul
from megavm.scheduler.compile import compile_graph
from megavm.scheduler.fuse import fuse
from megavm.scheduler.graph import Graph, Value
from megavm.scheduler.llama import Bucket, Limits, llama_graph
from megavm.scheduler.llama_config import LlamaConfig
from megavm.scheduler.options import CompileOptions
from megavm.vm.differential import first_divergence
from megavm.vm.isa import BF16, F32, DType, TensorKind
from megavm.vm.machine import Machine
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program

ALL_OPTIONS = [
    CompileOptions(1),
    CompileOptions(3),
    CompileOptions(3, assignment="round_robin", waves=2),
    CompileOptions(4, assignment="dynamic", waves=3),
    CompileOptions(3, exchange="tagged"),
    CompileOptions(4, assignment="dynamic", exchange="tagged"),
    CompileOptions(132, exchange="tagged"),
]


def name_of(options: CompileOptions) -> str:
    return f"{options.workers}-{options.assignment}-{options.exchange}"


def matvec_graph(dtype: DType, rows: int = 1) -> Graph:
    graph = Graph(rows)
    x = graph.tensor("x", (rows, 96), dtype, TensorKind.INPUT)
    y = graph.linear("matvec", x, graph.weight("w", (200, 96), dtype), dtype=F32)
    graph.output(y, "y")
    return graph


def mlp_graph(dtype: DType, rows: int, hidden: int = 64, wide: int = 160) -> Graph:
    graph = Graph(rows)
    x = graph.tensor("x", (rows, hidden), F32, TensorKind.INPUT)
    normed = graph.rms_norm("norm", x, graph.weight("gain", (hidden,), dtype), 1e-5)
    gate, up = (
        graph.linear(n, normed, graph.weight(f"{n}.w", (wide, hidden), dtype), dtype=dtype)
        for n in ("gate", "up")
    )
    h = graph.silu_mul("gate_up", gate, up)
    down = graph.linear("down", h, graph.weight("down.w", (hidden, wide), dtype), dtype=dtype)
    graph.output(graph.add("residual", down, x), "y")
    return graph


def random_memory(program: Program, seed: int = 0) -> Memory:
    torch.manual_seed(seed)
    memory = Memory()
    memory.allocate(program.tensors)
    for spec in program.tensors:
        if spec.kind in (TensorKind.WEIGHT, TensorKind.INPUT) and spec.dtype in TORCH_DTYPE:
            values = memory[spec.name]
            if values.is_floating_point():
                values.normal_(0, spec.columns**-0.5 if spec.columns > 1 else 1)
    return memory


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_lone_matvec_compiles_and_multiplies(
    machine: Machine, options: CompileOptions, dtype: DType
) -> None:
    program = compile_graph(matvec_graph(dtype), options)
    memory = random_memory(program)
    machine.load(program, memory).run(steps=3)
    want = memory["x"].float() @ memory["w"].float().T
    torch.testing.assert_close(memory["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_an_mlp_compiles_and_equals_torch(
    machine: Machine, options: CompileOptions, rows: int
) -> None:
    program = compile_graph(mlp_graph(F32, rows), options)
    memory = random_memory(program)
    machine.load(program, memory).run(steps=2)
    x = memory["x"]
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * memory["gain"]
    h = silu(normed @ memory["gate.w"].T) * (normed @ memory["up.w"].T)
    torch.testing.assert_close(memory["y"], x + h @ memory["down.w"].T, rtol=1e-4, atol=1e-5)


def tiny_llama(workers: int, rows: int = 4, **options: Any) -> Program:
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    limits = Limits(4, 64, rows, 4, 64, 4)
    graph = llama_graph(config, limits, Bucket(rows, 4, 64), BF16)
    return compile_graph(graph, CompileOptions(workers, **options))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
def test_a_llama_is_the_same_instruction_by_instruction_on_both_machines(
    options: CompileOptions,
) -> None:
    from megavm.scheduler.runner import make_machine

    program = tiny_llama(**vars(options))
    memory = random_memory(program)
    memory["step.row_count"][0] = memory["step.logit_count"][0] = 4
    memory["step.row_sequence"][:4] = torch.tensor([0, 1, 1, 3])
    memory["step.row_position"][:4] = torch.tensor([0, 7, 8, 30])
    memory["step.logit_row"][:4] = torch.tensor([0, 2, 3, 1])
    memory["step.block_table"][:] = torch.randperm(64).view(4, 16)
    memory["step.tokens"][:] = torch.randint(0, 67, (4, 65))
    memory["step.sampling_integer"][:, 0] = 1
    memory["step.sampling_real"][:] = torch.tensor([0.7, 0.9, 0.01, 1.1, 0.1, 0.1])
    machines = [make_machine(name)[0] for name in ("reference", "cpu")]
    found = first_divergence(program, memory, machines[0], machines[1], steps=2)
    assert found is None, str(found)


def test_few_rows_fuse_the_norm_and_many_do_not() -> None:
    few = [o.kind for o in fuse(mlp_graph(F32, 4), 16)]
    many = [o.kind for o in fuse(mlp_graph(F32, 40), 16)]
    assert few == ["gate_up", "linear"]
    assert many == ["rms_norm", "gate_up", "linear"]


def test_an_operation_that_exists_only_fused_is_refused_alone() -> None:
    graph = Graph(2)
    a, b = (graph.tensor(n, (2, 8), F32, TensorKind.INPUT) for n in "ab")
    graph.output(graph.silu_mul("lonely", a, b), "y")
    with pytest.raises(ValueError, match="lonely: no instruction does silu_mul"):
        compile_graph(graph, CompileOptions(1))


def test_shapes_that_do_not_fit_are_refused_with_their_values() -> None:
    graph = Graph(2)
    x = graph.tensor("x", (2, 8), F32, TensorKind.INPUT)
    with pytest.raises(ValueError, match="x has 8 columns, weight w is 4 x 9"):
        graph.linear("product", x, graph.weight("w", (4, 9), F32))


def llama_waits(program: Program, kind: str) -> list[tuple[str, ...]]:
    names = program.barriers
    return [
        tuple(sorted({names[w.barrier].split(".done")[0] for w in i.waits}))
        for i in program.instructions
        if i.name() == kind
    ]


def test_barriers_are_the_data_dependencies_and_nothing_more() -> None:
    program = tiny_llama(2, rows=1)
    assert set(llama_waits(program, "attention")) == {("layers.0.qkv",), ("layers.1.qkv",)}
    assert set(llama_waits(program, "gate_up")) == {("layers.0.o_proj",), ("layers.1.o_proj",)}
    assert set(llama_waits(program, "sample")) == {("lm_head",)}
    assert set(llama_waits(program, "embed")) == {("sample",)}
    for inst in program.instructions:
        for wait in inst.waits:
            full = int(program.signals[wait.barrier])
            assert wait.target == (0 if inst.name() == "embed" else full)


def test_row_tiles_wait_for_their_own_rows_only() -> None:
    graph = mlp_graph(F32, 256, hidden=512, wide=512)
    program = compile_graph(graph, CompileOptions(4))
    waited = {
        (i.row_begin, i.row_end): frozenset(w.barrier for w in i.waits)
        for i in program.instructions
        if isinstance(i, Matmul)
    }
    assert len(waited) > 1
    assert len(set(waited.values())) == len(waited)


def test_tagged_activations_need_no_barrier_inside_a_layer() -> None:
    program = tiny_llama(2, rows=1, exchange="tagged")
    for inst in program.instructions:
        if inst.name() in ("gate_up", "matmul", "qkv_rope"):
            assert not inst.waits
    kinds = {t.name for t in program.tensors if t.tagged}
    assert any("o_proj" in n or "residual" in n for n in kinds)


def test_more_dependencies_than_waits_are_joined_by_noops(machine: Machine) -> None:
    graph = Graph(1)
    parts: list[Value] = []
    for i in range(5):
        x = graph.tensor(f"x{i}", (1, 16), F32, TensorKind.INPUT)
        parts.append(graph.linear(f"part{i}", x, graph.weight(f"w{i}", (16, 16), F32), dtype=F32))
    for i, value in enumerate(parts):
        graph.output(value, f"y{i}")
    program = compile_graph(graph, CompileOptions(2))
    assert any(i.name() == "noop" for i in program.instructions)
    memory = random_memory(program)
    machine.load(program, memory).run(steps=3)
    for i in range(5):
        torch.testing.assert_close(memory[f"y{i}"], memory[f"x{i}"] @ memory[f"w{i}"].T)


@pytest.mark.parametrize("assignment", ["balanced", "round_robin"])
def test_static_queues_share_the_bytes(assignment: Any) -> None:
    program = compile_graph(mlp_graph(BF16, 1, 256, 1024), CompileOptions(3, assignment=assignment))
    cost = [sum(program.instructions[i].bytes(program.tensors) for i in q) for q in program.queues]
    assert max(cost) <= 1.1 * min(cost)


def test_every_instruction_stands_in_one_queue() -> None:
    for options in ALL_OPTIONS:
        program = compile_graph(mlp_graph(F32, 5), options)
        listed = np.sort(np.concatenate(program.queues))
        np.testing.assert_array_equal(listed, np.arange(len(program)))
