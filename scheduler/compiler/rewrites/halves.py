"""Cut large steps of several ranks in two halves of rows: one computes while the other travels.

All operations from one exchange to the next are done for the first half, then for the second. In
the queue of a worker, an instruction that waits for results of other ranks thus stands behind work
on the other half, which fills the time until they have arrived.
"""

from __future__ import annotations

from dataclasses import replace

from megavm.instructions import instruction_of
from megavm.instructions.product import matrix_rows
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.tiling import matrix_cut


def cut_in_halves(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Replace operations by two, for half of the rows each, as ``options.halves`` says.

    Nothing is cut if ranks do not exchange results.
    """
    if options.halves == "none" or not any(map(_is_exchanged, operations)):
        return operations
    result: list[Operation] = []
    halves: tuple[list[Operation], list[Operation]] = [], []  # since the last exchange
    for operation in operations:
        middle = _middle(operation, options)
        if middle is not None:
            begin, end = operation.row_range
            halves[0].append(replace(operation, rows=(begin, middle)))
            halves[1].append(replace(operation, rows=(middle, end)))
        if middle is None or _is_exchanged(operation):
            result += [*halves[0], *halves[1]]
            halves = [], []
        if middle is None:
            result.append(operation)
    return [*result, *halves[0], *halves[1]]


def _is_exchanged(operation: Operation) -> bool:
    return any(value.shares > 1 for value in operation.outputs.values())


def _middle(operation: Operation, options: CompileOptions) -> int | None:
    """The row where the second half of an operation begins; None if it is not cut.

    The first half is a multiple of the rows that the machine multiplies at a time. Rows that an
    index chooses are not cut: they are those of the LM head, and sampling waits for all of them.
    Attention reads other rows too, and needs no cut: its tiles come in the order of the rows.
    """
    target, (_, rows) = options.target, operation.row_range
    instruction = instruction_of(operation.kind)
    if instruction is None or not instruction.row_by_row:
        return None
    if "row_index" in operation.inputs or "peaks" in operation.outputs:
        return None
    middle = -(-rows // 2)
    if target.matrix_rows:
        unit = matrix_rows(middle)
        middle = -(-middle // unit) * unit
    if rows - middle < max(1, target.min_matrix_rows):
        return None
    is_cut = options.halves == "all" or _is_preferred(operation, middle, options)
    return middle if is_cut else None


def _is_preferred(operation: Operation, middle: int, options: CompileOptions) -> bool:
    """Whether the halves of an operation take about as long as the whole.

    Those of a product of few rows do not: workers have smaller tiles, for which they read more.
    """
    target, (_, rows) = options.target, operation.row_range
    weight = operation.inputs.get("weight")
    if weight is None:
        return target.matrix_times is not None and rows - middle >= options.workers
    if target.matrix_times is None or not target.is_matrix_step(rows, weight.dtype):
        return False
    if "part_k" in operation.attributes:
        return False  # parts of K were chosen for the workers that there are

    def seconds(count: int) -> float:
        workers, unit = options.workers, options.column_unit
        return matrix_cut(count, weight.rows, weight.columns, unit, 1, workers, target)[1]

    apart = seconds(middle) + seconds(rows - middle)
    return apart <= target.matrix_times.halves * seconds(rows)
