"""Adjusts logits as sequences ask for it, and finds the best candidates among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from megavm.instructions.sample import (
    CHOICE_FAULTS,
    MASK_BITS,
    SEGMENT_TOKENS,
    SEGMENT_WORDS,
    choice_reads,
    choice_shapes,
    segment_words,
)
from megavm.instructions.step_rows import TOKEN_FAULT
from megavm.instructions.tiles import aligned, ranges, shapes
from megavm.vm.config import NUM_CONSUMER_WARPS
from megavm.vm.isa import Instruction
from megavm.vm.operands import integer, tensor
from megavm.vm.tensors import F32, I32, Region, TensorSpec, whole

SCORES = NUM_CONSUMER_WARPS  # scores that an instruction finds for a row


class AdjustLogits(Instruction):
    """adjusted[i, t] := a_t and segments[i, 4 n ..] := (peak, mass, score, token) of tokens 256 n .. 256 n + 255

    for the tokens t of [column_begin, column_end) and the live logit rows i of [row_begin, row_end) whose
    sequence s = row_sequence[logit_row[i]] has ENABLED set; p is the position of its last token. In this
    order:

    1. a_t = logits[i, t]; with BIASED, a_t += bias[s, t]; with MASKED, tokens whose bit in allowed[s] is 0 get
       -inf; stop tokens get -inf while p + 1 < MIN_LENGTH;
    2. repetition penalty: a_t / REP if a_t > 0 else a_t * REP, for t anywhere in tokens[s, 0..p];
    3. a_t -= FREQ * c_t + PRES * (c_t > 0), c_t counting t in tokens[s, PROMPT_LENGTH..p];
    4. with a temperature above 0, a_t /= temperature.

    A token's score is a_t with temperature 0, else a_t - log(-log(u_t)), u_t uniform in (0, 1) from (seed, p, t)
    as in ``uniform``. The token of the largest score is a draw from softmax(a): the Gumbel-max trick (Gumbel,
    Statistical Theory of Extreme Values, 1954).

    ``peak`` is the largest a_t of a segment and ``mass`` the sum of exp(a_t - peak), if the choice is limited
    (``sample.is_limited``), else both are 0. ``score`` and ``token``, a whole number as float32, are those of the
    largest score, the lowest token among equals, of eight sets of segments: the first segment of the instruction
    has those of the segments 0, 8, 16 ... of the instruction, the second of 1, 9, 17 ..., the eighth of
    7, 15, 23 ... All others, and sets without a score above -inf, have -inf and token 0.

    Bit t % 32 of allowed[s, t / 32] belongs to token t. On a GPU the host may write ``allowed`` while the step
    runs, if masks depend on the token of the step before: a row with MASKED waits until ``masks_written`` has
    reached ``masks_awaited``. The host writes it last, and neither is reset.

    ``adjusted`` has a meaning only where Sample reads it: if the choice is limited.
    """

    opcode = 12
    faults: ClassVar[Mapping[str, str]] = {
        **CHOICE_FAULTS,
        **TOKEN_FAULT,
        "NUM_STOP": "NUM_STOP of sequence {row} is {value}",
        "MASKS": "the host has not written mask {target} of row {row}, the last one is {value}",
    }

    logits = tensor("logits [logit rows, vocabulary]", F32, produced=True)
    adjusted = tensor(
        "adjusted logits [logit rows, vocabulary]", F32, workspace=True, produced=True
    )
    segments = tensor("peak, mass, score, token [logit rows, 4 * segments]", F32, produced=True)
    tokens = tensor("token ids of every sequence [sequences, max length]", I32, produced=True)
    sampling_real = tensor("real parameters [sequences, REAL_COLUMNS]", F32)
    sampling_integer = tensor("integer parameters [sequences, INTEGER_COLUMNS]", I32)
    logit_row = tensor("row of the step of each logit row [logit rows]", I32)
    logit_count = tensor("number of live logit rows [1]", I32)
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    allowed = tensor("a bit for each token [sequences, words]", I32)
    bias = tensor("added to the logits [sequences, vocabulary]", F32)
    masks_written = tensor("number of the last masks that are written [1]", I32)
    masks_awaited = tensor("number of the masks for this step [1]", I32)
    row_begin = integer("first logit row")
    row_end = integer("end of the logit rows")
    column_begin = integer("first token")
    column_end = integer("end of the tokens")

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.logits, rows, (self.column_begin, self.column_end))
        yield Region(self.tokens, rows, (0, tensors[self.tokens].columns), indexed=True)
        yield from choice_reads(tensors, self)
        for handle in (self.allowed, self.bias, self.masks_written, self.masks_awaited):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.adjusted, rows, (self.column_begin, self.column_end))
        first, end = self.column_begin // SEGMENT_TOKENS, -(-self.column_end // SEGMENT_TOKENS)
        yield Region(self.segments, rows, (SEGMENT_WORDS * first, SEGMENT_WORDS * end))

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        return self.flops(tensors) * F32.size

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        return (self.row_end - self.row_begin) * (self.column_end - self.column_begin)

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        # A bit for each token.
        return aligned(8 * -(-(self.column_end - self.column_begin) // 64))

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        logits, sequences = tensors[self.logits], tensors[self.tokens].rows
        size = logits.columns
        yield from ranges(
            rows=(self.row_begin, self.row_end, logits.rows),
            columns=(self.column_begin, self.column_end, size),
        )
        if self.column_begin % SEGMENT_TOKENS or (
            self.column_end % SEGMENT_TOKENS and self.column_end < size
        ):
            yield (
                f"columns [{self.column_begin}, {self.column_end}) of {size} do not begin and end at "
                f"multiples of {SEGMENT_TOKENS}"
            )
        yield from choice_shapes(tensors, self)
        yield from shapes(
            tensors,
            adjusted=(self.adjusted, None, size),
            segments=(self.segments, None, segment_words(size)),
            allowed=(self.allowed, sequences, -(-size // MASK_BITS)),
            bias=(self.bias, sequences, size),
            masks_written=(self.masks_written, 1, 1),
            masks_awaited=(self.masks_awaited, 1, 1),
        )


def uniform(seed: int, position: int, token: int) -> float:
    """The u of a score: (0, 1), 24 bits, from SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * ((position << 32 | token) + 1)) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return ((z >> 40) + 0.5) / (1 << 24)
