"""How an instruction is declared, encoded, decoded and described.

An instruction is a class in ``instructions/<name>/__init__.py``. Its fields are its encoding: everything
else (the C++ struct, the disassembler, the verifier's view of it) is derived from the declaration::

    class RmsNorm(Instruction):
        "y[r, :] := x[r, :] / sqrt(mean(x[r, :]^2) + eps) * gain"

        opcode = 3
        x = tensor("input rows", F32, BF16)
        row_begin = integer("first row")

One instruction is 32 words of 32 bits. Words 0..7 are the header that all instructions share::

    word 0        opcode
    word 1        barrier that the instruction signals once when its results are visible, or NONE
    words 2..7    up to three waits: (barrier, target) pairs, barrier NONE when unused

The operands follow in order of declaration. A wait is satisfied when the barrier's counter has reached
``epoch * signals(barrier) + target``, where ``epoch`` counts the steps that this program has already run
and ``signals(barrier)`` is how often one step signals it. Target 0 therefore waits for everything that
*earlier* steps signalled, target ``signals(barrier)`` for everything of this step.

The other kind of dependency needs no header: a tensor declared ``tagged`` is stored as words of
{32-bit value, 32-bit epoch}, and an instruction that reads one waits until each word carries the epoch of
the running step. Both kinds are visible in the header and in ``reads`` and ``writes``.

This module imports neither torch nor numpy: the C++ build runs it.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar, overload

from megavm.vm.config import (
    HEADER_WORDS,
    INSTRUCTION_WORDS,
    MAX_WAITS,
    NONE,
    OPERAND_WORDS,
)

if TYPE_CHECKING:
    from megavm.vm.layout import Layout

T = TypeVar("T", int, float)
Encoding = bytes  # an encoded instruction; inside Instruction ``bytes`` is a method


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
    """Who writes a tensor, and how long its contents live."""

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
    an activation: rank r writes the r-th of that many equal ranges of the columns, on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: TensorKind
    tagged: bool = False
    parts: tuple[Part, ...] = ()
    shares: int = 1

    def __post_init__(self) -> None:
        if not self.shape or any(d <= 0 for d in self.shape):
            raise ValueError(
                f"tensor {self.name} has shape {self.shape}: every size must be positive"
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
        """Bytes of the values (a tagged tensor occupies twice as much)."""
        return math.prod(self.shape) * self.dtype.size

    @functools.cached_property
    def entry_columns(self) -> int:
        """Columns of one row of an indexed region (see Region).

        In a KV cache [blocks, kv heads, block_size, d] that row is one slot of all KV heads: kv heads * d
        columns. In any other tensor it is a row of the tensor.
        """
        return self.shape[1] * self.shape[3] if len(self.shape) == 4 else self.columns

    @functools.cached_property
    def writable(self) -> bool:
        return self.kind in (TensorKind.STATE, TensorKind.ACTIVATION)


@dataclass(frozen=True)
class Region:
    """The rectangle ``rows`` x ``columns`` (half-open ranges) of a tensor that an instruction accesses.

    The rows of an *indexed* region are entries of an index that the host writes, not rows of the tensor:
    row r of a KV cache is the slot that the block table assigns to step row r, and row i of the token
    table belongs to the sequence of logit row i. The host guarantees that distinct entries name distinct
    places, and all indexed regions of one tensor use the same index. An indexed row has
    TensorSpec.entry_columns columns: in a KV cache, column ``kv head * head_dim + element``.

    An *earlier* region is an indexed region that is read. The read touches only places that earlier steps
    wrote and that neither this step nor a later one writes. So it must follow the writes of the previous
    step, and it conflicts with no other write.

    If a tensor has shares, the columns of a write count from the beginning of the rank's share, and the
    columns of a read from the beginning of the tensor.
    """

    tensor: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    indexed: bool = False
    earlier: bool = False

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class Wait:
    """Run only after ``barrier`` was signalled ``target`` times in this step.

    Target 0 waits for all signals of earlier steps.
    """

    barrier: int
    target: int


class TagOrder(Enum):
    """How the GPU kernel of an instruction orders its tagged words, for live rows.

    The verifier assumes two rules. First, an instruction waits for every tagged word that it declares as
    read before it stores anything that others see. Second, it has read everything before it tags a word.
    It knows the weaker orders below.
    """

    KEPT = 0  # the kernel keeps both rules
    READS_LATE = 1  # only the first: its tags prove nothing about its own reads
    WRITES_EARLY = 2  # only the second, trivially: it has no tagged results
    BY_MACHINE = 3  # the machine waits before the kernel and tags after it, in two more round trips


class Join(Enum):
    """How the values that a program's instructions declare become one constant of a kernel."""

    SAME = "same"  # all instructions of a class must agree
    LARGEST = "largest"  # maximum, within a class and over the program
    UNION = "union"  # bitwise or, within a class and over the program


