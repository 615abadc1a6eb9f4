"""What a launch on the GPU leaves behind when it fails, and the sentences that this becomes.

Device code includes the enumerations as ``faults.hpp``, which codegen makes from here. Needs nothing but
Python: the C++ build runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megavm.vm.config import HEADER_WORDS, NUM_CONSUMER_WARPS, NUM_WARPS
from megavm.vm.isa import FieldKind, Instruction, TensorSpec


class FaultKind(IntEnum):
    """Why a warp stopped: the codes of cuda/launch.cuh."""

    NONE = 0
    BARRIER = 1
    TAG = 2
    SEMAPHORE = 3
    INSTRUCTION = 4
    ABORTED = 5


class SemaphoreKind(IntEnum):
    """What a semaphore stands for: the codes of cuda/semaphore.cuh."""

    PAGE_ARRIVED = 0
    PAGE_FINISHED = 1
    STAGE_RESOLVED = 2
    STAGE_READY = 3
    STAGE_STORED = 4
    STAGE_RELEASED = 5
    STAGE_HINTED = 6
    CONSUMERS = 7
    SUMS_ARRIVED = 8
    SUMS_FINISHED = 9


class Fault(IntEnum):
    """What an instruction can find wrong with its data."""

    ROW_SEQUENCE = 0
    POSITION = 1
    KV_BLOCK = 2
    TOKEN = 3
    LOGIT_ROW = 4
    NAN_LOGITS = 5
    NUM_STOP = 6
    ROW_INDEX = 7
    UNSUPPORTED = 8


# {holder}: the tensor that the value indexes. The sentences are those of the CPU's kernels.
SENTENCES = {
    Fault.ROW_SEQUENCE: "row_sequence of row {row} is {value}, {holder} has {target} sequences",
    Fault.POSITION: "row {row} is at position {value}, {holder} holds [0, {target})",
    Fault.KV_BLOCK: "block table entry [{row}, {word}] is {value}, the KV cache has {target} blocks",
    Fault.TOKEN: "token {value} at position {word} of sequence {row} is outside the vocabulary of {target}",
    Fault.LOGIT_ROW: "logit_row of row {row} is {value}, the step has {target} rows",
    Fault.NAN_LOGITS: "logits of row {row} hold NaN",
    Fault.NUM_STOP: "NUM_STOP of sequence {row} is {value}",
    Fault.ROW_INDEX: "row_index of row {row} is {value}, expected below {target}",
    Fault.UNSUPPORTED: "the kernel was not compiled for operands like these ({value}, {target})",
}

SEMAPHORES = {
    SemaphoreKind.PAGE_ARRIVED: "page {number} to arrive",
    SemaphoreKind.PAGE_FINISHED: "page {number} to be free",
    SemaphoreKind.STAGE_RESOLVED: "the instruction of stage {number}",
    SemaphoreKind.STAGE_READY: "the waits of stage {number} to end",
    SemaphoreKind.STAGE_STORED: "the results of stage {number} to be stored",
    SemaphoreKind.STAGE_RELEASED: "stage {number} to be free",
    SemaphoreKind.STAGE_HINTED: "the hint of stage {number}",
    SemaphoreKind.CONSUMERS: "the other consumers",
    SemaphoreKind.SUMS_ARRIVED: "block {number} of sums to arrive",
    SemaphoreKind.SUMS_FINISHED: "block {number} of sums to be stored",
}

ROLES = ("consumer",) * NUM_CONSUMER_WARPS + ("loader", "controller", "storer", "waiter")
assert len(ROLES) == NUM_WARPS


@dataclass(frozen=True)
class Record:
    """One warp's FaultRecord of cuda/launch.cuh."""

    worker: int
    warp: int
    kind: FaultKind
    waited: FaultKind  # of an aborted warp: the kind of wait that it was in, or NONE
    position: int
    step: int
    thing: int
    row: int
    word: int
    value: int
    target: int

    @classmethod
    def read(cls, worker: int, warp: int, words: Sequence[int]) -> Record:
        """A record from its eight words."""
        kind, waited = words[0], 0
        if kind >> 8:
            kind, waited = kind >> 8, kind & 0xFF
        return cls(worker, warp, FaultKind(kind), FaultKind(waited), *map(int, words[1:]))

    @property
    def role(self) -> str:
        return ROLES[self.warp]

    @property
    def condition(self) -> FaultKind:
        """What it waited for, whether it gave up itself or not."""
        return self.waited if self.kind is FaultKind.ABORTED else self.kind

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Records that say more about the cause come first."""
        order = (FaultKind.INSTRUCTION, FaultKind.BARRIER, FaultKind.TAG, FaultKind.SEMAPHORE)
        telling = order.index(self.condition) if self.condition in order else len(order)
        return (self.kind is FaultKind.ABORTED, telling, self.worker, self.warp)


def sentence(record: Record, inst: Instruction | None, tensors: Sequence[TensorSpec]) -> str:
    """What an instruction found wrong."""
    try:
        template = SENTENCES[Fault(record.thing)]
    except ValueError:
        template = (
            f"fault {record.thing} (row {{row}}, word {{word}}, value {{value}}, target {{target}})"
        )
    return template.format(
        row=record.row,
        word=record.word,
        value=_signed(record.value),
        target=record.target,
        holder=_holder(record, inst, tensors),
    )


def _holder(record: Record, inst: Instruction | None, tensors: Sequence[TensorSpec]) -> str:
    """Which tensor a position or a sequence was too large for."""
    if inst is None:
        return "block_table"
    if record.thing == Fault.POSITION:
        return inst.position_holder(record.target, tensors)
    return inst.sequence_holder()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def waiting_for(
    record: Record,
    inst: Instruction | None,
    tensors: Sequence[TensorSpec],
    barriers: Sequence[str],
) -> str:
    """What the warp waited for, in words; "" when it did not wait."""
    if record.condition is FaultKind.BARRIER:
        name = barriers[record.thing] if record.thing < len(barriers) else "unknown"
        return f"barrier {record.thing} ({name}): value {record.value}, target {record.target}"
    if record.condition is FaultKind.TAG:
        name = _operand(record.thing, inst, tensors)
        return (
            f"tensor {name}, row {record.row}, word {record.word}: "
            f"epoch {record.value}, wanted {record.target}"
        )
    if record.condition is FaultKind.SEMAPHORE:
        try:
            text = SEMAPHORES[SemaphoreKind(record.thing)]
        except ValueError:
            text = f"semaphore {record.thing}, {{number}}"
        return f"{text.format(number=record.row)} (phase {record.target})"
    return ""


def _operand(word: int, inst: Instruction | None, tensors: Sequence[TensorSpec]) -> str:
    """The tensor that an operand word names."""
    if inst is None or word >= len(inst.fields) or inst.fields[word].kind is not FieldKind.TENSOR:
        return f"of operand word {HEADER_WORDS + word}"
    handle = vars(inst)[inst.fields[word].name]
    return tensors[handle].name if handle < len(tensors) else f"t{handle}"
