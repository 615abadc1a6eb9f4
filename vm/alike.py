"""Instructions that declare the same: layers repeat the same tiles on tensors of the same shapes.

What an instruction declares (regions, bytes, FLOPs) depends on its operands and on the shapes of its tensors
alone, so that one of each kind is asked and the answer is spread over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.isa import FieldKind, Instruction, TensorSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Alike:
    """m instructions of one class, in k kinds of which all members declare the same.

    ``numbers`` are theirs in the program, ``handles`` their tensor operands (NONE: absent), ``kind`` says
    which are alike, ``representatives`` names one row of each kind.
    """

    numbers: Ints  # [m]
    handles: Ints  # [m, tensor operands]
    kind: Ints  # [m]
    representatives: Ints  # [k]

    def spread(
        self, declared: Sequence[Sequence[tuple[int, ...]]], width: int
    ) -> tuple[Ints, Ints]:
        """What the representatives declare, for every instruction.

        ``declared[kind]`` are any number of tuples of ``width`` numbers. Returns the row of the
        instruction [r] and the tuple [r, width] of each.
        """
        lengths = np.array([len(d) for d in declared], np.int64)
        table = np.array([entry for d in declared for entry in d], np.int64).reshape(-1, width)
        starts = np.cumsum(lengths) - lengths
        sizes = lengths[self.kind]
        row = np.repeat(np.arange(len(self.numbers)), sizes)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return row, table[starts[self.kind[row]] + offset]


def tensor_kinds(tensors: Sequence[TensorSpec]) -> Ints:
    """Equal numbers for tensors of the same shape, type and kind, and -1 for none: int64 [tensors + 1]."""
    kinds: dict[tuple[object, ...], int] = {}
    numbers = [kinds.setdefault((t.shape, t.dtype, t.kind, t.tagged), len(kinds)) for t in tensors]
    return np.array([*numbers, -1], dtype=np.int64)


def alike(
    cls: type[Instruction],
    numbers: Ints,
    words: npt.NDArray[np.uint32],
    kind_of_tensor: Ints,
) -> Alike:
    """Find which of the instructions ``numbers``, all of class ``cls``, declare the same.

    ``words`` are those of the program, ``kind_of_tensor`` is what ``tensor_kinds`` gives.
    """
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
    return Alike(numbers, handles, kind, np.unique(kind, return_index=True)[1])
