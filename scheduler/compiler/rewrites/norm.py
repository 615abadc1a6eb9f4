"""Fuse RMSNorm into the operations around it.

The product or embed that produces the rows also stores the rows times the gain, and sums of their
squares. The products that read the rows divide by the root of the mean square. If ranks gather the
rows, each stores its share of both on all ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from megavm.instructions import instruction_of
from megavm.instructions.product import is_matrix_product
from megavm.instructions.tiles import LOADED_SQUARES, squares_of
from megavm.scheduler.compiler.graph import Operation, Value, producers_of, readers_of
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.config import UNIT_ROWS, WIDE_SQUARES
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec


def norm_in_neighbours(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Replace rms_norm by ``out_scaled`` and ``out_squares`` of its producer, and ``x_squares``."""
    if not options.fuse_norm:
        return operations
    producers, readers = producers_of(operations), readers_of(operations)
    norms: dict[Operation, Operation] = {}  # by the operation that produces the norm's input
    scaled: dict[Value, tuple[Operation, Value, Value]] = {}  # by the norm's result
    for norm in operations:
        maker = producers.get(norm.inputs["x"]) if norm.kind == "rms_norm" else None
        if maker is not None and maker.kind == "all_gather":
            maker = producers.get(maker.inputs["x"])
        if maker is None or not _makes_squares(maker.kind) or maker in norms:
            continue
        x, out = norm.inputs["x"], norm.outputs["out"]
        if norm.inputs["gain"].rows != x.own_columns:
            continue
        dtype = _multiplied_with(out, readers[out])
        if dtype is None or out.spec is not None:
            continue
        norms[maker] = norm
        unit = _columns_of_a_sum(maker, x, options)
        columns = x.shares * squares_of(x.own_columns, unit)
        squares = Value(f"{out.name}.squares", x.rows, columns, F32, x.capacity, shares=x.shares)
        scaled[out] = norm, replace(out, dtype=dtype, shares=x.shares), squares
    result: list[Operation] = []
    for operation in operations:
        if operation.kind == "rms_norm" and operation.outputs["out"] in scaled:
            continue
        if operation in norms:
            norm = norms[operation]
            _, out, squares = scaled[norm.outputs["out"]]
            operation = replace(
                operation,
                inputs={**operation.inputs, "out_gain": norm.inputs["gain"]},
                outputs={**operation.outputs, "out_scaled": out, "out_squares": squares},
            )
        if operation.inputs.get("x") in scaled:
            norm, out, squares = scaled[operation.inputs["x"]]
            operation = replace(
                operation,
                inputs={**operation.inputs, "x": out, "x_squares": squares},
                attributes={**operation.attributes, **norm.attributes},
            )
        result.append(operation)
    return result


def _columns_of_a_sum(maker: Operation, x: Value, options: CompileOptions) -> int:
    """Columns of x in each sum of squares (``Target.wide_squares_rows``)."""
    target = options.target
    if x.rows < target.wide_squares_rows or not target.is_matrix_step(x.rows, BF16):
        return UNIT_ROWS
    # A row whose sums are not loaded together takes 1.5 us of each worker.
    if x.own_columns % WIDE_SQUARES or x.columns // WIDE_SQUARES % LOADED_SQUARES:
        return UNIT_ROWS
    # Other numbers of ranks may have no multiple, and a product whose input is tagged is no matrix.
    if options.fixed_order or options.exchange == "tagged":
        return UNIT_ROWS
    if "weight" in maker.inputs:
        factor, weight = maker.inputs["x"], maker.inputs["weight"].memory
        shape = factor.rows, factor.columns
        spec = factor.spec or TensorSpec(factor.name, shape, factor.dtype, TensorKind.ACTIVATION)
        if not is_matrix_product(spec, weight, x.rows):
            return UNIT_ROWS
    return WIDE_SQUARES


def _multiplied_with(x: Value, readers: list[Operation]) -> DType | None:
    """The one type of the weights that x is multiplied with.

    None if the types differ, or if a reader does anything else with x.
    """
    types = set()
    for reader in readers:
        if not _takes_squares(reader.kind) or "x_squares" in reader.inputs:
            return None
        if [name for name, value in reader.inputs.items() if value is x] != ["x"]:
            return None
        types.add(reader.inputs["weight"].dtype)
    return types.pop() if len(types) == 1 else None


@functools.cache
def _makes_squares(kind: str) -> bool:
    """Whether operations of this kind make rows that they can prepare for a normalisation."""
    cls = instruction_of(kind)
    return cls is not None and any(field.name == "out_squares" for field in cls.fields)


@functools.cache
def _takes_squares(kind: str) -> bool:
    """Whether operations of this kind are products of an ``x`` that ``x_squares`` may normalise."""
    cls = instruction_of(kind)
    return cls is not None and any(field.name == "x_squares" for field in cls.fields)
