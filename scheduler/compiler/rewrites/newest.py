"""Pass the newest keys and values of a decode step to attention apart from the caches."""

from __future__ import annotations

from dataclasses import replace

from megavm.instructions.attention import Attention
from megavm.instructions.qkv_rope import QkvRope
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import (
    consists_of_words,
    has_whole_words,
    pairs_of_worker,
    tagged_spec,
)
from megavm.vm.isa import StepShape
from megavm.vm.tensors import TensorSpec


def pass_newest(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give qkv_rope of decode steps, and the attention after it, ``k_new`` and ``v_new``.

    Attention then reads nothing from the caches that the same step writes, so that a GPU fetches
    what earlier steps wrote before the step's own keys and values are there. In other steps, rows
    of one sequence need each other's keys and values, which go through the caches.

    They are tagged words if they are small and attention prefers words.
    """
    newest: dict[TensorSpec | None, dict[str, Value]] = {}  # by the key cache
    result = []
    for operation in operations:
        if operation.kind == "qkv_rope" and operation.attributes["decode"]:
            values = _newest(operation, options)
            if values and options.exchange != "barrier":
                newest[operation.outputs["k_cache"].spec] = values
                operation = replace(operation, outputs={**operation.outputs, **values})
        elif operation.kind == "attention":
            values = newest.get(operation.inputs["k_cache"].spec, {})
            operation = replace(operation, inputs={**operation.inputs, **values})
        result.append(operation)
    return result


def _newest(operation: Operation, options: CompileOptions) -> dict[str, Value]:
    """``k_new`` and ``v_new``; {} if they cannot be stored in whole words."""
    q, cache = operation.outputs["q"], operation.outputs["k_cache"].memory
    shape = (operation.inputs["x"].rows, QkvRope.k_cache.entry_columns(cache))
    may_tag = options.exchange == "tagged" or Attention.prefers_words(
        "k_new",
        ("k_new",),
        StepShape(
            rows=shape[0],
            columns=operation.inputs["x"].columns,
            ranks=q.shares,
            pairs=pairs_of_worker(shape[0], cache, options),
        ),
    )
    values = {}
    for part in "kv":
        dtype = operation.outputs[f"{part}_cache"].dtype
        name = f"{operation.label}.{part}_new"
        value = Value.of(tagged_spec(name, shape, dtype))
        if not has_whole_words(operation, value, options):
            return {}
        if not (may_tag and consists_of_words(operation, value, options)):
            value = Value(name, *shape, dtype, q.capacity)
        values[f"{part}_new"] = value
    return values
