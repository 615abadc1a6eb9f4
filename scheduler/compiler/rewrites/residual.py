"""Fuse a product, or a sum over ranks, and the add of a residual to its result."""

from __future__ import annotations

import functools
from dataclasses import replace

from megavm.instructions import instruction_of
from megavm.scheduler.compiler.graph import (
    Operation,
    has_one_reader,
    producers_of,
    readers_of,
)
from megavm.scheduler.compiler.options import CompileOptions


def add_in_product(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give an operation ``residual`` in place of the add that alone reads its result."""
    readers, producers = readers_of(operations), producers_of(operations)
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "add":
            product = producers.get(operation.inputs["x"])
            if (
                product is not None
                and _takes_residual(product)
                and has_one_reader(product.outputs["out"], readers)
            ):
                result.remove(product)
                inputs = {**product.inputs, "residual": operation.inputs["residual"]}
                operation = replace(product, inputs=inputs, outputs=operation.outputs)
        result.append(operation)
    return result


def _takes_residual(operation: Operation) -> bool:
    return "residual" not in operation.inputs and _may_have_residual(operation.kind)


@functools.cache
def _may_have_residual(kind: str) -> bool:
    cls = instruction_of(kind)
    return cls is not None and any(field.name == "residual" for field in cls.fields)
