"""Chooses the next token of each sequence and appends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import ClassVar

from megavm.instructions.step_rows import TOKEN_FAULT, row_faults
from megavm.instructions.tiles import aligned, ranges, shapes
from megavm.vm.config import MAX_STOP_TOKENS, NONE
from megavm.vm.constants import Constant, union
from megavm.vm.isa import Instruction
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
CPU_BINS = 2048  # bins of the histogram with which the CPU finds a value by its rank


class Sample(Instruction):
    """tokens[s, p + 1] := choose(logits[i, :]) with r = logit_row[i], s = row_sequence[r], p = position of r

    for the live logit rows i of [row_begin, row_end) whose sequence has ENABLED set. ``choose`` with
    temperature 0 takes the largest adjusted logit (the lowest token id among equals). Otherwise, in this
    order, for tokens t with logits a_t:

    1. with BIASED, a_t += bias[s, t]; with MASKED, tokens whose bit in allowed[s] is 0 get -inf; stop
       tokens get -inf while p + 1 < MIN_LENGTH;
    2. repetition penalty: a_t / REP if a_t > 0 else a_t * REP, for t anywhere in tokens[s, 0..p];
    3. a_t -= FREQ * c_t + PRES * (c_t > 0), c_t counting t in tokens[s, PROMPT_LENGTH..p];
    4. a_t /= temperature;
    5. min-p: drop t with prob_t < MIN_P * max prob;
    6. top-k: drop t with a_t below the TOP_K-th largest of those left (all equal to it stay);
    7. top-p: drop t with a_t below the largest threshold whose tokens reach TOP_P of the probability left;
    8. the token is argmax of a_t - log(-log(u_t)) over those left (Gumbel-max: the same distribution as
       sampling from softmax), u_t uniform in (0, 1) from (seed, p, t) as in ``uniform``.

    So the choice depends only on the sequence, its seed and its logits, and not on the batch.

    ``allowed``, ``bias``, ``masks_written`` and ``masks_awaited`` come together or not at all; without them
    MASKED and BIASED are not read. Bit t % 32 of allowed[s, t / 32] belongs to token t. On a GPU the host may
    write ``allowed`` while the step runs, if masks depend on the token of the step before: a choice with MASKED
    waits until ``masks_written`` has reached ``masks_awaited``. The host writes it last, and neither is reset.

    ``peaks`` holds the largest logit and its column for every tile of columns, as Matmul writes them. With
    ``peaks`` a row of temperature 0 without penalties, masked tokens or biases takes the largest pair (the
    lowest column among equals) and does not read its logits. The choice is the same.
    """

    opcode = 10
    faults: ClassVar[Mapping[str, str]] = {
        **row_faults("tokens", positions="tokens, but for its last column,"),
        **TOKEN_FAULT,
        "LOGIT_ROW": "logit_row of row {row} is {value}, the step has {target} rows",
        "NAN_LOGITS": "logits of row {row} hold NaN",
        "NUM_STOP": "NUM_STOP of sequence {row} is {value}",
        "MASKS": "the host has not written mask {target} of row {row}, the last one is {value}",
        "UNSUPPORTED": "the kernel was not compiled for operands like these ({value}, {target})",
    }

    logits = tensor("logits [logit rows, vocabulary]", F32, tagged=True)
    peaks = tensor(
        "largest logit and its column [logit rows, 2 * tiles]", F32, optional=True, tagged=True
    )
    adjusted = tensor(
        "for adjusted logits [logit rows, vocabulary]", F32, workspace=True, produced=True
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
    allowed = tensor("a bit for each token [sequences, words]", I32, optional=True)
    bias = tensor("added to the logits [sequences, vocabulary]", F32, optional=True)
    masks_written = tensor("number of the last masks that are written [1]", I32, optional=True)
    masks_awaited = tensor("number of the masks for this step [1]", I32, optional=True)

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.logits, rows, (0, tensors[self.logits].columns))
        for handle in present(self.peaks):
            yield Region(handle, rows, (0, tensors[handle].columns))
        yield Region(self.tokens, rows, (0, tensors[self.tokens].columns), indexed=True)
        yield Region(self.logit_row, rows, (0, 1))
        for handle in (
            self.sampling_real,
            self.sampling_integer,
            self.logit_count,
            self.row_sequence,
            self.row_position,
            *present(self.allowed, self.bias, self.masks_written, self.masks_awaited),
        ):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        yield Region(self.adjusted, rows, (0, tensors[self.adjusted].columns))
        yield Region(self.tokens, rows, (0, tensors[self.tokens].columns), indexed=True)

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        return (self.row_end - self.row_begin) * tensors[self.logits].columns * 4

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        return (self.row_end - self.row_begin) * tensors[self.logits].columns

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        # A bit for each token of the vocabulary, and a histogram.
        words = -(-tensors[self.logits].columns // 64)
        return aligned(8 * words) + aligned(8 * CPU_BINS)

    def scratch_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        return 8 * 1024 + 256  # a histogram of 1024 bins, and values that the warps exchange

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        return {"any_restricted": union(self.allowed != NONE)}

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        logits = tensors[self.logits]
        sequences = tensors[self.tokens].rows
        words = -(-logits.columns // MASK_BITS)
        yield from ranges(rows=(self.row_begin, self.row_end, logits.rows))
        yield from shapes(
            tensors,
            adjusted=(self.adjusted, None, logits.columns),
            sampling_real=(self.sampling_real, sequences, REAL_COLUMNS),
            sampling_integer=(self.sampling_integer, sequences, INTEGER_COLUMNS),
            logit_count=(self.logit_count, 1, 1),
            allowed=(self.allowed, sequences, words),
            bias=(self.bias, sequences, logits.columns),
            masks_written=(self.masks_written, 1, 1),
            masks_awaited=(self.masks_awaited, 1, 1),
        )
        together = (self.allowed, self.bias, self.masks_written, self.masks_awaited)
        if 0 < sum(handle == NONE for handle in together) < len(together):
            yield "allowed, bias and the numbers of masks come together, and one of them is absent"
        for handle in present(self.peaks):
            if tensors[handle].columns % 2:
                yield f"peaks {tensors[handle].name} has {tensors[handle].columns} columns, not pairs"


def uniform(seed: int, position: int, token: int) -> float:
    """The u of step 8: (0, 1), 24 bits, from SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * ((position << 32 | token) + 1)) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return ((z >> 40) + 0.5) / (1 << 24)
