"""A graph refuses what its operations would ignore, and its results stay usable as outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from compiled_graphs import ALL_OPTIONS, name_of, random_memory

from megavm.instructions.copy import Copy
from megavm.instructions.rms_norm import RmsNorm
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph, Operation, Value
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.compiler.tiling import Lowering
from megavm.vm.machine import Machine
from megavm.vm.tensors import F32, I32, Region, TensorKind, TensorSpec, whole

ROWS, SIZE = 4, 16


class Example(Graph):
    """A graph with an input x; further tensors of memory by name."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.x = self.tensor("x", (ROWS, SIZE), F32, TensorKind.INPUT)
        self.named = {
            "x": self.x,
            "w": self.weight("w", (SIZE, SIZE), F32),
            "b": self.weight("b", (SIZE,), F32),
            "index": self.tensor("index", (ROWS,), I32, TensorKind.INPUT),
            "count": self.tensor("count", (1,), I32, TensorKind.INPUT),
        }

    def do(
        self, kind: str, operands: str, attributes: dict[str, float] | None = None, label: str = "p"
    ) -> Value:
        """Append an operation; ``operands`` are pairs such as ``x=x weight=w``."""
        pairs = (pair.split("=") for pair in operands.split())
        inputs = {name: self.named[value] for name, value in pairs}
        return self.append(kind, label, inputs, SIZE, F32, attributes, like=self.x)

    def product(self, label: str, x: Value) -> Value:
        weight = self.weight(f"{label}.w", (SIZE, SIZE), F32)
        return self.linear(label, x, weight, dtype=F32)


@pytest.mark.parametrize(
    ("kind", "operands", "attributes", "sentence"),
    [
        ("matmul", "x=x weight=w bais=b", {}, "p: matmul has no operand bais; it needs x, weight,"),
        ("matmul", "x=x wieght=w", {}, "p: matmul has no operand wieght; it needs x, weight,"),
        ("matmul", "x=x", {}, "p: matmul lacks its operand weight; it needs x, weight, and may"),
        ("matmul", "x=x weight=w out=x", {}, "p: matmul has no operand out;"),
        ("matmul", "x=x weight=w", {"bias": 1}, "p: matmul has no attribute bias; .* eps, matrix$"),
        (
            "copy",
            "x=x zzz=x",
            {},
            "p: copy has no operand zzz; it needs x, and may have row_index,",
        ),
        ("copy", "x=x", {"foo": 3}, "p: copy has no attribute foo; its attributes are x_row,"),
        ("copy", "", {}, "p: copy lacks its operand x;"),
        ("rms_norm", "x=x gian=b", {"eps": 0}, "p: rms_norm has no operand gian; it needs x, gain"),
        (
            "rms_norm",
            "x=x",
            {"eps": 0},
            "p: rms_norm lacks its operand gain; it needs x, gain, and",
        ),
        ("attention", "q=x", {}, "p: attention lacks its operand k_cache, v_cache, row_sequence,"),
        ("add", "x=x resid=x", {}, "p: add has no operand resid; it needs x, residual$"),
        ("gather", "x=x", {}, "p: gather lacks its operand index; it needs x, index, and may"),
        ("silu_mul", "gate=x up=x", {"n": 1}, "p: silu_mul has no attribute n; it has none$"),
        ("matmull", "x=x", {}, "p: append has no kind matmull; it has add, .* matmul, "),
        ("qkv_rope", "x=x", {}, "p: append has no kind qkv_rope; it has add, "),
    ],
)
def test_what_an_operation_does_not_have_or_lacks_is_refused_when_it_is_appended(
    kind: str, operands: str, attributes: dict[str, float], sentence: str
) -> None:
    graph = Example()
    with pytest.raises(ValueError, match=sentence):
        graph.do(kind, operands, attributes)
    graph.output(graph.do("copy", "x=x"), "y")  # the label is free
    compile_graph(graph, CompileOptions(2))


@pytest.mark.parametrize("kind", ["attention", "rms_norm"])
def test_an_operation_without_an_attribute_that_it_needs_is_refused_by_name(kind: str) -> None:
    graph = Example()
    graph.named["cache"] = graph.tensor("cache", (2, 1, 4, SIZE), F32, TensorKind.STATE)
    steps = " ".join(f"{n}=index" for n in ("row_sequence", "row_position", "block_table"))
    operands = {
        "attention": f"q=x k_cache=cache v_cache=cache {steps}",
        "rms_norm": "x=x gain=b",
    }
    graph.output(graph.do(kind, operands[kind]), "y")
    with pytest.raises(ValueError, match=f"p: {kind} needs the attribute (context|eps)"):
        compile_graph(graph, CompileOptions(2))