@dataclass(frozen=True)
class Constant:
    """A number that a GPU kernel is compiled for; see codegen.specialisation."""

    value: int
    join: Join


def same(value: int) -> Constant:
    """A constant on which all instructions of a class must agree."""
    return Constant(int(value), Join.SAME)


def largest(value: int) -> Constant:
    """A constant whose largest value counts."""
    return Constant(value, Join.LARGEST)


def union(bits: int) -> Constant:
    """A set of bits, or a boolean: the bitwise or over all instructions."""
    return Constant(int(bits), Join.UNION)


class FieldKind(Enum):
    TENSOR = "tensor"
    INTEGER = "integer"
    REAL = "real"


_SHAPE = re.compile(r"\[[^\[\]]+\]")  # finds the shape in the description of a tensor operand


class Field(Generic[T]):
    """One operand word. Values live in the instance; the class attribute describes them.

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
        least: float = -math.inf,
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
        self.least = least
        found = _SHAPE.search(doc) if kind is FieldKind.TENSOR else None
        self.shape = found[0] if found else ""
        self.rank = self.shape.count(",") + 1 if found else None

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
            try:
                rounded = float(struct.unpack("<f", struct.pack("<f", value))[0])
            except (OverflowError, struct.error):
                rounded = math.inf
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


def tensor(
    doc: str,
    *dtypes: DType,
    optional: bool = False,
    workspace: bool = False,
    produced: bool = False,
    tagged: bool = False,
    parts: bool = False,
    gathered: bool = False,
) -> Field[int]:
    """Declare a tensor operand (a handle). ``dtypes`` lists what the tensor may hold.

    A shape in brackets in ``doc`` is part of the declaration: the tensor must have as many dimensions.

    Unless an operand is ``produced``, no instruction of the program may write it: kernels read it before
    the instruction's waits end, and through caches that do not see other workers' writes. With ``tagged``
    instructions may also exchange the operand as tagged words; it is then ``produced`` as well. With
    ``parts`` the tensor may consist of parts (TensorSpec). With ``gathered`` the instruction may write a
    share of the tensor on all ranks. The contents of a ``workspace`` are unspecified after the instruction,
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
    )


def integer(doc: str) -> Field[int]:
    """Declare an unsigned 32-bit operand."""
    return Field(FieldKind.INTEGER, doc)


def real(doc: str, *, least: float = -math.inf) -> Field[float]:
    """Declare a float32 operand of at least ``least``."""
    return Field(FieldKind.REAL, doc, least=least)


