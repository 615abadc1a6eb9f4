"""Split the context of attention among workers, and merge their results."""

from __future__ import annotations

from dataclasses import replace

from megavm.instructions.attention.lower import tiling
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import tagged_spec
from megavm.vm.tensors import F32, TensorKind, TensorSpec


def split_context(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Turn an attention whose context is split into one with ``partial`` and an attention_merge.

    ``partial`` is float32 [rows, splits, heads, head_dim + 2]. If the newest keys and values are
    tagged, it is tagged too, whatever its size, because only one worker reads each of its words.
    """
    result = []
    for operation in operations:
        tiles = tiling(operation, options) if operation.kind == "attention" else None
        if tiles is None or tiles.splits == 1:
            result.append(operation)
            continue
        q = operation.inputs["q"]
        _, kv_heads, _, head_dim = operation.inputs["k_cache"].memory.shape
        shape = (q.rows, tiles.splits, q.columns // head_dim, head_dim + 2)
        name = f"partial.{'x'.join(map(str, shape))}"
        spec = TensorSpec(name, shape, F32, TensorKind.ACTIVATION)
        newest = operation.inputs.get("k_new")
        if newest is not None and newest.spec is not None and newest.spec.tagged:
            spec = tagged_spec(f"{operation.label}.{name}", shape, F32)
        partial = Value.of(spec)
        result.append(replace(operation, outputs={"partial": partial}))
        result.append(
            Operation(
                "attention_merge",
                f"{operation.label}.merge",
                {"partial": partial},
                operation.outputs,
                {"kv_heads": kv_heads, "rows_per_tile": tiles.rows},
            )
        )
    return result