@pytest.mark.parametrize(
    ("kind", "operands", "attributes", "sentence"),
    [
        ("rms_norm", "x=x gain=b row_count=count", {"eps": 0.5}, "row_count is count"),
        ("matmul", "x=x weight=w", {"row_begin": 1}, "row_begin is 1"),
    ],
)
def test_what_lowering_decides_itself_is_refused_with_another_value(
    kind: str, operands: str, attributes: dict[str, float], sentence: str
) -> None:
    graph = Example()
    graph.output(graph.do(kind, operands, attributes), "y")
    sentence = f"p: {sentence}, but instructions/{kind}/lower.py does not pass it on"
    with pytest.raises(ValueError, match=sentence):
        compile_graph(graph, CompileOptions(2))


def test_a_lowering_that_forgets_an_attribute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(operation: Operation, context: Lowering) -> Iterator[RmsNorm]:
        handles = context.handles(operation, "x", "gain", "out")
        yield RmsNorm(**handles, row_begin=0, row_end=ROWS, eps=0.0)

    graph = Example()
    graph.output(graph.do("rms_norm", "x=x gain=b", {"eps": 0.1}), "y")
    compile_graph(graph, CompileOptions(2))  # 0.1 is no float32
    monkeypatch.setattr("megavm.scheduler.compiler.lower._lowering_of", lambda kind: lower)
    with pytest.raises(ValueError, match=r"p: eps is 0\.1.*, but .*rms_norm/lower.py does not"):
        compile_graph(graph, CompileOptions(2))


