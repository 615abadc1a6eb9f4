"""Enumerations and structs that Python and C++ share.

codegen.py writes the C++ of a declaration; numpy and ctypes types are derived from the same declaration. The
C++ build imports this module, so only the methods that return such types import numpy or ctypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import ctypes

    import numpy as np

U32: Final = "unsigned int"
U64: Final = "unsigned long long"
I64: Final = "std::int64_t"
_FORMATS = {U32: "<u4", U64: "<u8", I64: "<i8"}  # numpy's names
_ADDRESS = "<u8"


class Code(IntEnum):
    """An enumeration that C++ shares, with a description of each code::

    class Kind(Code):
        FIRST = 0, "what it means"
    """

    doc: str

    def __new__(cls, code: int, doc: str = "") -> Self:
        member = int.__new__(cls, code)
        member._value_ = code
        member.doc = doc
        return member


@dataclass(frozen=True)
class Member:
    """A member of a struct. ``type``: U32, U64, I64, another struct, or "T*" for an address."""

    name: str
    type: str | Struct
    doc: str = ""

    @property
    def is_address(self) -> bool:
        return isinstance(self.type, str) and self.type.endswith("*")

    @property
    def size(self) -> int:
        if isinstance(self.type, Struct):
            return self.type.size
        return int((_ADDRESS if self.is_address else _FORMATS[self.type])[2:])

    @property
    def alignment(self) -> int:
        return self.type.alignment if isinstance(self.type, Struct) else self.size


@dataclass(frozen=True)
class Struct:
    """A C++ struct. ``aligned`` is its ``alignas``; 0: the alignment of its members.

    Raises ValueError when C++ would leave a hole before a member.
    """

    name: str
    doc: str
    members: tuple[Member, ...]
    aligned: int = 0

    def __post_init__(self) -> None:
        for member, offset in self.offsets():
            if offset % member.alignment:
                raise ValueError(f"{self.name}.{member.name} is at {offset}: C++ leaves a hole")

    def offsets(self) -> list[tuple[Member, int]]:
        """The members and their offsets in bytes."""
        ends = [0]
        for member in self.members:
            ends.append(ends[-1] + member.size)
        return list(zip(self.members, ends, strict=False))

    @property
    def alignment(self) -> int:
        return max(self.aligned, *(member.alignment for member in self.members))

    @property
    def size(self) -> int:
        """Bytes, as ``sizeof`` counts them."""
        end = sum(member.size for member in self.members)
        return -(-end // self.alignment) * self.alignment

    def index(self, name: str) -> int:
        """The index of a member among the members."""
        return [member.name for member in self.members].index(name)

    def dtype(self) -> np.dtype[np.void]:
        """The numpy dtype of the struct."""
        import numpy as np

        formats: list[Any] = [
            m.type.dtype()
            if isinstance(m.type, Struct)
            else _ADDRESS
            if m.is_address
            else _FORMATS[m.type]
            for m in self.members
        ]
        return np.dtype(
            {
                "names": [member.name for member in self.members],
                "formats": formats,
                "offsets": [offset for _, offset in self.offsets()],
                "itemsize": self.size,
            }
        )

    def ctypes_class(self) -> type[ctypes.Structure]:
        """The ctypes class of the struct, in which unknown members cannot be set.

        For structs of numbers and addresses only. Raises ValueError when its size differs from C++.
        """
        import ctypes

        kinds = {U32: ctypes.c_uint32, U64: ctypes.c_uint64, I64: ctypes.c_int64}
        fields = [(m.name, kinds[U64 if m.is_address else str(m.type)]) for m in self.members]
        result = type(self.name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
        if ctypes.sizeof(result) != self.size:
            raise ValueError(
                f"{self.name} has {self.size} bytes in C++, {ctypes.sizeof(result)} here"
            )
        return result
