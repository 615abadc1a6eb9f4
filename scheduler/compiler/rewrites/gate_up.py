"""Fuse two products of the same input, and the silu_mul of their results, into one gate_up."""

from __future__ import annotations

from megavm.scheduler.compiler.graph import Operation, producers_of, readers_of
from megavm.scheduler.compiler.options import CompileOptions


def join_gate_and_up(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Replace silu_mul of two products, which nothing else reads, by gate_up."""
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
                and len(readers[gate.outputs["out"]]) == len(readers[up.outputs["out"]]) == 1
            ):
                inputs = {
                    "x": gate.inputs["x"],
                    "gate": gate.inputs["weight"],
                    "up": up.inputs["weight"],
                }
                for name, part in (("gate_bias", gate), ("up_bias", up)):
                    if "bias" in part.inputs:
                        inputs[name] = part.inputs["bias"]
                result.remove(gate)
                result.remove(up)
                operation = Operation("gate_up", operation.label, inputs, operation.outputs)
        result.append(operation)
    return result
