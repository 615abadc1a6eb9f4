"""Pass the newest keys and values of a decode step to attention as tagged words."""

from __future__ import annotations

from dataclasses import replace

from megavm.instructions.qkv_rope import QkvRope
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import (
    consists_of_words,
    has_whole_words,
    tagged_spec,
)
from megavm.vm.tensors import TensorSpec


def pass_newest(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give qkv_rope of decode steps, and the attention after it, ``k_new`` and ``v_new``.

    Attention then reads nothing from the caches that the same step writes. In other steps, rows of
    one sequence need each other's keys and values, which go through the caches.

    A kernel adds up a row's own token apart. With ``options.fixed_order`` the size of a rank's
    share must therefore not decide whether they are passed.
    """
    may_pass = has_whole_words if options.fixed_order else consists_of_words
    newest: dict[TensorSpec | None, dict[str, Value]] = {}  # by the key cache
    result = []
    for operation in operations:
        if operation.kind == "qkv_rope" and operation.attributes["decode"]:
            values = _newest(operation)
            if options.exchange != "barrier" and all(
                may_pass(operation, value, options) for value in values.values()
            ):
                newest[operation.outputs["k_cache"].spec] = values
                operation = replace(operation, outputs={**operation.outputs, **values})
        elif operation.kind == "attention":
            values = newest.get(operation.inputs["k_cache"].spec, {})
            operation = replace(operation, inputs={**operation.inputs, **values})
        result.append(operation)
    return result


def _newest(operation: Operation) -> dict[str, Value]:
    cache = operation.outputs["k_cache"].memory
    shape = (operation.inputs["x"].rows, QkvRope.k_cache.entry_columns(cache))
    return {
        f"{part}_new": Value.of(
            tagged_spec(
                f"{operation.label}.{part}_new", shape, operation.outputs[f"{part}_cache"].dtype
            )
        )
        for part in "kv"
    }
