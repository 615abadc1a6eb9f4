"""Store the largest logit of each tile of the LM head, so that a greedy choice reads few words."""

from __future__ import annotations

from dataclasses import replace

from megavm.instructions.matmul import Matmul
from megavm.instructions.matmul.lower import tiles_of_part
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.tensors import F32, TensorKind, TensorSpec


def keep_peaks(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give products whose largest result is chosen, and the sample operations, ``peaks``.

    ``peaks`` is float32 [rows, 2 * column tiles]: the largest result of each tile and its column.
    Ranks that gather the results gather the peaks as well.
    """
    sampled = {o.inputs.get("logits") for o in operations if o.kind == "sample"}
    peaks: dict[Value, Value] = {}
    result = []
    for operation in operations:
        if operation.kind == "matmul" and _may_have_peaks(operation.outputs["out"], sampled):
            out = operation.outputs["out"]
            tiles = {columns for columns, _ in tiles_of_part(operation, options, 0)}
            shape = (out.rows, 2 * len(tiles) * out.shares)
            name = f"peaks.{shape[0]}x{shape[1]}"
            spec = TensorSpec(name, shape, F32, TensorKind.ACTIVATION, shares=out.shares)
            peaks[out] = Value.of(spec)
            operation = replace(operation, outputs={**operation.outputs, "peaks": peaks[out]})
        elif operation.kind == "sample" and operation.inputs.get("logits") in peaks:
            value = peaks[operation.inputs["logits"]]
            operation = replace(operation, inputs={**operation.inputs, "peaks": value})
        result.append(operation)
    return result


def _may_have_peaks(out: Value, sampled: set[Value | None]) -> bool:
    return out in sampled and Matmul.may_have_peaks(out.dtype, out.columns)