class Instruction:
    """One tile of work for one worker. Subclasses declare fields, accesses and cost.

    Raises ValueError when an operand is missing, unknown, or does not fit its word.
    """

    opcode: ClassVar[int]
    fields: ClassVar[tuple[Field[Any], ...]]
    # Names of further instructions that its GPU kernel includes, even if the program does not use them.
    companions: ClassVar[tuple[str, ...]] = ()
    # Name of the C++ template that is the GPU kernel of all instructions of this family; they share one copy
    # of its code. Empty: the instruction has a kernel of its own.
    family: ClassVar[str] = ""

    waits: tuple[Wait, ...]
    signal: int | None

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(f for f in vars(cls).values() if isinstance(f, Field))
        if len(cls.fields) > OPERAND_WORDS:
            raise TypeError(
                f"{cls.__name__} declares {len(cls.fields)} operands; {OPERAND_WORDS} words are there"
            )
        cls._format = f"<{HEADER_WORDS}I{''.join(f.format for f in cls.fields)}"
        cls._tail = b"\0" * (4 * (OPERAND_WORDS - len(cls.fields)))

    _format: ClassVar[str]
    _tail: ClassVar[bytes]

    def __init__(
        self, *, waits: Sequence[Wait] = (), signal: int | None = None, **operands: int | float
    ) -> None:
        cls, values, real_kind = type(self), self.__dict__, FieldKind.REAL
        for field in cls.fields:
            name = field.name
            if name in operands:
                value = operands.pop(name)
                # Skip the call for the usual operand: programs have hundreds of thousands.
                usual = type(value) is int and 0 <= value < NONE
                if not usual or field.kind is real_kind:
                    value = field.check(value, cls.__name__)
                values[name] = value
            elif field.optional:
                values[name] = NONE
            else:
                raise ValueError(f"{cls.__name__} needs a value for {field.name} ({field.doc})")
        if operands:
            raise ValueError(f"{cls.__name__} has no field {', '.join(sorted(operands))}")
        self._synchronise(waits, signal)

    def _synchronise(self, waits: Sequence[Wait], signal: int | None) -> None:
        if len(waits) > MAX_WAITS:
            raise ValueError(
                f"{type(self).__name__} has {len(waits)} waits; the header holds {MAX_WAITS}"
            )
        for wait in waits:
            if not (0 <= wait.barrier < NONE and 0 <= wait.target <= NONE):
                raise ValueError(f"{type(self).__name__} has {wait}: does not fit the header")
        if signal is not None and not 0 <= signal < NONE:
            raise ValueError(
                f"{type(self).__name__} signals barrier {signal}: does not fit the header"
            )
        self.waits = tuple(waits)
        self.signal = signal

    @classmethod
    def name(cls) -> str:
        """snake_case of the class: folder name, C++ namespace and mnemonic."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def formula(cls) -> str:
        """First line of the docstring: what the instruction computes."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    def with_sync(self, waits: Sequence[Wait], signal: int | None) -> Self:
        """The same work with other waits and signal."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._synchronise(waits, signal)
        return copy

    def workspaces(self) -> set[int]:
        """Handles of the tensors whose contents it leaves unspecified."""
        return {self.__dict__[f.name] for f in self.fields if f.workspace} - {NONE}

    # Declarations of an instruction. ``tensors`` is the program's table. Instructions with the same operands
    # on tensors of the same shapes, types, kinds and parts share the answers of one of them (alike.py).

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        """Every region whose contents the result depends on, weights and inputs included."""
        raise NotImplementedError(f"{type(self).__name__} does not declare what it reads")

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        """Every region it may write. It writes nothing else."""
        raise NotImplementedError(f"{type(self).__name__} does not declare what it writes")

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        """Floating-point operations when all rows of the tile are live."""
        return 0

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        """Bytes moved between the worker and global memory when all rows of the tile are live."""
        regions = (*self.reads(tensors), *self.writes(tensors))
        return sum(r.elements * tensors[r.tensor].dtype.size for r in regions)

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        """Largest number of bytes of working memory that its CPU kernel takes."""
        return 0

    def scratch_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        """Bytes of scratch that its GPU kernel takes; cuda/memory.py computes the scratch of products."""
        return 0

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        """Constants that its GPU kernel is compiled for, by snake_case name; see codegen.specialisation."""
        return {}

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        """The layouts that its GPU kernel accepts for operands, by name, best first.

        The kernel accepts all other operands in natural order only.
        """
        return {}

    def tag_order(self, tensors: Sequence[TensorSpec], single_row: bool) -> TagOrder:
        """How its GPU kernel orders tagged words; see TagOrder.

        ``single_row``: no instruction of the program has more than one row.
        """
        return TagOrder.BY_MACHINE

    @classmethod
    def prefers_words(cls, operands: Collection[str], rows: int) -> bool:
        """Whether its GPU kernel has activations sooner as tagged words than behind a barrier.

        ``operands``: the names of the operands that it has. ``rows``: of the step. The default is what
        was measured for products: words in steps of one row, barriers in others (docs/techniques.md).
        """
        return rows == 1

    def sequence_holder(self) -> str:
        """For the sentence of a fault: the operand with too few sequences when a row's is out of range."""
        return "tokens" if "tokens" in self.__dict__ else "block_table"

    def position_holder(self, limit: int, tensors: Sequence[TensorSpec]) -> str:
        """For the sentence of a fault: the operand with only ``limit`` positions when a row's is beyond."""
        return self.sequence_holder()

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        """Sentences about operands that contradict each other or the tensors they name."""
        return iter(())

    # Encoding.

    def encode(self) -> Encoding:
        """The 128 bytes of the instruction, little-endian."""
        header = self.opcode, *sync_words(self.waits, self.signal)
        values = self.__dict__
        return (
            struct.pack(self._format, *header, *[values[f.name] for f in self.fields]) + self._tail
        )

    @classmethod
    def decode(cls, data: Encoding | memoryview) -> Self:
        """Inverse of ``encode`` for an instruction known to be of this class.

        Ignores words that no field uses; ``verify`` checks them. Raises ValueError when the length or the
        opcode is wrong.
        """
        if len(data) != 4 * INSTRUCTION_WORDS:
            raise ValueError(f"an instruction has {4 * INSTRUCTION_WORDS} bytes, not {len(data)}")
        values = struct.unpack_from(cls._format, data)
        if values[0] != cls.opcode:
            raise ValueError(f"opcode {values[0]} is not {cls.__name__} ({cls.opcode})")
        pairs = [(values[i], values[i + 1]) for i in range(2, HEADER_WORDS, 2)]
        waits = [Wait(barrier, target) for barrier, target in pairs if barrier != NONE]
        self = object.__new__(cls)
        for field, value in zip(cls.fields, values[HEADER_WORDS:], strict=True):
            self.__dict__[field.name] = value
        self._synchronise(waits, None if values[1] == NONE else values[1])
        return self

    def disassemble(self, tensors: Sequence[TensorSpec] | None = None) -> str:
        """One line: mnemonic, operands (tensors by name when the table is given), waits, signal."""
        parts = []
        for field in self.fields:
            value = self.__dict__[field.name]
            if field.kind is FieldKind.TENSOR:
                if value == NONE:
                    continue
                known = tensors is not None and value < len(tensors)
                text = tensors[value].name if known and tensors is not None else f"t{value}"
            elif field.kind is FieldKind.REAL:
                text = f"{value:g}"
            else:
                text = str(value)
            parts.append(f"{field.name}={text}")
        line = f"{self.name()} {' '.join(parts)}".rstrip()
        for wait in self.waits:
            line += f" wait(b{wait.barrier} >= {wait.target})"
        if self.signal is not None:
            line += f" signal(b{self.signal})"
        return line

    def __repr__(self) -> str:
        return f"<{self.disassemble()}>"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.encode())


def sync_words(waits: Sequence[Wait], signal: int | None) -> tuple[int, ...]:
    """The header words after the opcode: the signal, then MAX_WAITS (barrier, target) pairs."""
    pairs = [word for wait in waits for word in (wait.barrier, wait.target)]
    return (
        NONE if signal is None else signal,
        *pairs,
        *(NONE, 0) * (MAX_WAITS - len(waits)),
    )


def whole(tensors: Sequence[TensorSpec], handle: int) -> Region:
    """The region that covers a whole tensor."""
    spec = tensors[handle]
    return Region(handle, (0, spec.rows), (0, spec.columns))


def present(*handles: int) -> Iterator[int]:
    """The handles that are not NONE."""
    return (h for h in handles if h != NONE)
