"""Lowering: cut every operation into instructions, each a tile that fits a worker.

The cut is defined beside the instruction: ``lower(operation, context)`` in
``instructions/<kind>/lower.py``. Lowered instructions have no waits and signals yet; barriers.py
derives those from the regions that the instructions declare.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megavm.instructions import instruction_of
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.kinds import RESULT
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import Storage
from megavm.scheduler.compiler.tiling import Lowering
from megavm.vm.config import NONE
from megavm.vm.coverage import first_uncovered
from megavm.vm.isa import Instruction
from megavm.vm.operands import FieldKind
from megavm.vm.tensors import TensorSpec


@dataclass(frozen=True)
class Tiles:
    """The instructions of one operation."""

    label: str
    instructions: tuple[Instruction, ...]


def lower(
    operations: Sequence[Operation],
    storage: Storage,
    row_count: TensorSpec | None,
    options: CompileOptions,
) -> list[Tiles]:
    """The instructions of every operation, in topological order.

    Raises ValueError for an operation that no instruction executes, for one with an operand or
    attribute that its instructions do not get, and for a result with columns that none writes.
    """
    handle = NONE if row_count is None else storage.add(row_count)
    context = Lowering(storage, options, handle)
    return [Tiles(o.label, _instructions(o, context)) for o in operations]


def _instructions(operation: Operation, context: Lowering) -> tuple[Instruction, ...]:
    result = tuple(_lowering(operation)(operation, context))
    if not result:
        raise ValueError(
            f"{operation.label}: instructions/{operation.kind}/lower.py makes no instruction"
        )
    _check_operands(operation, result, context.storage)
    _check_result(operation, result, context.storage)
    return result


def _check_operands(
    operation: Operation, instructions: Sequence[Instruction], storage: Storage
) -> None:
    """Raise ValueError when lowering left out an operand or attribute: the result would be wrong.

    Every value is that operand of an instruction. An attribute with the name of an operand is that
    operand of all of them; others say how to lower.
    """
    fields = {field.name: field for field in instructions[0].fields}
    sentence = "{}: {} is {}, but instructions/{}/lower.py does not pass it on"
    for name, value in (*operation.inputs.items(), *operation.outputs.items()):
        handle = storage.handle(value)
        if name not in fields or all(getattr(i, name) != handle for i in instructions):
            raise ValueError(sentence.format(operation.label, name, value.name, operation.kind))
    for name, number in operation.attributes.items():
        if name in fields:
            if fields[name].kind is FieldKind.REAL:
                number = fields[name].check(number, operation.label)  # as it is encoded
            if any(getattr(i, name) != number for i in instructions):
                raise ValueError(sentence.format(operation.label, name, number, operation.kind))


def _check_result(
    operation: Operation, instructions: Sequence[Instruction], storage: Storage
) -> None:
    """Raise ValueError when no instruction writes a part of the result's rows and columns."""
    result = operation.outputs.get(RESULT)
    if result is None:
        return
    handle, tensors = storage.handle(result), storage.tensors
    regions = [r for i in instructions for r in i.writes(tensors) if r.tensor == handle]
    written = max((r.columns[1] for r in regions), default=0)
    if written < result.own_columns:
        raise ValueError(
            f"{operation.label}: {result.name} has {result.own_columns} columns, but"
            f" {operation.kind} writes {written} of them"
        )
    if any(region.indexed for region in regions):
        return
    missing = first_uncovered(regions, operation.row_range, (0, result.own_columns))
    if missing is not None:
        raise ValueError(
            f"{operation.label}: {operation.kind} does not write row {missing[0]} column"
            f" {missing[1]} of {result.name}"
        )


def _lowering(operation: Operation) -> Callable[[Operation, Lowering], Iterator[Instruction]]:
    lowering = _lowering_of(operation.kind)
    if lowering is None:
        raise ValueError(f"{operation.label}: no instruction does {operation.kind}")
    return lowering


@functools.cache
def _lowering_of(kind: str) -> Callable[[Operation, Lowering], Iterator[Instruction]] | None:
    """``lower`` of instructions/<kind>/lower.py; None where that file does not exist."""
    if instruction_of(kind) is None:
        return None
    name = f"megavm.instructions.{kind}.lower"
    if importlib.util.find_spec(name) is None:
        return None
    function: Callable[[Operation, Lowering], Iterator[Instruction]]
    function = importlib.import_module(name).lower
    return function
