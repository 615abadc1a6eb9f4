"""Split-K: cut products of long rows into parts; workers multiply different columns of x."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megavm.instructions.product import group_rows, matrix_rows
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import tagged_spec
from megavm.vm.config import MIN_GROUP_ROWS
from megavm.vm.tensors import F32


def split_k(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give products that are worth splitting ``part_k``, the columns of a part, and ``addends``.

    ``addends``, float32 [rows, (parts - 1) * columns], passes the sums of all other parts to the
    last part, which adds them up. It is tagged whatever its size, because only one worker reads
    each of its words.

    In a matrix product the workers of one part would have too much to add while others wait. All
    parts are then the result, and a reduce by all workers adds them up, with what the product adds
    to its sums.

    What ranks add up is not split: its parts would have to be added up before that.

    With ``options.fixed_order`` nothing is split: the best number of parts depends on workers and
    ranks.
    """
    if options.fixed_order:
        return operations
    scattered = {o.inputs["x"] for o in operations if o.attributes.get("scatters")}
    result: list[Operation] = []
    for operation in operations:
        parts = _parts(operation, scattered, options)
        if parts is None:
            result.append(operation)
        elif options.target.is_matrix_step(operation.outputs["out"].rows, _weight(operation).dtype):
            result += _with_reduce(operation, *parts, options)
        else:
            result.append(_with_addends(operation, *parts))
    return result


def _weight(operation: Operation) -> Value:
    return operation.inputs["weight"]


def _is_summed(operation: Operation, scattered: set[Value]) -> bool:
    """Whether ranks add the results up, which they gather or scatter."""
    out = operation.outputs["out"]
    if out in scattered:
        return True
    return out.shares > 1 and out.dtype is F32 and not operation.outputs.keys() & {"out_scaled"}


def _fewest_bytes(rows: int, k: int, columns: int, options: CompileOptions) -> int:
    """The number of parts for which the workers of a matrix product read and write fewest bytes.

    With p parts all workers read rows * k * workers / p elements of x, of 2 bytes, and pass
    p * rows * columns sums of 4 bytes, which are written and read. A sum counts twice: what is
    written in one step of the exchange is read in the next one. With few rows it counts eight
    times, because x is copied beside weights, which take longer, while workers wait for sums.

    There is no use in fewer columns of x for a worker that then multiplies several groups of
    blocks with them: it reads as much of x, and there are more sums.
    """
    workers = options.workers
    most = workers // (_groups(columns, options) * -(-rows // matrix_rows(rows)))
    sums = 2 if matrix_rows(rows) >= options.target.matrix_rows else 8
    return min(round(math.sqrt(k * workers / (4 * sums * columns))), most)


def _groups(columns: int, options: CompileOptions) -> int:
    """The groups of blocks of a matrix product (instructions/product/matrix.cuh)."""
    return -(-columns // (options.target.block_rows * options.target.matrix_blocks))


def _parts(
    operation: Operation, scattered: set[Value], options: CompileOptions
) -> tuple[int, int] | None:
    """The number of parts and the columns of each; None if the operation is not split."""
    width = options.part_of_k
    if operation.kind != "matmul" or not width or _is_summed(operation, scattered):
        return None
    if operation.inputs.keys() & {"x_squares", "row_index", "addends"}:
        return None
    if "part_k" in operation.attributes:
        return None
    weight, out, target = _weight(operation), operation.outputs["out"], options.target
    fewest = 2
    if target.is_matrix_step(out.rows, weight.dtype):
        most = _fewest_bytes(out.rows, weight.columns, out.own_columns, options)
    elif target.matrix_rows and out.rows > group_rows(out.rows, weight.dtype):
        return None
    else:
        most = _block_columns(out.rows, weight, options) * options.workers // out.own_columns
        if group_rows(out.rows, weight.dtype) == MIN_GROUP_ROWS:
            fewest = target.few_parts
    unit = min(width, target.part_unit or width)
    for count in range(min(-(-weight.columns // width), most, target.most_parts), fewest - 1, -1):
        step = -(-weight.columns // (count * unit)) * unit
        parts = -(-weight.columns // step)
        if parts >= fewest and _adds_up_at_once(weight, out, (parts - 1) * step, options):
            return parts, step
    return None


def _adds_up_at_once(weight: Value, out: Value, begin: int, options: CompileOptions) -> bool:
    """Whether no worker of the last part, which begins at column ``begin`` of x, has two blocks.

    It adds up the others, unless a reduce does, and would wait for them between its blocks. A part
    has a share of the workers that is proportional to its columns (instructions/matmul/lower.py).
    """
    target = options.target
    if target.is_matrix_step(out.rows, weight.dtype):
        return True
    workers = options.workers - options.workers * begin // weight.columns
    units = -(-out.own_columns // options.column_unit)
    return -(-units // workers) * options.column_unit <= _block_columns(out.rows, weight, options)


def _block_columns(rows: int, weight: Value, options: CompileOptions) -> int:
    """The columns of the result that a worker finishes together in a step of a few rows."""
    target = options.target
    if not target.matrix_rows:
        return target.block_rows
    return target.block_rows * MIN_GROUP_ROWS // group_rows(rows, weight.dtype)


def _with_addends(operation: Operation, parts: int, step: int) -> Operation:
    out = operation.outputs["out"]
    shape = out.rows, (parts - 1) * out.own_columns
    addends = Value.of(tagged_spec(f"{operation.label}.parts", shape, F32))
    return replace(
        operation,
        inputs={**operation.inputs, "addends": addends},
        attributes={**operation.attributes, "part_k": step},
    )


def _with_reduce(
    operation: Operation, parts: int, step: int, options: CompileOptions
) -> Iterator[Operation]:
    out, label = operation.outputs["out"], operation.label
    # Programs share the sums of as many parts: there is room for the largest step that has them.
    tiles = options.workers // (_groups(out.own_columns, options) * parts)
    capacity = max(out.rows, min(out.capacity, tiles * options.target.matrix_rows))
    sums = Value(f"{label}.parts", out.rows, parts * out.own_columns, F32, capacity)
    product = {name: operation.inputs[name] for name in ("x", "weight")}
    added = {name: v for name, v in operation.inputs.items() if name not in product}
    attributes = {**operation.attributes, "part_k": step}
    yield replace(operation, inputs=product, outputs={"out": sums}, attributes=attributes)
    yield Operation("reduce", f"{label}.sum", {"parts": sums, **added}, operation.outputs)
