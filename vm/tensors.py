"""Tensors as programs describe them, and the regions of them that instructions access.

This module imports neither torch nor numpy: the C++ build runs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class DType(Enum):
    """Element types of tensors: code in C++ and in saved programs, size in bytes."""

    F32 = (0, 4)
    BF16 = (1, 2)
    I32 = (2, 4)

    def __init__(self, code: int, size: int) -> None:
        self.code = code
        self.size = size


F32, BF16, I32 = DType.F32, DType.BF16, DType.I32


class TensorKind(Enum):
    """The writers of a tensor, and the lifetime of its contents."""

    WEIGHT = "weight"  # bound once, read-only
    INPUT = "input"  # written by the host before a launch, read-only while it runs
    STATE = "state"  # kept from launch to launch, written by instructions and by the host between launches
    ACTIVATION = "activation"  # written and read inside one step


class Part(NamedTuple):
    """A named tensor of ``rows`` rows that is a range of the rows of another one."""

    name: str
    rows: int


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor that programs address by handle (its index in the program's table).

    Instructions see every tensor as a matrix: ``rows`` is the first dimension, ``columns`` the product of
    the others. A weight may consist of ``parts``, one below the other, which the host has as tensors of
    their own; no parts: the host has the tensor as a whole.

    On a machine of several ranks, every rank has a tensor of each spec. With ``shares`` > 1 the ranks gather
    an activation: rank r writes the r-th of that many equal ranges of the columns, on all ranks, or each
    time on one of them (Region.only).
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: TensorKind
    tagged: bool = False
    parts: tuple[Part, ...] = ()
    shares: int = 1

    def __post_init__(self) -> None:
        if not self.shape or not all(isinstance(d, int) and d > 0 for d in self.shape):
            raise ValueError(
                f"tensor {self.name} has shape {self.shape}: every size must be a positive integer"
            )
        if self.tagged and self.kind is not TensorKind.ACTIVATION:
            raise ValueError(f"tensor {self.name} is tagged but {self.kind.value}, not activation")
        if self.tagged and (self.columns * self.dtype.size) % 4:
            raise ValueError(
                f"tagged tensor {self.name} has rows of {self.columns} {self.dtype.name}: "
                "a row must be whole 4-byte words"
            )
        if self.parts and self.kind is not TensorKind.WEIGHT:
            raise ValueError(f"tensor {self.name} has parts but is {self.kind.value}, not weight")
        if self.shares < 1 or self.columns % self.shares:
            raise ValueError(
                f"tensor {self.name} has {self.columns} columns: not {self.shares} equal shares"
            )
        if self.shares > 1 and self.kind is not TensorKind.ACTIVATION:
            raise ValueError(
                f"tensor {self.name} has shares but is {self.kind.value}, not activation"
            )
        if self.tagged and (self.own_columns * self.dtype.size) % 4:
            raise ValueError(
                f"tagged tensor {self.name} has shares of {self.own_columns} {self.dtype.name}: "
                "a share must be whole 4-byte words"
            )
        for part in self.parts:
            if part.rows <= 0:
                raise ValueError(f"part {part.name} of tensor {self.name} has {part.rows} rows")
        if self.parts and sum(part.rows for part in self.parts) != self.rows:
            rows = " + ".join(str(part.rows) for part in self.parts)
            raise ValueError(f"tensor {self.name} has {self.rows} rows, its parts have {rows}")

    @classmethod
    def joined(cls, name: str, specs: Sequence[TensorSpec]) -> TensorSpec:
        """The tensor whose parts are the weights ``specs``, one below the other.

        Raises ValueError when they differ in type or in the shape of a row, or are no weights.
        """
        first = specs[0]
        for spec in specs:
            if (spec.shape[1:], spec.dtype, spec.kind) != (
                first.shape[1:],
                first.dtype,
                first.kind,
            ):
                raise ValueError(f"tensor {name} cannot join {spec} and {first}")
        parts = [part for spec in specs for part in spec.parts or (Part(spec.name, spec.rows),)]
        shape = (sum(spec.rows for spec in specs), *first.shape[1:])
        return cls(name, shape, first.dtype, first.kind, parts=tuple(parts))

    @functools.cached_property
    def rows(self) -> int:
        return self.shape[0]

    @functools.cached_property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @functools.cached_property
    def own_columns(self) -> int:
        """Columns that one rank writes: all of them, or its share."""
        return self.columns // self.shares

    def share_begin(self, rank: int) -> int:
        """The first column that a rank writes."""
        return rank * self.own_columns if self.shares > 1 else 0

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of its parts; its own name if it has none."""
        return tuple(part.name for part in self.parts) or (self.name,)

    @property
    def bytes(self) -> int:
        """Bytes of the values (a tagged tensor occupies twice as much on the CPU, four times on a GPU)."""
        return math.prod(self.shape) * self.dtype.size

    @functools.cached_property
    def writable(self) -> bool:
        return self.kind in (TensorKind.STATE, TensorKind.ACTIVATION)


@dataclass(frozen=True)
class Region:
    """The rectangle ``rows`` x ``columns`` (half-open ranges) of a tensor that an instruction accesses.

    The rows of an *indexed* region are entries of an index that the host writes, not rows of the tensor:
    row r of a KV cache is the slot that the block table assigns to step row r, and row i of the token
    table belongs to the sequence of logit row i. The host guarantees that distinct entries name distinct
    places. All indexed regions of one tensor must use the same index; nothing checks that. The operand
    declares which dimensions the index chooses among (Field.index); columns count through the others: in a
    KV cache, column ``kv head * head_dim + element``.

    An *earlier* region is an indexed region that is read. The read touches only places that earlier steps
    wrote and that neither this step nor a later one writes. So it must follow the writes of the previous
    step, and it conflicts with no other write. A machine may issue it before the waits of the header are
    over, as soon as the signals of earlier steps to the barriers of these waits have come.

    If a tensor has shares, the columns of a write count from the beginning of the rank's share, and the
    columns of a read from the beginning of the tensor. Such a write reaches all ranks, or ``only`` one of them.
    """

    tensor: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    indexed: bool = False
    earlier: bool = False
    only: int | None = None

    @property
    def only_number(self) -> int:
        """``only`` in tables of numbers, where -1 stands for all ranks."""
        return -1 if self.only is None else self.only

    def may_overlap(self, other: Region) -> bool:
        """Whether both may have an element of a rank in common, counting columns from the same place."""
        if self.tensor != other.tensor:
            return False
        return self.indexed != other.indexed or all(
            a[0] < b[1] and b[0] < a[1]
            for a, b in ((self.rows, other.rows), (self.columns, other.columns))
        )

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


def whole(tensors: Sequence[TensorSpec], handle: int) -> Region:
    """The region that covers a whole tensor."""
    spec = tensors[handle]
    return Region(handle, (0, spec.rows), (0, spec.columns))
