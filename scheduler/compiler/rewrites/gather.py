"""Fuse a gather into the operations that can read rows through an index; else copies gather them.

Products can, but for matrix products: the copy engine would fetch each row by itself, again for
every 64 columns and every worker.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from megavm.instructions import instruction_of
from megavm.instructions.product import is_matrix_product
from megavm.scheduler.compiler.graph import Operation, Value, producers_of, readers_of
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.tensors import TensorKind, TensorSpec


def gather_in_product(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give products ``row_index`` and ``row_count`` in place of the gather that only they read.

    The same for copies that scatter.
    """
    producers, readers = producers_of(operations), readers_of(operations)
    fused = {
        o
        for o in operations
        if o.kind == "gather"
        and o.outputs["out"].spec is None
        and all(_takes_rows(r, o.outputs["out"]) for r in readers[o.outputs["out"]])
    }
    result: list[Operation] = []
    for operation in operations:
        if operation in fused:
            continue
        gather = producers.get(operation.inputs["x"]) if _takes_index(operation.kind) else None
        if gather is not None and gather in fused:
            inputs = {
                **operation.inputs,
                "x": gather.inputs["x"],
                "row_index": gather.inputs["index"],
            }
            if "count" in gather.inputs:
                inputs["row_count"] = gather.inputs["count"]
            operation = replace(operation, inputs=inputs)
        result.append(operation)
    return result


def _takes_rows(reader: Operation, value: Value) -> bool:
    """Whether a reader of the value has it as ``x`` alone, whose rows it can read by an index."""
    names = [name for name, read in reader.inputs.items() if read is value]
    has_index = not reader.inputs.keys().isdisjoint({"row_index", "row_count"})
    return names == ["x"] and not has_index and _takes_index(reader.kind)


@functools.cache
def _takes_index(kind: str) -> bool:
    """Whether operations of this kind can read the rows of ``x`` through ``row_index``."""
    cls = instruction_of(kind)
    return cls is not None and any(field.name == "row_index" for field in cls.fields)


def gather_before_matrix(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Copy the rows, and their squares, that a matrix product would read through an index."""
    result: list[Operation] = []
    for operation in operations:
        if _is_matrix_of_chosen(operation, options):
            inputs = dict(operation.inputs)
            index = inputs.pop("row_index")
            for name in ("x", "x_squares"):
                if name in inputs:
                    copy = _copy_of_rows(operation, name, index)
                    inputs[name] = copy.outputs["out"]
                    result.append(copy)
            operation = replace(operation, inputs=inputs)
        result.append(operation)
    return result


def _is_matrix_of_chosen(operation: Operation, options: CompileOptions) -> bool:
    weight = operation.inputs.get("weight")
    if weight is None or "row_index" not in operation.inputs:
        return False
    if options.exchange == "tagged" or not options.target.matrix_rows:
        return False
    x, (begin, end) = operation.inputs["x"], operation.row_range
    spec = x.spec or TensorSpec(x.name, (x.rows, x.columns), x.dtype, TensorKind.ACTIVATION)
    return is_matrix_product(spec, weight.memory, end - begin)


def _copy_of_rows(product: Operation, name: str, index: Value) -> Operation:
    """The copy that gathers the rows of an input of a product."""
    x, rows = product.inputs[name], next(iter(product.outputs.values()))
    out = Value(f"{product.label}.{name}", rows.rows, x.columns, x.dtype, rows.capacity)
    inputs = {"x": x, "row_index": index}
    if "row_count" in product.inputs:
        inputs["row_count"] = product.inputs["row_count"]
    return Operation("copy", f"{product.label}.{name}", inputs, {"out": out})


def gather_by_copy(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Let copies do the gathers that are left: of rows for the host, or for what takes no index."""
    return [_as_copy(o) if o.kind == "gather" else o for o in operations]


def _as_copy(gather: Operation) -> Operation:
    names = {"index": "row_index", "count": "row_count"}
    inputs = {names.get(name, name): value for name, value in gather.inputs.items()}
    return replace(gather, kind="copy", inputs=inputs)
