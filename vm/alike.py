"""Instructions that declare the same: layers repeat the same tiles on tensors of the same shapes.

What an instruction declares (regions, bytes, FLOPs, constants) depends on its operands and on the shapes of
its tensors alone, so that one of each kind is asked and the answer is spread over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.isa import FieldKind, Instruction, TensorSpec

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Alike:
    """m instructions of one class, in k kinds of which all members declare the same.

    ``numbers`` are theirs in the program, ``handles`` their tensor operands (NONE: absent), ``kind`` says
    which are alike, ``representatives`` has one instruction of each kind, and ``rows`` says which.
    """

    cls: type[Instruction]
    numbers: Ints  # [m]
    handles: Ints  # [m, tensor operands]
    kind: Ints  # [m]
    rows: Ints  # [k]
    representatives: tuple[Instruction, ...]  # [k]

    def accesses(self, declared: Sequence[Sequence[tuple[int, ...]]], width: int) -> Ints:
        """What the representatives say of tensors, for every instruction.

        ``declared[kind]`` are any number of tuples of ``width`` numbers, of which the first is a tensor that
        the representative names. Returns [a, width + 1]: instruction, its own tensor, and the rest.

        Raises ValueError when a tensor is none of the operands.
        """
        table = []
        for row, inst, entries in zip(self.rows, self.representatives, declared, strict=True):
            handles = self.handles[row].tolist()
            for tensor, *rest in entries:
                if tensor not in handles:
                    raise ValueError(
                        f"{inst.name()} accesses tensor {tensor}, which is none of its operands"
                    )
                table.append((handles.index(tensor), *rest))
        found = np.array(table, np.int64).reshape(-1, width)
        lengths = np.array([len(entries) for entries in declared], np.int64)
        starts = np.cumsum(lengths) - lengths
        sizes = lengths[self.kind]
        row = np.repeat(np.arange(len(self.numbers)), sizes)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        found = found[starts[self.kind[row]] + offset]
        result = np.empty((len(row), width + 1), np.int64)
        result[:, 0] = self.numbers[row]
        if len(row):
            result[:, 1] = self.handles[row, found[:, 0]]
        result[:, 2:] = found[:, 1:]
        return result


def find_alike(words: Words, tensors: Sequence[TensorSpec]) -> Iterator[Alike]:
    """The instructions of each class in a program, and which of them declare the same.

    Opcodes and handles must be valid.
    """
    # Equal numbers for tensors of the same shape, type and kind, and -1 for none.
    known: dict[tuple[object, ...], int] = {}
    kinds = [known.setdefault((t.shape, t.dtype, t.kind, t.tagged), len(known)) for t in tensors]
    kind_of_tensor = np.array([*kinds, -1], dtype=np.int64)
    for opcode, cls in instruction_set().items():
        numbers = np.flatnonzero(words[:, 0] == opcode)
        if len(numbers):
            yield _alike(cls, numbers, words, kind_of_tensor)


def tagged_regions(words: Words, tensors: Sequence[TensorSpec], write: bool) -> Ints:
    """What instructions read, or ``write``, of tagged tensors, by instruction.

    Returns [r, 6]: instruction, tensor, rows, columns.
    """
    found = [np.empty((0, 6), np.int64)]
    for same in find_alike(words, tensors):
        declared = [
            [
                (r.tensor, *r.rows, *r.columns)
                for r in (inst.writes if write else inst.reads)(tensors)
                if tensors[r.tensor].tagged
            ]
            for inst in same.representatives
        ]
        found.append(same.accesses(declared, 5))
    rows = np.concatenate(found)
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _alike(cls: type[Instruction], numbers: Ints, words: Words, kind_of_tensor: Ints) -> Alike:
    operands = words[numbers, HEADER_WORDS : HEADER_WORDS + len(cls.fields)].astype(np.int64)
    slots = [k for k, field in enumerate(cls.fields) if field.kind is FieldKind.TENSOR]
    handles = operands[:, slots]
    key = operands.copy()
    key[:, slots] = kind_of_tensor[np.where(handles == NONE, len(kind_of_tensor) - 1, handles)]
    # Operands that name the same tensor may conflict with each other: equal handles, equal patterns.
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
    return Alike(cls, numbers, handles, kind, rows, representatives)
