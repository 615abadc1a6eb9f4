"""Fusion: join operations that one instruction can do, with no pass over memory between them.

* two linears of the same input, then silu_mul: one gate_up;
* linear, then add: the residual is the product's epilogue;
* gather, then linear: the product reads its rows through the index;
* a linear or embed, then rms_norm, then products: who makes the rows leaves them scaled and their
  squares, the products divide by the root of those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from megavm.instructions.tiles import squares_of
from megavm.scheduler.compiler.graph import Graph, Operation, Value
from megavm.vm.isa import F32, DType


def fuse(graph: Graph, fuse_norm: bool = True) -> list[Operation]:
    """The graph's operations after fusion, in topological order.

    RMSNorm is done by its neighbours where they can, unless ``fuse_norm`` is false.

    Raises ValueError when an operation that only exists fused (add, silu_mul, gather) could not be.
    """
    operations = list(graph.operations)
    rewrites: list[Callable[[list[Operation]], list[Operation]]] = [
        _fuse_gate_up,
        _fuse_residual,
        _fuse_gather,
    ]
    for rewrite in [*rewrites, _fuse_norm] if fuse_norm else rewrites:
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


def _fuse_norm(operations: list[Operation]) -> list[Operation]:
    producers, readers = _producers(operations), _readers(operations)
    norms: dict[Operation, Operation] = {}  # by the operation that makes what is normalised
    scaled: dict[Value, tuple[Operation, Value, Value]] = {}  # by what the norms would have made
    for norm in operations:
        maker = producers.get(norm.inputs["x"]) if norm.kind == "rms_norm" else None
        if maker is None or maker.kind not in ("linear", "embed") or maker in norms:
            continue
        x, out = norm.inputs["x"], norm.outputs["out"]
        dtype = _multiplied_with(out, readers[out])
        if dtype is None or out.spec is not None:
            continue
        norms[maker] = norm
        squares = Value(f"{out.name}.squares", x.rows, squares_of(x.columns), F32, x.capacity)
        scaled[out] = norm, replace(out, dtype=dtype), squares
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "rms_norm" and operation.outputs["out"] in scaled:
            continue
        if operation in norms:
            norm = norms[operation]
            _, out, squares = scaled[norm.outputs["out"]]
            operation = replace(
                operation,
                inputs={**operation.inputs, "out_gain": norm.inputs["gain"]},
                outputs={**operation.outputs, "out_scaled": out, "out_squares": squares},
            )
        if operation.inputs.get("x") in scaled:
            norm, out, squares = scaled[operation.inputs["x"]]
            operation = replace(
                operation,
                inputs={**operation.inputs, "x": out, "x_squares": squares},
                attributes={**operation.attributes, **norm.attributes},
            )
        result.append(operation)
    return result


def _multiplied_with(x: Value, readers: list[Operation]) -> DType | None:
    """The type of all weights that ``readers`` multiply x with; None if one does something else."""
    weights = {"linear": "weight", "gate_up": "gate", "qkv_rope": "q_weight"}
    types = set()
    for reader in readers:
        if reader.kind not in weights or reader.inputs["x"] is not x:
            return None
        types.add(reader.inputs[weights[reader.kind]].dtype)
    return types.pop() if len(types) == 1 else None


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
