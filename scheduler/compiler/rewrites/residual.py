"""Fuse a product and the add of a residual to its result into one product with a residual."""

from __future__ import annotations

from megavm.scheduler.compiler.graph import Operation, producers_of, readers_of
from megavm.scheduler.compiler.options import CompileOptions


def add_in_product(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give a product ``residual`` in place of the add that alone reads its result."""
    readers, producers = readers_of(operations), producers_of(operations)
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "add":
            product = producers.get(operation.inputs["x"])
            if (
                product is not None
                and product.kind == "matmul"
                and len(readers[product.outputs["out"]]) == 1
            ):
                result.remove(product)
                inputs = {**product.inputs, "residual": operation.inputs["residual"]}
                operation = Operation("matmul", product.label, inputs, operation.outputs)
        result.append(operation)
    return result
