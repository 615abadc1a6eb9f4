"""Fuse two products of the same input, and the silu_mul of their results, into one gate_up."""

from __future__ import annotations

from megavm.scheduler.compiler.graph import (
    Operation,
    Value,
    has_one_reader,
    producers_of,
    readers_of,
)
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.tensors import TensorKind, TensorSpec


def join_gate_and_up(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Replace silu_mul of two products, which nothing else reads, by gate_up.

    Its weight consists of the two weights, and its bias of the two biases: both products have one,
    or neither.
    """
    readers, producers = readers_of(operations), producers_of(operations)
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "silu_mul":
            gate, up = (producers.get(operation.inputs[k]) for k in ("gate", "up"))
            if (
                gate is not None
                and up is not None
                and gate.kind == up.kind == "matmul"
                and gate.inputs["x"] is up.inputs["x"]
                and gate.inputs.keys() == up.inputs.keys()
                and not (gate.attributes or up.attributes)
                and all(_can_be_joined(gate, up, name) for name in gate.inputs.keys() - {"x"})
                and all(has_one_reader(o.outputs["out"], readers) for o in (gate, up))
            ):
                inputs = {
                    name: value if name == "x" else _joined(value.memory, up.inputs[name].memory)
                    for name, value in gate.inputs.items()
                }
                result.remove(gate)
                result.remove(up)
                operation = Operation("gate_up", operation.label, inputs, operation.outputs)
        result.append(operation)
    return result


def _can_be_joined(gate: Operation, up: Operation, name: str) -> bool:
    values = gate.inputs[name], up.inputs[name]
    weights = all(v.spec is not None and v.spec.kind is TensorKind.WEIGHT for v in values)
    return weights and values[0].dtype is values[1].dtype


def _joined(gate: TensorSpec, up: TensorSpec) -> Value:
    return Value.of(TensorSpec.joined(_joined_name(gate.name, up.name), [gate, up]))


def _joined_name(gate: str, up: str) -> str:
    """``mlp.gate_proj.weight`` and ``mlp.up_proj.weight`` as ``mlp.gate_up_proj.weight``.

    Names that do not differ in this way are quoted, so that no two pairs have the same.
    """
    if gate.count("gate") == 1 and up == gate.replace("gate", "up"):
        return gate.replace("gate", "gate_up")
    return f"{gate!r} + {up!r}"
