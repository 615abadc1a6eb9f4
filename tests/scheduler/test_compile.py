"""A lone matvec, an MLP and a Llama compile through one pipeline and mean what the graph says."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from megavm.instructions.attention import Attention
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.sample import Sample
from megavm.scheduler.compiler.compile import compile_graph, unordered
from megavm.scheduler.compiler.graph import Graph, Value
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.compiler.rewrites import rewrite
from megavm.scheduler.compiler.tiling import matrix_tiles
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, default_logit_rows, llama_graph
from megavm.scheduler.run.buckets import choose_bucket, compile_bucket
from megavm.vm.config import NONE
from megavm.vm.differential import first_divergence
from megavm.vm.machine import Machine
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program, with_header
from megavm.vm.reference import ReferenceMachine
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16, F32, DType, TensorKind
from megavm.vm.verify import VerificationError, verify

ALL_OPTIONS = [
    CompileOptions(1),
    CompileOptions(3),
    CompileOptions(3, assignment="round_robin", waves=2),
    CompileOptions(4, assignment="dynamic", waves=3),
    CompileOptions(3, exchange="tagged"),
    CompileOptions(4, assignment="dynamic", exchange="tagged"),
    CompileOptions(132, exchange="tagged"),
    CompileOptions(9, part_of_k=64),
    CompileOptions(40, assignment="dynamic", exchange="tagged", part_of_k=64),
]


def name_of(options: CompileOptions) -> str:
    parts = f"-parts-of-{options.part_of_k}" if options.part_of_k else ""
    return f"{options.workers}-{options.assignment}-{options.exchange}{parts}"


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


def test_what_the_host_reads_is_not_fused_away() -> None:
    """A product whose result is an output does not become a part of the operation that reads it."""
    graph = Graph(1)
    x = graph.tensor("x", (1, 16), F32, TensorKind.INPUT)
    y = graph.linear("y", x, graph.weight("w", (16, 16), F32), dtype=F32)
    graph.output(graph.add("z", graph.output(y, "y"), x), "z")
    with pytest.raises(ValueError, match="z: no instruction does add by itself"):
        compile_graph(graph, CompileOptions(2))


def random_memory(program: Program, seed: int = 0, device: str = "cpu") -> Memory:
    torch.manual_seed(seed)
    memory = Memory(device)
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
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=3)
    values = memory.copy("cpu")
    want = values["x"].float() @ values["w"].float().T
    torch.testing.assert_close(values["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_an_mlp_compiles_and_equals_torch(
    machine: Machine, options: CompileOptions, rows: int
) -> None:
    program = compile_graph(mlp_graph(F32, rows), options)
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=2)
    values = memory.copy("cpu")
    x = values["x"]
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * values["gain"]
    gate, up = values["gate_up.w"].chunk(2)
    h = silu(normed @ gate.T) * (normed @ up.T)
    torch.testing.assert_close(values["y"], x + h @ values["down.w"].T, rtol=1e-4, atol=1e-5)


def gated_graph(gate_bias: bool, up_bias: bool, shared: bool = False) -> Graph:
    """silu_mul of two products; with ``shared`` a third product has the weight of the first."""
    graph = Graph(2)
    x = graph.tensor("x", (2, 16), F32, TensorKind.INPUT)
    weights = {name: graph.weight(f"{name}.w", (18, 16), F32) for name in ("gate", "up")}
    gate, up = (
        graph.linear(
            name,
            x,
            weights[name],
            graph.weight(f"{name}.b", (18,), F32) if has_bias else None,
            F32,
        )
        for name, has_bias in (("gate", gate_bias), ("up", up_bias))
    )
    graph.output(graph.silu_mul("gated", gate, up), "y")
    if shared:
        graph.output(graph.linear("again", x, weights["gate"], dtype=F32), "z")
    return graph


def test_gate_and_up_are_joined_and_their_weights_stay_usable_elsewhere(machine: Machine) -> None:
    program = compile_graph(gated_graph(True, True, shared=True), CompileOptions(2))
    specs = {spec.name: spec for spec in program.tensors}
    assert specs["gate_up.w"].parts == (("gate.w", 18), ("up.w", 18))
    assert specs["gate_up.b"].parts == (("gate.b", 18), ("up.b", 18))
    torch.manual_seed(1)
    values = {name: torch.randn(18, 16) for name in ("gate.w", "up.w")}
    values |= {name: torch.randn(18) for name in ("gate.b", "up.b")}
    memory = Memory(machine.memory_device)
    for name in ("gate_up.w", "gate_up.b", "gate.w"):
        parts = (values[part].to(memory.device) for part in specs[name].part_names)
        memory.bind(specs[name], *parts)
    memory.allocate(program.tensors)
    x = torch.randn(2, 16)
    memory.write("x", x)
    machine.load(program, memory).run()
    found = memory.copy("cpu")
    gate, up = (x @ values[f"{n}.w"].T + values[f"{n}.b"] for n in ("gate", "up"))
    torch.testing.assert_close(found["y"], silu(gate) * up, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["z"], x @ values["gate.w"].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [(True, False), (False, True)])
def test_gate_and_up_of_which_one_has_a_bias_are_refused(biases: tuple[bool, bool]) -> None:
    with pytest.raises(ValueError, match="gated: no instruction does silu_mul"):
        compile_graph(gated_graph(*biases), CompileOptions(1))


def tiny_llama(workers: int, rows: int = 4, *, sampled: bool = False, **options: Any) -> Program:
    config = LlamaConfig(
        vocab_size=1067 if sampled else 67,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    limits = Limits(4, 64, rows, 4, 64, 4)
    graph = llama_graph(config, limits, Bucket(rows, 4, 64, sampled=sampled), BF16)
    return compile_graph(graph, CompileOptions(workers, **options))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
def test_a_llama_is_the_same_instruction_by_instruction_on_every_machine(
    options: CompileOptions, sampled: bool, machine: Machine
) -> None:
    if machine.name == "reference":
        pytest.skip("it is what the others are compared with")
    program = tiny_llama(**vars(options), sampled=sampled)
    memory = random_memory(program)
    memory["step.row_count"][0] = memory["step.logit_count"][0] = 4
    memory["step.row_sequence"][:4] = torch.tensor([0, 1, 1, 3])
    memory["step.row_position"][:4] = torch.tensor([0, 7, 8, 30])
    memory["step.logit_row"][:4] = torch.tensor([0, 2, 3, 1])
    memory["step.block_table"][:] = torch.randperm(64).view(4, 16)
    memory["step.tokens"][:] = torch.randint(0, 67, (4, 65))
    memory["step.sampling_integer"][:, 0] = 1
    memory["step.sampling_real"][:] = torch.tensor([0.7, 0.9, 0.01, 1.1, 0.1, 0.1])
    # A value on the edge of rounding may go the other way, and what follows from it.
    bounds = {F32: 2e-2, BF16: 2e-2} if machine.name == "cuda" else {}
    found = first_divergence(
        program, memory, ReferenceMachine(), machine, steps=2, relative=bounds, absolute=bounds
    )
    assert found is None, str(found)


def norm_graph(output: str = "", gains: int = 1, dtype: DType = BF16) -> Graph:
    """A product, norms of its result, and two products of each; ``output`` is kept in memory."""
    graph = Graph(3)
    x = graph.tensor("x", (3, 64), F32, TensorKind.INPUT)
    h = graph.linear("h", x, graph.weight("w", (48, 64), BF16), dtype=F32)
    values = {"h": h}
    for g in range(gains):
        normed = graph.rms_norm(f"norm{g}", h, graph.weight(f"gain{g}", (48,), BF16), 1e-5)
        values[normed.name] = normed
        for n, weight in (("a", BF16), ("b", dtype)):
            label = f"{n}{g}"
            y = graph.linear(label, normed, graph.weight(f"{label}.w", (16, 48), weight), dtype=F32)
            graph.output(y, f"{label}.out")
    if output:
        graph.output(values[output], "kept")
    return graph


@pytest.mark.parametrize(
    ("graph", "kinds"),
    [
        (norm_graph(), ["matmul"] * 3),
        (norm_graph(output="h"), ["matmul"] * 3),
        (norm_graph(output="norm0"), ["matmul", "rms_norm", "matmul", "matmul"]),
        (norm_graph(gains=2), ["matmul", "matmul", "matmul", "rms_norm", "matmul", "matmul"]),
        (norm_graph(dtype=F32), ["matmul", "rms_norm", "matmul", "matmul"]),
        (mlp_graph(F32, 4), ["rms_norm", "gate_up", "matmul"]),
    ],
    ids=["made", "made and kept", "kept", "twice", "two types", "of memory"],
)
def test_a_norm_is_done_by_those_around_it_where_they_can(graph: Graph, kinds: list[str]) -> None:
    assert [o.kind for o in rewrite(graph, CompileOptions(1))] == kinds
    plain = rewrite(graph, CompileOptions(1, fuse_norm=False))
    assert "rms_norm" in [o.kind for o in plain]


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
@pytest.mark.parametrize("fuse_norm", [True, False])
def test_normalised_products_equal_torch(
    machine: Machine, options: CompileOptions, fuse_norm: bool
) -> None:
    program = compile_graph(norm_graph(output="h", gains=2), replace(options, fuse_norm=fuse_norm))
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=2)
    copy = memory.copy("cpu")
    values = {name: copy[name].float() for name in copy}
    h = values["x"].bfloat16().float() @ values["w"].T
    torch.testing.assert_close(values["kept"], h, rtol=1e-5, atol=1e-5)
    for g in range(2):
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * values[f"gain{g}"]
        for n in "ab":
            want = normed @ values[f"{n}{g}.w"].T
            torch.testing.assert_close(values[f"{n}{g}.out"], want, rtol=3e-2, atol=3e-2)


def test_a_graph_of_nothing_is_a_program_of_nothing() -> None:
    program = compile_graph(Graph(rows=1), CompileOptions(workers=2))
    assert (len(program), len(program.queues), program.barriers) == (0, 2, ())


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


def decode_llama(
    options: CompileOptions, rows: int = 1, context: int = 32, dtype: DType = F32
) -> Program:
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    limits = Limits(rows, context, rows, rows, rows * context // 4, 4)
    graph = llama_graph(config, limits, Bucket(rows, rows, context, decode=True), dtype)
    return compile_graph(graph, options)


def memory_of_decode(program: Program, device: str = "cpu") -> Memory:
    memory = random_memory(program, device=device)
    blocks = memory["step.block_table"]
    rows = len(blocks)
    memory["step.logit_count"][0] = rows
    if rows > 1:  # a program of one row counts none
        memory["step.row_count"][0] = rows
    memory["step.row_sequence"][:] = memory["step.logit_row"][:] = torch.arange(rows)
    blocks[:] = torch.randperm(blocks.numel()).reshape(blocks.shape)
    memory["step.tokens"][:, 0] = torch.arange(3, 3 + rows)
    memory["step.sampling_integer"][:, 0] = 1
    memory["step.sampling_real"][:] = torch.tensor([0.0, 1, 0, 1, 0, 0])
    return memory


TAGGED = [
    CompileOptions(4, exchange="tagged"),
    CompileOptions(4, exchange="tagged", column_unit=8, min_chunk=4),
    CompileOptions(4, exchange="tagged", assignment="dynamic", column_unit=2),
    CompileOptions(40, exchange="tagged", column_unit=8, min_chunk=8),
]
IN_PARTS = CompileOptions(8, exchange="tagged", column_unit=8, part_of_k=64)
PREFERRED = [replace(options, exchange="preferred") for options in [*TAGGED, IN_PARTS]]


@pytest.mark.parametrize(
    ("options", "rows"), [*((o, 1) for o in [*TAGGED, IN_PARTS]), *((o, 5) for o in PREFERRED)]
)
def test_decode_steps_with_words_choose_what_steps_with_barriers_choose(
    machine: Machine, options: CompileOptions, rows: int
) -> None:
    tokens = []
    for each in (options, CompileOptions(1)):
        program = decode_llama(each, rows)
        memory = memory_of_decode(program, machine.memory_device)
        machine.load(program, memory).run(steps=29)
        memory["step.row_position"][:] = 29
        machine.load(program, memory).run(steps=2)
        tokens.append(memory["step.tokens"].tolist())
    assert tokens[0] == tokens[1]
    assert all(len(set(chosen)) > 3 for chosen in tokens[0])


@pytest.mark.parametrize("options", PREFERRED, ids=name_of)
def test_attention_of_a_decode_step_waits_for_no_barrier_of_its_step(
    options: CompileOptions,
) -> None:
    program = decode_llama(options, 5, dtype=BF16 if options.column_unit > 2 else F32)
    tagged = {t.name.split(".")[3] for t in program.tensors if t.tagged and ".qkv." in t.name}
    assert tagged == {"q", "k_new", "v_new"}
    later = [
        (inst, [(program.barriers[w.barrier].split(".done")[0], w.target) for w in inst.waits])
        for inst, label in zip(program.instructions, program.labels, strict=True)
        if label.startswith("layers.1.attention")
    ]
    for inst, waits in later:
        assert inst.name() == "attention_merge" or waits
        assert all(name.endswith("qkv") and target == 0 for name, target in waits)
    # 10 tiles of rows and heads keep fewer workers busy as they are.
    assert ("layers.1.attention.merge" in program.labels) == (options.workers > 10)


@pytest.mark.parametrize("rows", [1, 4])
def test_steps_that_do_not_decode_pass_no_words_to_attention(rows: int) -> None:
    """A single row always decodes."""
    program = tiny_llama(3, rows=rows, exchange="preferred")
    assert any(t.tagged for t in program.tensors) == (rows == 1)


@pytest.mark.parametrize("options", TAGGED, ids=name_of)
def test_a_tagged_step_of_one_row_waits_for_no_barrier_before_its_logits(
    options: CompileOptions,
) -> None:
    program = decode_llama(options, dtype=BF16 if options.column_unit > 2 else F32)
    for inst in program.instructions:
        waits = [(program.barriers[w.barrier].split(".done")[0], w.target) for w in inst.waits]
        if inst.name() == "embed":
            assert all(target == 0 for _, target in waits)
        elif inst.name() == "attention":
            assert waits
            assert all(name.endswith("qkv") and target == 0 for name, target in waits)
        elif inst.name() == "sample":
            assert [name for name, _ in waits] == ["lm_head"]
        else:
            assert not waits
    kinds = {i.name() for i in program.instructions}
    assert "noop" not in kinds
    assert ("attention_merge" in kinds) == (options.min_chunk < 32)


@pytest.mark.parametrize("options", [TAGGED[1], TAGGED[2]], ids=name_of)
def test_attention_that_does_not_wait_for_the_step_before_is_rejected(
    options: CompileOptions,
) -> None:
    program = decode_llama(options)
    for index in np.flatnonzero(program.words[:, 0] == Attention.opcode):
        words = program.words.copy()
        words[index] = with_header(words[index], [], None)
        with pytest.raises(VerificationError, match=r"reads earlier indexed rows .*k_cache"):
            verify(replace(program, words=words))


def test_half_heads_of_odd_length_go_through_the_caches() -> None:
    def tensors(head_dim: int, unit: int, dtype: DType) -> set[str]:
        config = LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=head_dim,
        )
        graph = llama_graph(config, Limits(1, 8, 1, 1, 2, 4), Bucket(1, 1, 8), dtype)
        options = CompileOptions(2, exchange="tagged", column_unit=unit)
        names = [t.name for t in compile_graph(graph, options).tensors]
        return {n.split(".")[3] for n in names if n.startswith("layers.0.qkv.")}

    assert tensors(8, 16, BF16) == {"q", "k_new", "v_new"}
    assert tensors(8, 2, F32) == {"q", "k_new", "v_new"}
    assert tensors(10, 16, BF16) == tensors(8, 2, BF16) == set()


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
def test_sampling_gets_the_peaks_of_every_tile_of_the_logits(options: CompileOptions) -> None:
    program = tiny_llama(**vars(options))
    (sample, *_) = [i for i in program.instructions if isinstance(i, Sample)]
    peaks = [i for i in program.instructions if isinstance(i, Matmul) and i.peaks != NONE]
    assert {program.labels[program.instructions.index(i)] for i in peaks} == {"lm_head"}
    assert {i.peaks for i in peaks} == {sample.peaks}
    tiles = sorted({(i.tile, i.column_begin, i.column_end) for i in peaks})
    assert [t[0] for t in tiles] == list(range(len(tiles)))
    assert [t[1] for t in tiles] == [0, *(t[2] for t in tiles[:-1])]
    assert program.tensors[sample.peaks].columns == 2 * len(tiles)


def test_a_product_of_long_rows_is_split_among_workers() -> None:
    """Workers by their share of the columns; those that add up the parts come last."""
    options = CompileOptions(8, part_of_k=64)
    program = compile_graph(mlp_graph(F32, 2, hidden=64, wide=160), options)
    down = [
        i
        for i in program.instructions
        if isinstance(i, Matmul) and program.tensors[i.weight].name == "down.w"
    ]
    parts = [i.k(program.tensors) for i in down]
    assert parts == [(0, 64)] * 3 + [(64, 128)] * 3 + [(128, 160)] * 2
    for i in down:
        assert (i.addends == NONE, i.residual == NONE) == (i.part < 2, i.part < 2)
        assert i.out_begin(program.tensors) == (64 * i.part if i.part < 2 else 0)
    (addends,) = {i.addends for i in down if i.part == 2}
    assert {i.out for i in down if i.part < 2} == {addends}
    assert program.tensors[addends].shape == (2, 128)
    assert program.tensors[addends].tagged


@pytest.mark.parametrize(
    ("workers", "parts"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (12, 6), (200, 8)]
)
def test_a_product_has_no_more_parts_than_workers_add_up(workers: int, parts: int) -> None:
    graph = Graph(4)
    x = graph.tensor("x", (4, 1536), F32, TensorKind.INPUT)
    y = graph.linear("y", x, graph.weight("w", (128, 1536), F32), dtype=F32)
    graph.output(y, "y")
    program = compile_graph(graph, CompileOptions(workers, part_of_k=64))
    found = {i.k(program.tensors) for i in program.instructions if isinstance(i, Matmul)}
    step = 1536 // parts
    assert found == {(k, k + step) for k in range(0, 1536, step)}


@pytest.mark.parametrize("workers", [66, 114, 132])
@pytest.mark.parametrize(
    ("rows", "k", "columns", "parts"),
    [
        (8, 8192, 2048, 4),
        (8, 5632, 2048, 3),
        (8, 3072, 3072, 1),
        (8, 14336, 4096, 1),
        (8, 14336, 2048, 3),
        (9, 8192, 2048, 1),
        (16, 8192, 1024, 4),
    ],
)
def test_workers_that_add_up_parts_have_one_block_of_columns(
    rows: int, k: int, columns: int, parts: int, workers: int
) -> None:
    """With two they would wait for the other parts before they multiply the second one."""
    graph = Graph(rows)
    x = graph.tensor("x", (rows, k), BF16, TensorKind.INPUT)
    y = graph.linear("y", x, graph.weight("w", (columns, k), BF16), dtype=F32)
    graph.output(y, "y")
    program = unordered(graph, default_options("cuda", workers, rows))
    tiles = [i for i in program.instructions if isinstance(i, Matmul)]
    for tile in tiles:
        assert tile.addends == NONE or tile.column_end - tile.column_begin <= (
            64 if rows <= 8 else 32
        )
    if workers == 132:
        assert len({tile.part for tile in tiles}) == parts


@pytest.mark.parametrize("unit", [2, 8, 16, 24])
def test_column_tiles_begin_at_multiples_of_the_unit(unit: int) -> None:
    program = tiny_llama(132, rows=1, column_unit=unit)
    begins = {i.column_begin for i in program.instructions if isinstance(i, Matmul | GateUp)}
    assert math.gcd(*begins) % unit == 0
    pairs = {i.pair_begin for i in program.instructions if isinstance(i, QkvRope)}
    assert math.gcd(*pairs) == math.gcd(4, unit // 2)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("column_unit", 0, "column_unit is 0, expected at least 1"),
        ("column_unit", 9, "column_unit is 9, expected an even number"),
        ("workers", 0, "workers is 0, expected at least 1"),
        ("part_of_k", 48, "part_of_k is 48, expected a multiple of 64"),
        ("part_of_k", -64, "part_of_k is -64, expected a multiple of 64"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, value: int, sentence: str) -> None:
    options: dict[str, Any] = {"workers": 1, name: value}
    with pytest.raises(ValueError, match=sentence):
        CompileOptions(**options)


@pytest.mark.parametrize("context", [256, 4096])
def test_a_step_of_a_large_model_occupies_132_workers_evenly(context: int) -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
    )
    limits = Limits(1, context, 1, 1, context // 16, 16)
    graph = llama_graph(config, limits, Bucket(1, 1, context), BF16)
    program = compile_graph(graph, CompileOptions(132, exchange="tagged", column_unit=8))
    assert not any(i.name() == "noop" for i in program.instructions)
    worker = program.worker_of()
    places = list(zip(program.labels, worker.tolist(), strict=True))
    assert len(set(places)) == len(places)
    cost = np.zeros(132)
    np.add.at(cost, worker, [i.bytes(program.tensors) for i in program.instructions])
    assert np.abs(cost / cost.mean() - 1).max() < 0.015


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


def square(graph: Graph, label: str, x: Value) -> Value:
    return graph.linear(label, x, graph.weight(f"{label}.w", (16, 16), F32), dtype=F32)


def test_more_dependencies_than_waits_are_joined_by_noops(machine: Machine) -> None:
    graph = Graph(1)
    first = square(graph, "first", graph.tensor("x", (1, 16), F32, TensorKind.INPUT))
    readers = [square(graph, f"reader{i}", first) for i in range(5)]
    # It takes the place of the first, whose readers it has to wait for.
    second = square(graph, "second", readers[4])
    graph.output(square(graph, "third", second), "z")
    for i, value in enumerate(readers[:4]):
        graph.output(value, f"y{i}")
    program = compile_graph(graph, CompileOptions(2))
    assert any(i.name() == "noop" for i in program.instructions)
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=3)
    weights = {n: memory[f"{n}.w"].T for n in ("first", "reader4", "second", "third")}
    one = memory["x"] @ weights["first"]
    for i in range(4):
        torch.testing.assert_close(memory[f"y{i}"], one @ memory[f"reader{i}.w"].T)
    want = one @ weights["reader4"] @ weights["second"] @ weights["third"]
    torch.testing.assert_close(memory["z"], want)


def test_the_ends_of_a_step_share_barriers_instead_of_noops(machine: Machine) -> None:
    graph = Graph(1)
    x = graph.tensor("x", (1, 16), F32, TensorKind.INPUT)
    for i in range(5):
        graph.output(square(graph, f"part{i}", x), f"y{i}")
    program = compile_graph(graph, CompileOptions(2))
    assert not any(i.name() == "noop" for i in program.instructions)
    assert all(len(i.waits) == 1 for i in program.instructions)
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=3)
    for i in range(5):
        torch.testing.assert_close(memory[f"y{i}"], memory["x"] @ memory[f"part{i}.w"].T)


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


@pytest.mark.parametrize(
    ("machine", "dtype", "rows", "matrix"),
    [
        ("cuda", BF16, 1, 0),
        ("cuda", BF16, 8, 0),
        ("cuda", BF16, 16, 0),
        ("cuda", BF16, 17, 1),
        ("cuda", F32, 17, 0),
        ("cpu", BF16, 17, 0),
    ],
)
def test_lowering_chooses_for_each_product_how_its_rows_are_multiplied(
    machine: str, dtype: DType, rows: int, matrix: int
) -> None:
    graph = Graph(rows)
    x = graph.tensor("x", (rows, 64), dtype, TensorKind.INPUT)
    wide = graph.tensor("wide", (rows, 64), F32, TensorKind.INPUT)
    for name, value in (("x", x), ("wide", wide)):
        result = graph.linear(
            f"{name}.y", value, graph.weight(f"{name}.w", (64, 64), dtype), dtype=F32
        )
        graph.output(result, f"{name}.out")
    program = compile_graph(graph, default_options(machine, 4, rows))
    chosen = {
        program.labels[i]: inst.matrix
        for i, inst in enumerate(program.instructions)
        if isinstance(inst, Matmul)
    }
    assert chosen == {"x.y": matrix, "wide.y": 0}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("narrow", [4, 16, 64, 144, 200])
@pytest.mark.parametrize("rows", [1000, 1024, 8192])
def test_narrow_products_of_many_rows_fit_into_the_working_memory(
    rows: int, narrow: int, dtype: DType
) -> None:
    program = compile_graph(
        mlp_graph(dtype, rows, hidden=narrow, wide=3 * narrow), default_options("cpu", 2, rows)
    )
    verify(program, "cpu")


@given(
    model=st.tuples(
        st.sampled_from([(1, 1), (2, 1), (3, 3), (9, 3), (8, 4), (7, 1)]),  # heads, KV heads
        st.sampled_from([4, 8, 16, 48, 64, 128]),  # head_dim
        st.sampled_from([16, 32, 64, 200, 288]),  # hidden size
        st.sampled_from([16, 64, 128, 344]),  # intermediate size
    ),
    rows=st.sampled_from([1, 7, 100, 512, 1024, 2048, 8192]),
    dtype=st.sampled_from([F32, BF16]),
    workers=st.sampled_from([1, 2, 8]),
    context=st.sampled_from([1, 20000]),
)
@settings(max_examples=25, deadline=None)
def test_small_models_compile_for_the_cpu_at_any_number_of_rows(
    model: tuple[tuple[int, int], int, int, int],
    rows: int,
    dtype: DType,
    workers: int,
    context: int,
) -> None:
    (heads, kv_heads), head_dim, hidden, wide = model
    config = LlamaConfig(257, hidden, wide, 1, heads, kv_heads, head_dim)
    limits = Limits(16, 20480, max(rows, 16), default_logit_rows(16, rows), 1280, 16)
    options = functools.partial(default_options, "cpu", workers)
    bucket = choose_bucket(config, limits, options, rows, min(rows, 16), context)
    verify(compile_bucket(config, limits, dtype, bucket, options), "cpu")


@pytest.mark.parametrize("rows", [64, 512, 4096, 8192])
def test_matrix_products_have_no_more_tiles_than_they_need(rows: int) -> None:
    tiles = list(matrix_tiles((0, rows), 14336, 4096, 64, 2, 132, TARGETS["cuda"]))
    assert len(tiles) <= 2 * 132, "two waves of large tiles are as fast as many of small ones"
    area = sum((right - left) * (bottom - top) for (left, right), (top, bottom) in tiles)
    assert area == rows * 14336
