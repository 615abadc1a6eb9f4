"""Tables for the exchange of tagged words on the GPU: the hints of every instruction, and the tagged regions
that the machine handles instead of the kernel (cuda/tagged_rows.cuh has the rule)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.vm.alike import in_words, tag_orders, tagged_regions
from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.cuda.hints import make_hints
from megavm.vm.cuda.launch import (
    AWAITS_DEAD,
    BY_MACHINE,
    EXCHANGE,
    NUM_COUNTS,
    TAGGED_REGION,
)
from megavm.vm.isa import TagOrder
from megavm.vm.operands import FieldKind
from megavm.vm.program import Program


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of a program's instructions.

    ``table``: EXCHANGE [instructions]. ``regions``: TAGGED_REGION [r]. ``signals``: uint32 [hint counters],
    how often one step signals each. ``counts``: uint32 [NUM_COUNTS], the tensors that hold numbers of live
    rows, or NONE.
    """

    table: npt.NDArray[np.void]
    regions: npt.NDArray[np.void]
    signals: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint32]

    @property
    def any_tagged_rows(self) -> bool:
        """Whether the machine handles tagged words of some instruction, of dead rows or all of them."""
        return bool(self.table["num_regions"].any())

    @property
    def any_by_machine(self) -> bool:
        """Whether the storer waits for tagged words before some instruction begins."""
        return bool(self.table["by_machine"].any())


def make_exchanges(program: Program) -> Exchanges:
    """The exchanges of a program's instructions; hint counters are numbered after its barriers."""
    declared = tagged_regions(program.words, program.tensors)
    hints, signals = make_hints(program, declared)
    table = np.zeros(len(program), EXCHANGE.dtype())
    table["hint"]["signal"], table["hint"]["wait"] = hints.T
    table["row_count"] = NONE
    counts = np.full(NUM_COUNTS, NONE, np.uint32)
    tagged = in_words(declared, program.tensors)
    if not len(tagged):
        return Exchanges(table, np.zeros(1, TAGGED_REGION.dtype()), signals, counts)
    number, tensor, *box, written = tagged.T
    ways = _ways(program)
    handles = np.unique(ways[ways[:, 1] != NONE, 1])[:NUM_COUNTS]
    counts[: len(handles)] = handles
    ways[~np.isin(ways[:, 1], handles), 1] = NONE
    if len(handles):
        counted = ways[:, 1] != NONE
        ways[counted, 1] = np.searchsorted(handles, ways[counted, 1])
    handled = ways[number, 0] != 0
    number, tensor, written = number[handled], tensor[handled], written[handled]
    regions = np.zeros(max(len(number), 1), TAGGED_REGION.dtype())
    operands = program.words[number, HEADER_WORDS:].astype(np.int64)
    is_tensor = _tensor_words(program)[number]
    regions["operand"][: len(number)] = ((operands == tensor[:, None]) & is_tensor).argmax(axis=1)
    regions["written"][: len(number)] = written
    for name, edge in zip(("row_begin", "row_end", "word_begin", "word_end"), box, strict=True):
        regions[name][: len(number)] = edge[handled]
    ends = np.searchsorted(number, np.arange(len(program)), side="right")
    begins = np.concatenate([[0], ends[:-1]])
    table["num_regions"], table["regions_begin"] = ends - begins, begins
    table["row_count"], table["row_begin"], table["row_end"] = ways[:, 1], ways[:, 2], ways[:, 3]
    by_storer = ways[number, 1] == NONE
    _check_operands(program, number[by_storer], tensor[by_storer])
    published = np.zeros(len(program), np.uint32)
    words = regions["operand"][: len(number)][written != 0]
    np.bitwise_or.at(published, number[written != 0], np.uint32(1) << words)
    by_machine = (table["num_regions"] > 0) & (ways[:, 1] == NONE)
    table["by_machine"] = np.where(by_machine, published | BY_MACHINE, 0)
    mixed = np.zeros(len(program), bool)
    mixed[_mixed(tagged)] = True
    table["by_machine"][mixed & (table["num_regions"] > 0) & ~by_machine] = AWAITS_DEAD
    return Exchanges(table, regions, signals, counts)


def _check_operands(program: Program, numbers: npt.NDArray[Any], tensors: npt.NDArray[Any]) -> None:
    """Raise ValueError when an instruction whose words the storer handles names a tagged tensor twice."""
    for number, tensor in np.unique(np.stack([numbers, tensors]), axis=1).T.tolist():
        inst = program.instructions[number]
        names = [
            f.name
            for f in inst.fields
            if f.kind is FieldKind.TENSOR and getattr(inst, f.name) == tensor
        ]
        if len(names) > 1:
            raise ValueError(
                f"instruction {number} ({inst.name()}) names the tagged tensor "
                f"{program.tensors[tensor].name} as {' and '.join(names)}: the GPU's machine takes it as one"
            )


def _ways(program: Program) -> npt.NDArray[np.int64]:
    """How the machine takes part in the exchange of every instruction: int64 [n, 4].

    Columns: 1 if the machine may handle some of its words, the tensor that holds its number of live rows
    (NONE: the machine handles all its words), its first row, and the end of its rows.
    """
    ways = np.zeros((len(program), 4), np.int64)
    ways[:, 1] = NONE
    by_machine = tag_orders(program.words, program.tensors) == TagOrder.BY_MACHINE.value
    ways[by_machine, 0] = 1
    for opcode, cls in instruction_set().items():
        names = [field.name for field in cls.fields]
        if "row_count" not in names:
            continue
        words = [names.index(name) for name in ("row_count", "row_begin", "row_end")]
        numbers = np.flatnonzero((program.words[:, 0] == opcode) & ~by_machine)
        operands = program.words[numbers][:, [HEADER_WORDS + word for word in words]]
        counted = operands[:, 0] != NONE
        ways[numbers[counted], 0] = 1
        ways[numbers[counted], 1] = operands[counted, 0]
        ways[numbers, 2:] = operands[:, 1:]
    return ways


def _mixed(regions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Instructions that read a region of several rows where some writer has only a part of the rows.

    ``regions`` has columns in words. In all other regions the words of a live row stand for those of the dead
    rows, because every writer has all rows.
    """
    several = regions[(regions[:, 6] == 0) & (regions[:, 3] - regions[:, 2] > 1)]
    written = np.unique(regions[regions[:, 6] != 0][:, [1, 2, 3]], axis=0)
    mixed = np.zeros(len(several), bool)
    for tensor, top, bottom in np.unique(several[:, [1, 2, 3]], axis=0):
        rows = written[written[:, 0] == tensor][:, 1:]
        touching = rows[(rows[:, 0] < bottom) & (top < rows[:, 1])]
        if bool(((touching[:, 0] > top) | (touching[:, 1] < bottom)).any()):
            mixed |= (several[:, 1:4] == (tensor, top, bottom)).all(axis=1)
    return np.unique(several[mixed, 0])


def _tensor_words(program: Program) -> npt.NDArray[np.bool_]:
    """Marks the operand words of each instruction that are handles: bool [n, OPERAND_WORDS]."""
    words = np.zeros((len(program), program.words.shape[1] - HEADER_WORDS), bool)
    for opcode, cls in instruction_set().items():
        are_tensors = [field.kind is FieldKind.TENSOR for field in cls.fields]
        words[program.words[:, 0] == opcode, : len(are_tensors)] = are_tensors
    return words
