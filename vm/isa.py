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

The other kind of dependency needs no header: a tensor declared ``tagged`` is exchanged word by word, and an
instruction that reads one waits until each word is that of the running step (vm/words.py). Both kinds are
visible in the header and in ``reads`` and ``writes``.

This module imports neither torch nor numpy: the C++ build runs it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from megavm.vm.config import HEADER_WORDS, INSTRUCTION_WORDS, MAX_WAITS, NONE, OPERAND_WORDS
from megavm.vm.operands import Field, FieldKind
from megavm.vm.tensors import Region, TensorSpec

if TYPE_CHECKING:
    from megavm.vm.constants import Constant
    from megavm.vm.layout import Layout

# Tables have an entry for each opcode up to the largest. Words that are all zero are no instruction.
OPCODES = range(1, 1024)

Encoding = bytes  # an encoded instruction; inside Instruction ``bytes`` is a method


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


@dataclass(frozen=True)
class StepShape:
    """What decides how the workers of a step exchange its activations.

    ``columns``: of the widest rows that products normalise, the hidden size of a model; 0: there are none.
    ``pairs``: of a row and a KV head that a worker attends to, at most; 0: there are none.
    """

    rows: int
    columns: int
    ranks: int
    pairs: int


class Instruction:
    """One tile of work for one worker. Subclasses declare fields, accesses and cost.

    A subclass with ``is_base=True`` is no instruction, but what several instructions have in common.

    Raises ValueError when an operand is missing, unknown, or does not fit its word, and TypeError when a wait
    is no Wait.
    """

    opcode: ClassVar[int]
    fields: ClassVar[tuple[Field[Any], ...]]
    # Names of further instructions that its GPU kernel includes, even if the program does not use them.
    companions: ClassVar[tuple[str, ...]] = ()
    # Name of the C++ template that is the GPU kernel of all instructions of this family; they share one copy
    # of its code. Empty: the instruction has a kernel of its own.
    family: ClassVar[str] = ""
    # Whether it computes a row of its results from the same row of its inputs. Then lowering may be asked for
    # a range of the rows (``Operation.row_range``).
    row_by_row: ClassVar[bool] = False
    # The optional operand with which it reads only rows of earlier steps of what is indexed (Region.earlier): its
    # GPU kernel may read them before the waits of its header are over.
    earlier_operand: ClassVar[str] = ""
    # The faults that its GPU kernel finds in data: name -> sentence. The kernel calls "ROW_INDEX"
    # ``Fault::kRowIndex``. A sentence may contain the words of the fault's record: {row}, {word}, {value}, {target}.
    faults: ClassVar[Mapping[str, str]] = {}

    waits: tuple[Wait, ...]
    signal: int | None

    def __init_subclass__(cls, *, is_base: bool = False) -> None:
        if not is_base and "opcode" not in vars(cls):
            raise TypeError(f"{cls.__name__} has no opcode")
        if not is_base and (type(cls.opcode) is not int or cls.opcode not in OPCODES):
            raise TypeError(
                f"{cls.__name__} has opcode {cls.opcode!r}: expected an integer from {OPCODES[0]} to {OPCODES[-1]}"
            )
        cls.fields = tuple(f for f in vars(cls).values() if isinstance(f, Field))
        if len(cls.fields) > OPERAND_WORDS:
            raise TypeError(
                f"{cls.__name__} declares {len(cls.fields)} operands; an instruction has {OPERAND_WORDS} words"
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
            elif field.default is not None:
                values[name] = field.default
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
            if not isinstance(wait, Wait):
                raise TypeError(
                    f"{type(self).__name__} has the wait {wait!r}: expected Wait(barrier, target)"
                )
            if type(wait.barrier) is not int or type(wait.target) is not int:
                raise ValueError(f"{type(self).__name__} has {wait}: expected integers")
            if not (0 <= wait.barrier < NONE and 0 <= wait.target <= NONE):
                raise ValueError(f"{type(self).__name__} has {wait}: does not fit the header")
        if signal is not None and type(signal) is not int:
            raise ValueError(
                f"{type(self).__name__} signals barrier {signal!r}: expected an integer"
            )
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
        """Constants that its GPU kernel is compiled for, by snake_case name; see specialisation.py."""
        return {}

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        """The layouts that its GPU kernel accepts for operands, by name, best first.

        The kernel accepts all other operands in natural order only.
        """
        return {}

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        """How its GPU kernel orders tagged words; see TagOrder.

        ``most_rows``: the most rows that an instruction of the program has.
        """
        return TagOrder.BY_MACHINE

    @classmethod
    def prefers_words(cls, operand: str, operands: Collection[str], shape: StepShape) -> bool:
        """Whether its GPU kernel has an operand sooner as tagged words than behind a barrier.

        ``operands``: the names of the operands that it has. The numbers of readers and bytes cannot decide
        it: values equal in both are exchanged differently (docs/techniques.md).
        """
        return shape.rows == 1

    @classmethod
    def stored_columns(cls, columns: Mapping[str, int], column_unit: int) -> int | None:
        """The fewest neighbouring columns of a result that it stores at once; None: those of its tile.

        A result can be tagged only if such a run is whole words. ``columns``: of the inputs, by operand.
        ``column_unit``: tiles of columns begin at multiples of it.
        """
        return None

    def fault(self, name: str, target: int, tensors: Sequence[TensorSpec]) -> str:
        """The sentence of one of its ``faults``, for sentences that depend on its operands."""
        return self.faults[name]

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
            if field.optional and value == NONE:
                continue
            if field.kind is FieldKind.TENSOR:
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
