"""Fusion: join operations that one instruction can do, with no pass over memory between them.

* two linears of the same input, then silu_mul: one gate_up;
* linear, then add: the residual is the product's epilogue;
* gather, then linear: the product reads its rows through the index;
* rms_norm, then a product: every reader normalises for itself, as long as it reads few rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from megavm.scheduler.graph import Graph, Operation, Value


def fuse(graph: Graph, fuse_norm_rows: int) -> list[Operation]:
    """The graph's operations after fusion, in topological order.

    RMSNorm is recomputed by its readers when each reads at most ``fuse_norm_rows`` rows of it, and
    is an instruction of its own otherwise.

    Raises ValueError when an operation that only exists fused (add, silu_mul, gather) could not be.
    """
    operations = list(graph.operations)
    rewrites: tuple[Callable[[list[Operation]], list[Operation]], ...] = (
        _fuse_gate_up,
        _fuse_residual,
        _fuse_gather,
        lambda ops: _fuse_norm(ops, fuse_norm_rows),
    )
    for rewrite in rewrites:
        operations = rewrite(operations)
    for operation in operations:
        if operation.kind in ("add", "silu_mul", "gather"):
            raise ValueError(
                f"{operation.label}: no instruction does {operation.kind} by itself, and the"
                " operations around it cannot be fused with it"
            )
    return operations


def _readers(operations: list[Operation]) -> dict[Value, list[Operation]]:
    readers: dict[Value, list[Operation]] = defaultdict(list)
    for operation in operations:
        for value in operation.inputs.values():
            readers[value].append(operation)
    return readers


def _producers(operations: list[Operation]) -> dict[Value, Operation]:
    return {value: o for o in operations for value in o.outputs.values()}


def _fuse_gate_up(operations: list[Operation]) -> list[Operation]:
    readers, producers = _readers(operations), _producers(operations)
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "silu_mul":
            gate, up = (producers.get(operation.inputs[k]) for k in ("gate", "up"))
            if (
                gate is not None
                and up is not None
                and gate.kind == up.kind == "linear"
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


def _fuse_residual(operations: list[Operation]) -> list[Operation]:
    readers, producers = _readers(operations), _producers(operations)
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "add":
            product = producers.get(operation.inputs["x"])
            if (
                product is not None
                and product.kind == "linear"
                and len(readers[product.outputs["out"]]) == 1
            ):
                result.remove(product)
                inputs = {**product.inputs, "residual": operation.inputs["residual"]}
                operation = Operation("linear", product.label, inputs, operation.outputs)
        result.append(operation)
    return result


def _fuse_norm(operations: list[Operation], fuse_norm_rows: int) -> list[Operation]:
    products = {"linear", "gate_up", "qkv_rope"}
    producers, readers = _producers(operations), _readers(operations)
    fused = {
        operation
        for operation in operations
        if operation.kind == "rms_norm"
        and all(
            o.kind in products
            and o.inputs["x"] is operation.outputs["out"]
            and o.inputs.get("row_index", operation.outputs["out"]).rows <= fuse_norm_rows
            for o in readers[operation.outputs["out"]]
        )
    }
    result: list[Operation] = []
    for operation in operations:
        if operation in fused:
            continue
        norm = producers.get(operation.inputs["x"]) if operation.kind in products else None
        if norm is not None and norm in fused:
            inputs = {**operation.inputs, "x": norm.inputs["x"], "gain": norm.inputs["gain"]}
            operation = Operation(
                operation.kind,
                operation.label,
                inputs,
                operation.outputs,
                {**operation.attributes, **norm.attributes},
            )
        result.append(operation)
    return result


def _fuse_gather(operations: list[Operation]) -> list[Operation]:
    producers, readers = _producers(operations), _readers(operations)
    fused = {
        o
        for o in operations
        if o.kind == "gather" and all(r.kind == "linear" for r in readers[o.outputs["out"]])
    }
    result: list[Operation] = []
    for operation in operations:
        if operation in fused:
            continue
        gather = producers.get(operation.inputs["x"]) if operation.kind == "linear" else None
        if gather is not None and gather in fused:
            inputs = {
                **operation.inputs,
                "x": gather.inputs["x"],
                "row_index": gather.inputs["index"],
                "row_count": gather.inputs["count"],
            }
            operation = Operation(
                "linear", operation.label, inputs, operation.outputs, operation.attributes
            )
        result.append(operation)
    return result
