"""Chooses the next token of each sequence and appends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Final

from megavm.instructions.step_rows import row_faults
from megavm.instructions.tiles import aligned, ranges, shapes
from megavm.vm.config import MAX_STOP_TOKENS, NONE
from megavm.vm.constants import Constant, union
from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.operands import integer, present, tensor
from megavm.vm.tensors import F32, I32, Region, TensorSpec, whole


class Real(IntEnum):
    """Columns of the sequences' real sampling parameters."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


class Integer(IntEnum):
    """Columns of the sequences' integer sampling parameters."""

    ENABLED = 0  # 0: choose nothing, append nothing
    SEED_LOW = 1  # the 64-bit seed, as two words
    SEED_HIGH = 2
    TOP_K = 3  # 0: off
    PROMPT_LENGTH = 4  # tokens of the prompt
    MIN_LENGTH = 5  # stop tokens are not chosen for positions below this
    NUM_STOP = 6  # stop tokens that follow
    STOP = 7  # the first of them
    MASKED = STOP + MAX_STOP_TOKENS  # 1: choose only tokens whose bit in `allowed` is set
    BIASED = MASKED + 1  # 1: add `bias` to the logits


REAL_COLUMNS = len(Real)
INTEGER_COLUMNS = Integer.BIASED + 1
MASK_BITS = 32  # tokens in a word of `allowed`
SEGMENT_TOKENS = 256  # tokens of a segment: a warp of the GPU takes 8 a lane
SEGMENT_WORDS = 4  # words of a segment in `segments`: peak, mass, score, token
CPU_BINS = 2048  # bins of the histogram with which the CPU finds a value by its rank
BINS = 512  # the same of the GPU
CANDIDATES = 1024  # tokens among which the GPU looks in its scratch


# Faults of AdjustLogits and Sample, which look up the sequences of logit rows.
CHOICE_FAULTS: Final = {
    **row_faults("tokens", positions="tokens, but for its last column,"),
    "LOGIT_ROW": "logit_row of row {row} is {value}, the step has {target} rows",
    "NAN_LOGITS": "logits of row {row} hold NaN",
}


class Sample(Instruction):
    """tokens[s, p + 1] := choice[i] with r = logit_row[i], s = row_sequence[r], p = position of r

    for the live logit rows i of [row_begin, row_end) whose sequence has ENABLED set.

    With ``logits`` or ``peaks`` the choice is the largest logit (the lowest token among equals), whatever the
    sampling parameters. ``peaks`` holds the largest logit and its column for every tile of columns, as Matmul
    writes them; then the logits are not read.

    With ``segments`` and ``adjusted``, as AdjustLogits writes them, the choice is the token of the largest score
    among the tokens that are left. If the sequence's temperature is 0, all are. Else in this order:

    5. min-p: drop t with prob_t < MIN_P * max prob;
    6. top-k: drop t with a_t below the TOP_K-th largest of those left (all equal to it stay);
    7. top-p: drop t with a_t below the largest threshold whose tokens reach TOP_P of the probability left.

    So the choice depends only on the sequence, its seed and its logits, and not on the batch.
    """

    opcode = 10
    faults: ClassVar[Mapping[str, str]] = CHOICE_FAULTS

    logits = tensor("logits [logit rows, vocabulary]", F32, optional=True, tagged=True)
    peaks = tensor(
        "largest logit and its column [logit rows, 2 * tiles]", F32, optional=True, tagged=True
    )
    adjusted = tensor("adjusted logits [logit rows, vocabulary]", F32, optional=True, produced=True)
    segments = tensor(
        "peak, mass, score, token [logit rows, 4 * segments]", F32, optional=True, produced=True
    )
    tokens = tensor("token ids of every sequence [sequences, max length]", I32, produced=True)
    sampling_real = tensor("real parameters [sequences, REAL_COLUMNS]", F32)
    sampling_integer = tensor("integer parameters [sequences, INTEGER_COLUMNS]", I32)
    logit_row = tensor("row of the step of each logit row [logit rows]", I32)
    logit_count = tensor("number of live logit rows [1]", I32)
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    row_begin = integer("first logit row")
    row_end = integer("end of the logit rows")

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        for handle in present(self.logits, self.peaks, self.adjusted, self.segments):
            yield Region(handle, rows, (0, tensors[handle].columns))
        yield from choice_reads(tensors, self)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.tokens, rows, (0, tensors[self.tokens].columns), indexed=True)

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        rows = self.row_end - self.row_begin
        return rows * sum(
            tensors[h].columns for h in present(self.logits, self.peaks, self.segments)
        )

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        return self.flops(tensors) * F32.size

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        return aligned(8 * CPU_BINS) if self.segments != NONE else 0

    def scratch_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        # A histogram, candidates, and values that the warps exchange.
        return 8 * (BINS + CANDIDATES) + 128 if self.segments != NONE else 0

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        # The kernel waits for all that it reads of a row, chosen or not, and then stores its token.
        one = self.row_end - self.row_begin == 1 and NONE in (self.logits, self.peaks)
        return TagOrder.KEPT if one else TagOrder.BY_MACHINE

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        sampled = self.segments != NONE
        return {"any_segments": union(sampled), "any_largest": union(not sampled)}

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        sources = list(present(self.logits, self.peaks, self.adjusted, self.segments))
        if not sources or {self.adjusted, self.segments} & set(sources) not in (
            set(),
            set(sources),
        ):
            yield "it needs logits or peaks, or else adjusted and segments, and nothing else"
            return
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(tensors[h].rows for h in sources))
        )
        yield from choice_shapes(tensors, self)
        if (self.adjusted == NONE) != (self.segments == NONE):
            yield "adjusted and segments come together, and one of them is absent"
        for handle in present(self.segments):
            size = tensors[self.adjusted].columns
            yield from shapes(tensors, segments=(handle, None, segment_words(size)))
        for handle in present(self.peaks):
            if tensors[handle].columns % 2:
                yield f"peaks {tensors[handle].name} has {tensors[handle].columns} columns, not pairs"


def choice_reads(tensors: Sequence[TensorSpec], inst: Any) -> Iterator[Region]:
    """What AdjustLogits and Sample read to look up the sequences of logit rows and their parameters."""
    yield Region(inst.logit_row, (inst.row_begin, inst.row_end), (0, 1))
    for handle in (
        inst.sampling_real,
        inst.sampling_integer,
        inst.logit_count,
        inst.row_sequence,
        inst.row_position,
    ):
        yield whole(tensors, handle)


def choice_shapes(tensors: Sequence[TensorSpec], inst: Any) -> Iterator[str]:
    """Sentences about the shapes of what ``choice_reads`` reads whole."""
    sequences = tensors[inst.tokens].rows
    yield from shapes(
        tensors,
        sampling_real=(inst.sampling_real, sequences, REAL_COLUMNS),
        sampling_integer=(inst.sampling_integer, sequences, INTEGER_COLUMNS),
        logit_count=(inst.logit_count, 1, 1),
    )


def segment_words(vocabulary: int) -> int:
    """Columns of ``segments`` for a vocabulary."""
    return SEGMENT_WORDS * -(-vocabulary // SEGMENT_TOKENS)


def is_limited(reals: Sequence[float], integers: Sequence[int]) -> bool:
    """Whether a sequence may choose only some of its tokens: with a temperature, by min-p, top-k or top-p.

    ``reals``, ``integers``: its sampling parameters.
    """
    return reals[Real.TEMPERATURE] != 0 and (
        reals[Real.MIN_P] > 0 or integers[Integer.TOP_K] > 0 or reals[Real.TOP_P] < 1
    )
