"""Split-K: cut products of long rows into parts; workers multiply different columns of x."""

from __future__ import annotations

from dataclasses import replace

from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import tagged_spec
from megavm.vm.isa import F32


def split_k(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give products that are worth splitting ``part_k``, the columns of a part, and ``addends``.

    ``addends``, float32 [rows, (parts - 1) * columns], passes the sums of all other parts to the
    first part, which adds them up. It is tagged whatever its size, because only one worker reads
    each of its words.
    """
    return [_split(o, options) if o.kind == "matmul" else o for o in operations]


def _is_summed(operation: Operation) -> bool:
    """Whether ranks add the results up: parts would have to be added up before that."""
    out = operation.outputs["out"]
    return out.shares > 1 and out.dtype is F32 and not operation.outputs.keys() & {"out_scaled"}


def _split(operation: Operation, options: CompileOptions) -> Operation:
    weight, out = operation.inputs["weight"], operation.outputs["out"]
    width = options.part_of_k
    if not width or operation.inputs.keys() & {"x_squares", "row_index"} or _is_summed(operation):
        return operation
    target = options.target
    most = target.summed_columns * options.workers // out.own_columns
    count = max(1, min(-(-weight.columns // width), most, target.most_parts))
    step = -(-weight.columns // (count * width)) * width
    others = -(-weight.columns // step) - 1
    if others == 0:
        return operation
    spec = tagged_spec(f"{operation.label}.parts", (out.rows, others * out.own_columns), F32)
    return replace(
        operation,
        inputs={**operation.inputs, "addends": Value.of(spec)},
        attributes={**operation.attributes, "part_k": step},
    )
