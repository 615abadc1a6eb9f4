"""Functions that declarations of instructions share: sizes, regions, and checks of operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megavm.vm.config import NONE, UNIT_ROWS, WIDE_SQUARES
from megavm.vm.constants import Constant, union
from megavm.vm.operands import present
from megavm.vm.tensors import F32, Region, TensorSpec

SCALED = ("out_gain", "out_scaled", "out_squares")  # operands of a producer of rows to normalise
# Sums of squares of a row that a GPU loads together. Of a row that has no multiple of it, it loads them one by one.
LOADED_SQUARES = 4


def round_up(size: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-size // unit) * unit


def aligned(size: int) -> int:
    """Bytes of the CPU's working memory that an allocation of ``size`` bytes takes."""
    return round_up(size, 64)


def ranges(**limits: tuple[int, int, int]) -> Iterator[str]:
    """A sentence for every ``name=(begin, end, size)`` that is not 0 <= begin < end <= size."""
    for name, (begin, end, size) in limits.items():
        if not 0 <= begin < end <= size:
            yield f"{name} [{begin}, {end}) is empty or outside [0, {size})"


def shapes(tensors: Sequence[TensorSpec], **expected: tuple[int, int | None, int]) -> Iterator[str]:
    """A sentence for every ``name=(handle, rows, columns)`` whose tensor has another matrix shape.

    Rows None: any number (declared regions must lie inside anyway). A handle NONE is skipped.
    """
    for name, (handle, rows, columns) in expected.items():
        if handle == NONE:
            continue
        spec = tensors[handle]
        if spec.columns != columns or rows not in (None, spec.rows):
            yield _other_shape(name, spec, rows, columns)


def result_columns(tensors: Sequence[TensorSpec], **expected: tuple[int, int]) -> Iterator[str]:
    """A sentence for every result ``name=(handle, columns)`` if one rank writes another number of columns.

    A handle NONE is skipped.
    """
    for name, (handle, columns) in expected.items():
        if handle != NONE and tensors[handle].own_columns != columns:
            yield _other_shape(name, tensors[handle], None, columns)


def _other_shape(name: str, spec: TensorSpec, rows: int | None, columns: int) -> str:
    shares = f" in {spec.shares} shares" if spec.shares > 1 else ""
    expected = f"{'any' if rows is None else rows} x {columns}"
    return f"{name} is {spec.name} of {spec.rows} x {spec.columns}{shares}, expected {expected}"


def whole_groups(tensors: Sequence[TensorSpec], group: int, **operands: int) -> Iterator[str]:
    """A sentence for every operand ``name=handle`` with a part that is not whole groups of ``group`` rows.

    A handle NONE is skipped.
    """
    for name, handle in operands.items():
        for part in () if handle == NONE else tensors[handle].parts:
            if part.rows % group:
                yield (
                    f"{name} is {tensors[handle].name}, whose part {part.name} has {part.rows} rows: "
                    f"not a multiple of {group}"
                )


def squares_of(columns: int, unit: int = UNIT_ROWS) -> int:
    """Number of sums of squares of a row of ``columns`` columns, each of ``unit`` columns."""
    return -(-columns // unit)


def squares_unit(columns: int, squares: int) -> int:
    """Columns in each of ``squares`` sums of squares of a row of ``columns`` columns."""
    return WIDE_SQUARES if squares * WIDE_SQUARES == columns else UNIT_ROWS


def unit_of(tensors: Sequence[TensorSpec], inst: Any) -> int:
    """Columns in each sum of ``out_squares``."""
    if NONE in (inst.out_scaled, inst.out_squares):
        return UNIT_ROWS
    scaled, squares = tensors[inst.out_scaled], tensors[inst.out_squares]
    return squares_unit(scaled.own_columns, squares.own_columns)


def kinds(tensors: Sequence[TensorSpec], *handles: int) -> Constant:
    """A bit 1 << (is float32) + 2 * (is tagged) for each of these tensors; NONE is skipped.

    GPU kernels have no code for other kinds (ColumnPlace in cuda/tensor.cuh).
    """
    specs = [tensors[handle] for handle in present(*handles)]
    return union(sum({1 << (t.dtype is F32) + 2 * t.tagged for t in specs}))


def squares_units(tensors: Sequence[TensorSpec], inst: Any) -> Constant:
    """The constant of this name in cuda/config.cuh."""
    return union(0 if inst.out_squares == NONE else unit_of(tensors, inst))


def scaled_writes(tensors: Sequence[TensorSpec], inst: Any) -> Iterator[Region]:
    """The regions of ``out_scaled`` and ``out_squares`` that belong to the instruction's tile of out."""
    rows, columns = (inst.row_begin, inst.row_end), (inst.column_begin, inst.column_end)
    for handle in present(inst.out_scaled):
        yield Region(handle, rows, columns)
    for handle in present(inst.out_squares):
        unit = unit_of(tensors, inst)
        yield Region(handle, rows, (columns[0] // unit, squares_of(columns[1], unit)))


def check_scaled(tensors: Sequence[TensorSpec], inst: Any, size: int) -> Iterator[str]:
    """Sentences about ``out_gain``, ``out_scaled`` and ``out_squares``; out has ``size`` columns."""
    handles = {name: getattr(inst, name) for name in SCALED}
    missing = [name for name, handle in handles.items() if handle == NONE]
    if len(missing) == len(handles):
        return
    if missing:
        yield f"{missing[0]} is missing: {', '.join(handles)} go together"
        return
    yield from shapes(tensors, out_gain=(inst.out_gain, size, 1))
    unit = squares_unit(size, tensors[inst.out_squares].own_columns)
    yield from result_columns(
        tensors,
        out_scaled=(inst.out_scaled, size),
        out_squares=(inst.out_squares, squares_of(size, unit)),
    )
    begin, end = inst.column_begin, inst.column_end
    if begin % unit or (end % unit and end < size):
        yield (
            f"columns [{begin}, {end}) of {size} do not begin and end at multiples of "
            f"{unit}, which out_squares needs"
        )
