"""A lone matvec, an MLP and a Llama compile through one pipeline and mean what the graph says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_graphs import ALL_OPTIONS, mlp_graph, name_of, random_memory, tiny_llama
from torch.nn.functional import silu

from megavm.instructions.matmul import Matmul
from megavm.instructions.sample import Sample
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Batch, Graph, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.rewrites import rewrite
from megavm.scheduler.llama.graph import Limits, step_tensors
from megavm.vm.config import NONE
from megavm.vm.differential import first_divergence
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32, DType, TensorKind


def matvec_graph(dtype: DType, rows: int = 1) -> Graph:
    graph = Graph(rows)
    x = graph.tensor("x", (rows, 96), dtype, TensorKind.INPUT)
    y = graph.linear("matvec", x, graph.weight("w", (200, 96), dtype), dtype=F32)
    graph.output(y, "y")
    return graph


def test_what_the_host_reads_is_not_fused_away() -> None:
    """A product whose result is an output does not become a part of the operation that reads it."""
    graph = Graph(1)
    x = graph.tensor("x", (1, 16), F32, TensorKind.INPUT)
    y = graph.linear("y", x, graph.weight("w", (16, 16), F32), dtype=F32)
    graph.output(graph.add("z", graph.output(y, "y"), x), "z")
    with pytest.raises(ValueError, match="z: no instruction does add by itself"):
        compile_graph(graph, CompileOptions(2))


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


@pytest.mark.parametrize("shared", [False, True])
def test_joined_weights_are_written_under_their_own_names(machine: Machine, shared: bool) -> None:
    program = compile_graph(gated_graph(True, True, shared=shared), CompileOptions(2))
    memory = Memory(machine.memory_device)
    memory.allocate(program.tensors)
    executable = machine.load(program, memory)
    torch.manual_seed(2)
    values = {name: torch.randn(18, 16) for name in ("gate.w", "up.w")}
    values |= {name: torch.randn(18) for name in ("gate.b", "up.b")} | {"x": torch.randn(2, 16)}
    for name, value in values.items():
        memory.write(name, value)
        assert memory[name].cpu().equal(value)
    executable.run()
    gate, up = (values["x"] @ values[f"{n}.w"].T + values[f"{n}.b"] for n in ("gate", "up"))
    torch.testing.assert_close(memory["y"].cpu(), silu(gate) * up, rtol=1e-5, atol=1e-5)
    if shared:
        want = values["x"] @ values["gate.w"].T
        torch.testing.assert_close(memory["z"].cpu(), want, rtol=1e-5, atol=1e-5)


def test_joined_weights_of_any_names_are_told_apart(machine: Machine) -> None:
    graph = Graph(2)
    x = graph.tensor("x", (2, 16), F32, TensorKind.INPUT)
    pairs = [("a", "b_c"), ("a_b", "c"), ("gate", "up"), ("gate_gate", "up_gate")]
    for pair in pairs:
        gate, up = (
            graph.linear(f"{n}.out", x, graph.weight(n, (18, 16), F32), dtype=F32) for n in pair
        )
        graph.output(graph.silu_mul(f"{pair}", gate, up), f"{pair}.y")
    program = compile_graph(graph, CompileOptions(2))
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run()
    assert "gate_up" in memory
    values = memory.copy("cpu")
    for pair in pairs:
        gated, other = (values["x"] @ values[n].T for n in pair)
        want = silu(gated) * other
        torch.testing.assert_close(values[f"{pair}.y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [(True, False), (False, True)])
def test_gate_and_up_of_which_one_has_a_bias_are_refused(biases: tuple[bool, bool]) -> None:
    with pytest.raises(ValueError, match="gated: no instruction does silu_mul"):
        compile_graph(gated_graph(*biases), CompileOptions(1))


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


@pytest.mark.parametrize("fuse_norm", [True, False])
def test_a_norm_that_is_multiplied_and_added_stays(machine: Machine, fuse_norm: bool) -> None:
    """As in models that normalise what they add up."""
    graph = Graph(4)
    x = graph.tensor("x", (4, 64), F32, TensorKind.INPUT)
    h = graph.linear("h", x, graph.weight("w", (64, 64), F32), dtype=F32)
    n = graph.rms_norm("n", h, graph.weight("gain", (64,), F32), 1e-5)
    product = graph.linear("p", n, graph.weight("w2", (64, 64), F32), dtype=F32)
    graph.output(graph.add("o", product, n), "out")
    program = compile_graph(graph, CompileOptions(2, fuse_norm=fuse_norm))
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run()
    own = memory.copy("cpu")
    made = own["x"] @ own["w"].T
    normed = made * torch.rsqrt(made.square().mean(-1, keepdim=True) + 1e-5) * own["gain"]
    torch.testing.assert_close(own["out"], normed @ own["w2"].T + normed, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("column_unit", 0, "column_unit is 0, expected an integer of at least 1"),
        ("column_unit", 9, "column_unit is 9, expected an even number"),
        ("workers", 0, "workers is 0, expected an integer of at least 1"),
        ("workers", 1.5, "workers is 1.5, expected an integer of at least 1"),
        ("part_of_k", 64.0, "part_of_k is 64.0, expected a multiple of 64"),
        ("part_of_k", 48, "part_of_k is 48, expected a multiple of 64"),
        ("part_of_k", -64, "part_of_k is -64, expected a multiple of 64"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, value: float, sentence: str) -> None:
    options: dict[str, Any] = {"workers": 1, name: value}
    with pytest.raises(ValueError, match=sentence):
        CompileOptions(**options)


def test_two_choices_have_peaks_of_their_own() -> None:
    """Products of equal shapes: peaks of the second must not replace those of the first."""
    steps = step_tensors(Limits(2, 16, 2, 2, 8, 4), 40)
    batch = Batch(**{name: Value.of(spec) for name, spec in steps.items()})
    graph = Graph(2)
    x = graph.tensor("x", (2, 16), F32, TensorKind.INPUT)
    logits = [
        graph.linear(name, x, graph.weight(f"{name}.w", (40, 16), F32), dtype=F32)
        for name in ("first", "second")
    ]
    for i, value in enumerate(logits):
        graph.sample(f"choice{i}", value, batch, sampled=False)
    program = compile_graph(graph, CompileOptions(2))
    samples = [i for i in program.instructions if isinstance(i, Sample)]
    assert len({program.tensors[i.peaks].name for i in samples}) == 2