def test_a_declaration_that_needs_an_absent_operand_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reads(inst: RmsNorm, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield whole(tensors, inst.row_count)  # without present()

    monkeypatch.setattr(RmsNorm, "reads", reads)
    graph = Example()
    graph.output(graph.do("rms_norm", "x=x gain=b", {"eps": 0.5}), "y")
    with pytest.raises(ValueError, match="what rms_norm accesses cannot be declared, as with an"):
        compile_graph(graph, CompileOptions(2))


def tile(rows: tuple[int, int], columns: tuple[int, int]) -> dict[str, Any]:
    (top, bottom), (left, right) = rows, columns
    return {
        "x_row": top, "x_column": left, "row_begin": top, "row_end": bottom,
        "column_begin": left, "column_end": right,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tiles", "sentence"),
    [
        ([], "p: instructions/copy/lower.py makes no instruction"),
        ([((0, ROWS - 1), (0, 4))], f"p: copy does not write row {ROWS - 1} column 0 of out"),
        ([((1, ROWS), (0, 4)), ((0, 1), (2, 4))], "p: copy does not write row 0 column 0 of out"),
        (
            [((0, ROWS), (0, 1)), ((0, ROWS), (2, 4))],
            "p: copy does not write row 0 column 1 of out",
        ),
        ([((0, ROWS), (0, 3))], "p: out has 4 columns, but copy writes 3 of them"),
    ],
)
def test_a_lowering_that_leaves_out_a_part_of_the_result_is_refused(
    tiles: list[tuple[tuple[int, int], tuple[int, int]]],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lower(operation: Operation, context: Lowering) -> Iterator[Copy]:
        handles = context.handles(operation, "x", "out")
        for rows, columns in tiles:
            yield Copy(**handles, **tile(rows, columns))

    graph = Graph(ROWS)
    x = graph.tensor("x", (ROWS, 4), F32, TensorKind.INPUT)
    graph.output(graph.append("copy", "p", {"x": x}, 4, F32, like=x), "out")
    monkeypatch.setattr("megavm.scheduler.compiler.lower._lowering_of", lambda kind: lower)
    with pytest.raises(ValueError, match=sentence):
        compile_graph(graph, CompileOptions(2))


@pytest.mark.parametrize("added", [False, True])
def test_a_result_with_more_columns_than_the_operation_writes_is_refused(added: bool) -> None:
    graph = Graph(ROWS)
    x = graph.tensor("x", (ROWS, 6), F32, TensorKind.INPUT)
    inputs = {"x": x, "weight": graph.weight("w", (7, 6), F32)}
    y = graph.append("matmul", "p", inputs, 7 if added else 8, F32, like=x)
    if added:
        residual = graph.tensor("residual", (ROWS, 7), F32, TensorKind.INPUT)
        y = graph.append("add", "sum", {"x": y, "residual": residual}, 8, F32, like=x)
    graph.output(y, "out")
    with pytest.raises(ValueError, match="p: out has 8 columns, but matmul writes 7 of them"):
        compile_graph(graph, CompileOptions(2))


def test_a_residual_does_not_replace_another_one() -> None:
    graph = Example()
    y = graph.do("matmul", "x=x weight=w residual=x")
    graph.output(graph.add("sum", y, graph.x), "y")
    with pytest.raises(ValueError, match="sum: no instruction does add by itself"):
        compile_graph(graph, CompileOptions(2))


@pytest.mark.parametrize("fused", [True, False])
def test_rows_are_chosen_twice_and_scaled_twice_if_the_graph_says_so(
    machine: Machine, fused: bool
) -> None:
    graph = Example()
    h = graph.product("h", graph.x)
    graph.named["rows"] = graph.gather("rows", h, graph.named["index"], None, ROWS)
    graph.output(graph.do("matmul", "x=rows weight=w row_index=index"), "y")
    graph.named["norm"] = graph.rms_norm("norm", h, graph.named["b"], 0.25)
    graph.named["squares"] = graph.tensor("squares", (ROWS, SIZE // 8), F32, TensorKind.INPUT)
    operands = "x=norm weight=w x_squares=squares"
    graph.output(graph.do("matmul", operands, {"eps": 0.5}, "z"), "z")
    program = compile_graph(graph, CompileOptions(2, fuse_norm=fused))
    memory = random_memory(program, device=machine.memory_device)
    index, squares = torch.tensor([1, 2, 3, 0]), torch.rand(ROWS, SIZE // 8)
    memory.write("index", index.int())
    memory.write("squares", squares)
    machine.load(program, memory).run(steps=2)
    values = memory.copy("cpu")
    h_, weight = values["x"] @ values["h.w"].T, values["w"].T
    torch.testing.assert_close(values["y"], h_[index][index] @ weight, rtol=1e-4, atol=1e-5)
    normed = h_ * torch.rsqrt(h_.square().mean(-1, keepdim=True) + 0.25) * values["b"]
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / SIZE + 0.5)
    torch.testing.assert_close(values["z"], scale * (normed @ weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [o for o in ALL_OPTIONS if o.part_of_k], ids=name_of)
def test_a_product_that_the_graph_splits_is_not_split_again(
    machine: Machine, options: CompileOptions
) -> None:
    graph = Graph(ROWS)
    x = graph.tensor("x", (ROWS, 192), F32, TensorKind.INPUT)
    weight = graph.weight("w", (SIZE, 192), F32)
    inputs = {"x": x, "weight": weight}
    parts = graph.append("matmul", "parts", inputs, 3 * SIZE, F32, {"part_k": 64}, like=x)
    graph.output(graph.append("reduce", "sum", {"parts": parts}, SIZE, F32, like=x), "y")
    program = compile_graph(graph, options)
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=2)
    values = memory.copy("cpu")
    want = values["x"] @ values["w"].T
    torch.testing.assert_close(values["y"], want, rtol=1e-4, atol=1e-5)


def test_products_with_attributes_are_not_joined() -> None:
    """gate_up would not have them."""
    graph = Example()
    gate = graph.do("matmul", "x=x weight=w", {"part_k": 64}, "gate")
    graph.output(graph.silu_mul("gated", gate, graph.product("up", graph.x)), "y")
    with pytest.raises(ValueError, match="gated: no instruction does silu_mul by itself"):
        compile_graph(graph, CompileOptions(2))


@pytest.mark.parametrize("kept", [True, False], ids=["what output returns", "the value itself"])
@pytest.mark.parametrize("options", ALL_OPTIONS, ids=name_of)
def test_an_output_is_an_input_of_later_operations(
    machine: Machine, options: CompileOptions, kept: bool
) -> None:
    graph = Example()

    def output(value: Value, name: str) -> Value:
        found = graph.output(value, name)
        return found if kept else value

    h = output(graph.product("h", graph.x), "mid")
    normed = output(graph.rms_norm("norm", h, graph.named["b"], 1e-5), "normed")
    total = output(graph.add("sum", graph.product("q", normed), h), "sum")
    output(graph.gather("rows", total, graph.named["index"], None, ROWS), "rows")
    output(graph.silu_mul("act", graph.product("gate", h), graph.product("up", h)), "act")
    program = compile_graph(graph, options)
    memory = random_memory(program, device=machine.memory_device)
    memory.write("index", torch.tensor([3, 0, 0, 2], dtype=torch.int32))
    machine.load(program, memory).run(steps=2)
    values = memory.copy("cpu")
    mid = values["x"] @ values["h.w"].T
    want = {"mid": mid}
    want["normed"] = mid * torch.rsqrt(mid.square().mean(-1, keepdim=True) + 1e-5) * values["b"]
    want["sum"] = want["normed"] @ values["q.w"].T + mid
    want["rows"] = want["sum"][[3, 0, 0, 2]]
    gate, up = values["gate_up.w"].chunk(2)
    want["act"] = torch.nn.functional.silu(mid @ gate.T) * (mid @ up.T)
    for name, value in want.items():
        torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)


def test_operations_before_and_after_an_output_read_the_same_value(machine: Machine) -> None:
    graph = Example()
    h = graph.product("h", graph.x)
    before = graph.product("before", h)
    graph.output(h, "mid")
    after = graph.product("after", h)
    graph.output(before, "a")
    graph.output(after, "b")
    program = compile_graph(graph, CompileOptions(2))
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=2)
    values = memory.copy("cpu")
    for name, weight in (("a", "before.w"), ("b", "after.w")):
        torch.testing.assert_close(values[name], values["mid"] @ values[weight].T)


def test_a_value_is_one_output_and_an_output_one_value() -> None:
    graph = Example()
    y, z = graph.product("y", graph.x), graph.product("z", graph.x)
    kept = graph.output(y, "a")
    for value, name in ((y, "y"), (kept, "a")):
        for again in "ab":
            with pytest.raises(ValueError, match=f"{name} is an output already, under the name a"):
                graph.output(value, again)
    with pytest.raises(ValueError, match="z and y cannot both be the output a"):
        graph.output(z, "a")
    with pytest.raises(ValueError, match="x is not the result of an operation of this graph"):
        graph.output(graph.x, "c")
    graph.output(z, "b")
    names = {spec.name for spec in compile_graph(graph, CompileOptions(2)).tensors}
    assert {"a", "b"} <= names


def test_values_of_another_graph_are_refused() -> None:
    one, other = Example(), Example()
    mine, foreign = one.product("p", one.x), other.product("p", other.x)
    sentence = "q: x is p, which is neither a tensor of memory nor the result of an operation"
    with pytest.raises(ValueError, match=sentence):
        one.product("q", foreign)
    with pytest.raises(ValueError, match="p is not the result of an operation of this graph"):
        one.output(foreign, "y")
    one.output(one.product("q", mine), "y")


@pytest.mark.parametrize("wrong", [None, "x", TensorSpec("x", (ROWS, SIZE), F32, TensorKind.INPUT)])
def test_an_operand_that_is_no_value_is_refused(wrong: Any) -> None:
    graph = Example()
    inputs = {"x": graph.x, "weight": graph.named["w"]}
    for change in ({"x": wrong}, {"bias": wrong}):
        with pytest.raises(TypeError, match=rf"p: {next(iter(change))} is .*, not a Value of the"):
            graph.append("matmul", "p", inputs | change, SIZE, F32)
    if wrong is not None:
        with pytest.raises(TypeError, match=r"p: like is .*, not a Value of the"):
            graph.append("matmul", "p", inputs, SIZE, F32, like=wrong)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rows": -1}, "a graph has rows -1: expected an integer from 1 on"),
        ({"rows": 1.5}, r"a graph has rows 1\.5: expected an integer from 1 on"),
        ({"rows": 4, "ranks": 0}, "a graph has ranks 0: expected an integer from 1 on"),
        ({"rows": 4, "capacity": 2}, "a graph has capacity 2: expected an integer from 4 on"),
    ],
)
def test_a_graph_of_impossible_size_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Graph(**arguments)


@pytest.mark.parametrize("make", [default_options, lambda name, *_: CompileOptions(1, name)])
def test_options_of_an_unknown_machine_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="machine 'xpu' is not cpu, cuda, reference"):
        make("xpu", 1, 1)


def test_an_output_may_have_the_name_that_an_activation_would_get(machine: Machine) -> None:
    graph = Example()
    name = f"activation0.f32.{ROWS}x{SIZE}"
    graph.output(graph.product("first", graph.x), name)
    graph.output(graph.product("last", graph.product("middle", graph.x)), "out")
    program = compile_graph(graph, CompileOptions(2))
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run()
    own = memory.copy("cpu")
    torch.testing.assert_close(own[name], own["x"] @ own["first.w"].T, rtol=1e-4, atol=1e-4)
