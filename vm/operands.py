"""How an instruction declares its operands.

This module imports neither torch nor numpy: the C++ build runs it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from enum import Enum
from typing import Generic, Self, TypeVar, overload

from megavm.vm.config import NONE
from megavm.vm.tensors import DType, TensorSpec

T = TypeVar("T", int, float)


class FieldKind(Enum):
    TENSOR = "tensor"
    INTEGER = "integer"
    REAL = "real"


ROWS = (0,)  # an index that chooses among the rows of a tensor

_SHAPE = re.compile(r"\[[^\[\]]+\]")  # finds the shape in the description of a tensor operand


class Field(Generic[T]):
    """One operand word. Values live in the instance; the class attribute describes them.

    ``default`` is the value of an operand that is left out; None: it may not be left out.

    ``shape`` is the tensor's shape in words and ``rank`` its number of dimensions; "" and None when the
    operand may have any shape.
    """

    name: str

    def __init__(
        self,
        kind: FieldKind,
        doc: str,
        dtypes: tuple[DType, ...] = (),
        *,
        optional: bool = False,
        workspace: bool = False,
        produced: bool = False,
        tagged: bool = False,
        parts: bool = False,
        gathered: bool = False,
        index: tuple[int, ...] = ROWS,
        least: float = -math.inf,
        default: int | None = None,
    ) -> None:
        self.kind = kind
        self.doc = doc
        self.dtypes = dtypes
        self.optional = optional
        self.workspace = workspace
        self.produced = produced or tagged
        self.tagged = tagged
        self.parts = parts
        self.gathered = gathered
        self.index = index
        self.least = _float32(least)
        self.default = NONE if optional else default
        match = _SHAPE.search(doc) if kind is FieldKind.TENSOR else None
        self.shape = match[0] if match else ""
        self.rank = self.shape.count(",") + 1 if match else None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__}.{self.name} was never given a value")

    def entry_columns(self, spec: TensorSpec) -> int:
        """Columns of a row of an indexed region (Region) of a tensor that is this operand."""
        return math.prod(size for i, size in enumerate(spec.shape) if i not in self.index)

    @property
    def format(self) -> str:
        """Format character of the word in Python's ``struct``."""
        return "f" if self.kind is FieldKind.REAL else "I"

    def check(self, value: object, owner: str) -> int | float:
        """The value as it will be encoded.

        Raises ValueError when it does not fit the word.
        """
        if self.kind is FieldKind.REAL:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{owner}.{self.name} is {value!r}: expected a real number")
            rounded = _float32(value)
            if not math.isfinite(rounded):
                raise ValueError(f"{owner}.{self.name} is {value!r}: not a finite float32")
            if rounded < self.least:
                raise ValueError(
                    f"{owner}.{self.name} is {value!r}: expected at least {self.least:g}"
                )
            return rounded
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{owner}.{self.name} is {value!r}: expected an integer")
        if not 0 <= value <= NONE:
            raise ValueError(f"{owner}.{self.name} is {value}: does not fit 32 bits")
        if value == NONE and not self.optional:
            raise ValueError(f"{owner}.{self.name} is NONE, but it is not optional")
        return value


def _float32(value: float) -> float:
    """The nearest float32; infinity for what is too large."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except (OverflowError, struct.error):
        return math.inf


def tensor(
    doc: str,
    *dtypes: DType,
    optional: bool = False,
    workspace: bool = False,
    produced: bool = False,
    tagged: bool = False,
    parts: bool = False,
    gathered: bool = False,
    index: tuple[int, ...] = ROWS,
) -> Field[int]:
    """Declare a tensor operand (a handle). ``dtypes`` lists what the tensor may hold.

    A shape in brackets in ``doc`` is part of the declaration: the tensor must have as many dimensions.

    Unless an operand is ``produced``, no instruction of the program may write it: kernels read it before
    the instruction's waits end, and through caches that do not see other workers' writes. With ``tagged``
    instructions may also exchange the operand as tagged words; it is then ``produced`` as well. With
    ``parts`` the tensor may consist of parts (TensorSpec). With ``gathered`` the instruction may write a
    share of the tensor on all ranks. ``index``: the dimensions that the index of its indexed regions chooses
    among (Region). The contents of a ``workspace`` are unspecified after the instruction,
    and machines may differ in them.
    """
    return Field(
        FieldKind.TENSOR,
        doc,
        dtypes,
        optional=optional,
        workspace=workspace,
        produced=produced,
        tagged=tagged,
        parts=parts,
        gathered=gathered,
        index=index,
    )


def integer(doc: str, *, default: int | None = None) -> Field[int]:
    """Declare an unsigned 32-bit operand; with a default it may be left out.

    It may be NONE only if that is its default.
    """
    return Field(FieldKind.INTEGER, doc, optional=default == NONE, default=default)


def real(doc: str, *, least: float = -math.inf) -> Field[float]:
    """Declare a float32 operand of at least ``least``."""
    return Field(FieldKind.REAL, doc, least=least)


def present(*handles: int) -> Iterator[int]:
    """The handles that are not NONE."""
    return (h for h in handles if h != NONE)
