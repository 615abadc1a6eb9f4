"""Groups instructions that declare the same: layers repeat the same tiles on tensors of the same shapes.

What an instruction declares (regions, bytes, FLOPs, constants, layouts) depends only on its operands and on
the shapes, types, kinds and parts' rows of its tensors. So one instruction of each kind answers for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.operands import FieldKind
from megavm.vm.tensors import TensorSpec

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Declare = Callable[[int, Instruction], Iterable[tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class Alike:
    """m instructions of one class, in k kinds; all members of a kind declare the same.

    ``numbers`` are their numbers in the program, ``handles`` their tensor operands (NONE: absent) and
    ``kind`` the kind of each. ``representatives`` holds one instruction of each kind, and ``rows`` its index
    among the m.
    """

    numbers: Ints  # [m]
    handles: Ints  # [m, tensor operands]
    kind: Ints  # [m]
    rows: Ints  # [k]
    representatives: tuple[Instruction, ...]  # [k]


def find_alike(words: Words, tensors: Sequence[TensorSpec]) -> Iterator[Alike]:
    """The instructions of each class in a program, grouped by what they declare.

    Opcodes and handles must be valid.
    """
    # Tensors of the same shape, type, kind and parts' rows get the same number, an absent tensor gets -1.
    known: dict[tuple[object, ...], int] = {}
    forms = (
        (t.shape, t.dtype, t.kind, t.tagged, t.shares, *(p.rows for p in t.parts)) for t in tensors
    )
    kinds = [known.setdefault(form, len(known)) for form in forms]
    kind_of_tensor = np.array([*kinds, -1], dtype=np.int64)
    for opcode, cls in instruction_set().items():
        numbers = np.flatnonzero(words[:, 0] == opcode)
        if len(numbers):
            yield _alike(cls, numbers, words, kind_of_tensor)


def accesses(words: Words, tensors: Sequence[TensorSpec], width: int, declare: Declare) -> Ints:
    """See ``accesses_of``."""
    return accesses_of(find_alike(words, tensors), width, declare)


def accesses_of(alike: Iterable[Alike], width: int, declare: Declare) -> Ints:
    """The declarations of every instruction about its tensors, in the order of the instructions.

    Calls ``declare(number, instruction)`` for one instruction of each kind. It returns tuples of ``width``
    numbers, the first of which is a tensor that the instruction names. Returns int64 [a, width + 1]:
    instruction, tensor and the other numbers.

    Raises ValueError when a tensor is not an operand.
    """
    tables = [np.empty((0, width + 1), np.int64)]
    for same in alike:
        table: list[tuple[int, ...]] = []
        lengths = []
        for row, inst in zip(same.rows, same.representatives, strict=True):
            handles = same.handles[row].tolist()
            before = len(table)
            try:
                declared = list(declare(int(same.numbers[row]), inst))
            except LookupError as error:
                raise ValueError(
                    f"what {inst.name()} accesses cannot be declared, as with an absent operand that"
                    f" present() does not leave out: {error}"
                ) from error
            for tensor, *rest in declared:
                if tensor not in handles:
                    raise ValueError(
                        f"{inst.name()} accesses tensor {tensor}, which is none of its operands"
                    )
                table.append((handles.index(tensor), *rest))
            lengths.append(len(table) - before)
        if not table:
            continue
        sizes = np.array(lengths)[same.kind]
        starts = (np.cumsum(lengths) - lengths)[same.kind]
        member = np.repeat(np.arange(len(sizes)), sizes)
        place = np.arange(len(member)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        entries = np.array(table, np.int64)[starts[member] + place]
        tensor = same.handles[member, entries[:, 0]]
        tables.append(np.column_stack([same.numbers[member], tensor, entries[:, 1:]]))
    result = np.concatenate(tables)
    return result[np.argsort(result[:, 0], kind="stable")]


def figures(
    words: Words,
    tensors: Sequence[TensorSpec],
    width: int,
    measure: Callable[[Instruction], tuple[int, ...]],
) -> Ints:
    """``width`` numbers for every instruction: int64 [n, width]. Calls ``measure`` once per kind."""
    result = np.zeros((len(words), width), np.int64)
    for same in find_alike(words, tensors):
        measured = [measure(inst) for inst in same.representatives]
        result[same.numbers] = np.array(measured)[same.kind]
    return result


def tag_orders(
    words: Words, tensors: Sequence[TensorSpec], alike: Sequence[Alike] | None = None
) -> Ints:
    """The TagOrder of every instruction, as its number: int64 [n].

    ``alike``: the result of ``find_alike``, if known.
    """
    result = np.full(len(words), TagOrder.KEPT.value, np.int64)
    if not any(t.tagged for t in tensors):
        return result
    alike = list(find_alike(words, tensors)) if alike is None else alike
    all_values = [vars(inst) for same in alike for inst in same.representatives]
    rows = [values["row_end"] - values["row_begin"] for values in all_values if "row_end" in values]
    most_rows = max(rows, default=0)
    for same in alike:
        orders = [inst.tag_order(tensors, most_rows).value for inst in same.representatives]
        result[same.numbers] = np.array(orders, np.int64)[same.kind]
    return result


def tagged_regions(words: Words, tensors: Sequence[TensorSpec]) -> Ints:
    """The regions of tagged tensors that instructions read and write, in the order of the instructions.

    Returns [r, 7]: instruction, tensor, rows, columns (two numbers each), and 1 for a write.
    """
    if not any(t.tagged for t in tensors):
        return np.empty((0, 7), np.int64)
    return accesses(
        words,
        tensors,
        6,
        lambda _, inst: (
            (r.tensor, *r.rows, *r.columns, write)
            for write, regions in ((0, inst.reads(tensors)), (1, inst.writes(tensors)))
            for r in regions
            if tensors[r.tensor].tagged
        ),
    )


def exchanged_regions(words: Words, tensors: Sequence[TensorSpec]) -> Ints:
    """``tagged_regions`` in words of four bytes, and writes of untagged tensors with shares, in elements.

    Machines wait for the former, and send writes of tensors with shares to all ranks, or to one.

    Returns [r, 8]: as tagged_regions, and the only rank that gets a write (Region.only); -1: all of them.
    """
    regions = in_words(tagged_regions(words, tensors), tensors)
    regions = np.column_stack([regions, np.full(len(regions), -1)])
    if not any(t.shares > 1 and not t.tagged for t in tensors):
        return regions
    shares = accesses(
        words,
        tensors,
        7,
        lambda _, inst: (
            (r.tensor, *r.rows, *r.columns, 1, r.only_number)
            for r in inst.writes(tensors)
            if tensors[r.tensor].shares > 1 and not tensors[r.tensor].tagged
        ),
    )
    return np.concatenate([regions, shares])


def in_words(regions: Ints, tensors: Sequence[TensorSpec]) -> Ints:
    """Regions of ``tagged_regions`` with columns counted in words of four bytes."""
    regions = regions.copy()
    per_word = np.array([4 // t.dtype.size for t in tensors], np.int64)[regions[:, 1]]
    regions[:, 4] //= per_word
    regions[:, 5] = -(-regions[:, 5] // per_word)
    return regions


def _alike(cls: type[Instruction], numbers: Ints, words: Words, kind_of_tensor: Ints) -> Alike:
    operands = words[numbers, HEADER_WORDS : HEADER_WORDS + len(cls.fields)].astype(np.int64)
    slots = [k for k, field in enumerate(cls.fields) if field.kind is FieldKind.TENSOR]
    handles = operands[:, slots]
    key = operands.copy()
    key[:, slots] = kind_of_tensor[np.where(handles == NONE, len(kind_of_tensor) - 1, handles)]
    # Operands that name the same tensor may conflict, so a kind also fixes which handles are equal.
    pattern = (handles[:, :, None] == handles[:, None, :]).argmax(axis=2) if slots else handles
    key = np.concatenate([key, pattern, np.zeros((len(key), 1), np.int64)], axis=1)
    raw, width = key.tobytes(), key.shape[1] * key.itemsize
    known: dict[bytes, int] = {}
    kind = np.array(
        [known.setdefault(raw[i : i + width], len(known)) for i in range(0, len(raw), width)],
        np.int64,
    )
    rows = np.unique(kind, return_index=True)[1]
    chosen = words[numbers[rows]].astype("<u4")
    representatives = tuple(cls.decode(chosen[i].tobytes()) for i in range(len(chosen)))
    return Alike(numbers, handles, kind, rows, representatives)
