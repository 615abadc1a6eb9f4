"""Fuse a gather into the products that read it: they then read their rows through an index."""

from __future__ import annotations

import functools
from dataclasses import replace

from megavm.instructions import instruction_of
from megavm.scheduler.compiler.graph import Operation, producers_of, readers_of
from megavm.scheduler.compiler.options import CompileOptions


def gather_in_product(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give products ``row_index`` and ``row_count`` in place of the gather that only they read."""
    producers, readers = producers_of(operations), readers_of(operations)
    fused = {
        o
        for o in operations
        if o.kind == "gather"
        and o.outputs["out"].spec is None
        and all(_takes_index(r.kind) for r in readers[o.outputs["out"]])
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


@functools.cache
def _takes_index(kind: str) -> bool:
    """Whether operations of this kind can read the rows of ``x`` through ``row_index``."""
    cls = instruction_of(kind)
    return cls is not None and any(field.name == "row_index" for field in cls.fields)
