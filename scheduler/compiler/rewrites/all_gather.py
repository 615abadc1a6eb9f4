"""Let the operation that computes a share of a value store it on all ranks."""

from __future__ import annotations

from dataclasses import replace

from megavm.instructions import instruction_of
from megavm.scheduler.compiler.graph import (
    Operation,
    Value,
    has_one_reader,
    producers_of,
    readers_of,
)
from megavm.scheduler.compiler.options import CompileOptions


def gather_in_producer(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Replace all_gather by a result with shares of the operation before it.

    An all_gather becomes a copy if its input has other readers, the host among them, or is made by
    an operation whose kernel stores on its own rank only. One without readers goes.
    """
    producers, readers = producers_of(operations), readers_of(operations)
    result: list[Operation] = []
    for operation in operations:
        if operation.kind != "all_gather":
            result.append(operation)
            continue
        x, out = operation.inputs["x"], operation.outputs["out"]
        if out.spec is None and not readers[out]:
            continue
        producer = producers.get(x)
        if producer in result and has_one_reader(x, readers) and _may_gather(producer, x):
            outputs = {k: out if v is x else v for k, v in producer.outputs.items()}
            result[result.index(producer)] = replace(producer, outputs=outputs)
        else:
            result.append(replace(operation, kind="copy"))
    return result


def _may_gather(producer: Operation, x: Value) -> bool:
    """Whether the operation that produces x may store it on all ranks, and does not do so yet."""
    if x.shares > 1:
        return False
    cls = instruction_of(producer.kind)
    name = next(k for k, v in producer.outputs.items() if v is x)
    return cls is not None and any(f.name == name and f.gathered for f in cls.fields)
