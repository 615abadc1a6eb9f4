"""AdjustLogits in torch."""

import math
from collections.abc import Iterator

import torch

from megavm.instructions.adjust_logits import SCORES, AdjustLogits, uniform
from megavm.instructions.sample import (
    MASK_BITS,
    SEGMENT_TOKENS,
    SEGMENT_WORDS,
    Integer,
    Real,
    Sample,
    is_limited,
)
from megavm.vm.reference import View


def execute(inst: AdjustLogits, m: View) -> None:
    begin, end = inst.column_begin, inst.column_end
    for row, sequence, position, integers, reals in choices(inst, m):
        logits = m.read(inst.logits, (row, row + 1), (begin, end))[0]
        if bool(logits.isnan().any()):
            raise IndexError(f"logits of row {row} hold NaN")
        logits = restrict(logits, inst, m, sequence, integers)
        history = m.raw(inst.tokens)[sequence, : position + 1].long()
        a = adjust(logits, begin, history, integers, reals)
        limited = is_limited(reals, integers)
        if limited:
            m.write(inst.adjusted, (row, row + 1), (begin, end), a[None])
        segments = torch.tensor(summaries(a, begin, position, integers, reals, limited))
        first = SEGMENT_WORDS * (begin // SEGMENT_TOKENS)
        m.write(
            inst.segments,
            (row, row + 1),
            (first, first + segments.numel()),
            segments.reshape(1, -1),
        )


def choices(
    inst: AdjustLogits | Sample, m: View
) -> Iterator[tuple[int, int, int, list[int], list[float]]]:
    """(row, sequence, position of its last token, integer and real parameters) of live logit rows.

    Without those of sequences that choose nothing.
    """
    for row in range(*m.live(inst.logit_count, inst.row_begin, inst.row_end)):
        step_row = int(m.raw(inst.logit_row)[row])
        sequence = int(m.raw(inst.row_sequence)[step_row])
        position = m.position(inst.row_position, step_row)
        integers = [int(v) for v in m.raw(inst.sampling_integer)[sequence]]
        reals = [float(v) for v in m.raw(inst.sampling_real)[sequence]]
        if integers[Integer.ENABLED]:
            yield row, sequence, position, integers, reals


def restrict(
    logits: torch.Tensor, inst: AdjustLogits, m: View, sequence: int, integers: list[int]
) -> torch.Tensor:
    """The logits with the sequence's bias, and -inf for tokens that are not allowed."""
    tokens = torch.arange(inst.column_begin, inst.column_end)
    if integers[Integer.BIASED]:
        logits = logits + m.raw(inst.bias)[sequence, inst.column_begin : inst.column_end]
    if integers[Integer.MASKED]:
        written, awaited = (
            int(m.raw(handle)[0]) & 0xFFFFFFFF
            for handle in (inst.masks_written, inst.masks_awaited)
        )
        if (written - awaited) & 0x80000000:
            raise IndexError(f"the host has not written mask {awaited}, the last one is {written}")
        words = m.raw(inst.allowed)[sequence]
        bits = words[tokens // MASK_BITS] >> (tokens % MASK_BITS) & 1
        logits = torch.where(bits == 1, logits, -math.inf)
    return logits


def adjust(
    logits: torch.Tensor,
    begin: int,
    history: torch.Tensor,
    integers: list[int],
    reals: list[float],
) -> torch.Tensor:
    """Stop tokens, penalties and temperature: float32 logits of the tokens from ``begin`` on.

    ``history``: the sequence's token ids.
    """
    a = logits.clone()

    def within(tokens: torch.Tensor) -> torch.Tensor:
        return (begin <= tokens) & (tokens < begin + len(a))

    if len(history) < integers[Integer.MIN_LENGTH]:
        stops = torch.tensor(
            integers[Integer.STOP : Integer.STOP + integers[Integer.NUM_STOP]], dtype=torch.long
        )
        a[stops[within(stops)] - begin] = -math.inf
    seen = torch.unique(history)
    seen = seen[within(seen)] - begin
    penalty = reals[Real.REPETITION_PENALTY]
    a[seen] = torch.where(a[seen] > 0, a[seen] / penalty, a[seen] * penalty)
    produced, counts = torch.unique(history[integers[Integer.PROMPT_LENGTH] :], return_counts=True)
    produced, counts = produced[within(produced)] - begin, counts[within(produced)]
    frequency, presence = reals[Real.FREQUENCY_PENALTY], reals[Real.PRESENCE_PENALTY]
    a[produced] -= frequency * counts + presence
    temperature = reals[Real.TEMPERATURE]
    return a / temperature if temperature else a


def scores(
    a: torch.Tensor, tokens: torch.Tensor, position: int, integers: list[int]
) -> torch.Tensor:
    """The float32 scores of adjusted logits of a sequence that has a temperature."""
    seed = (integers[Integer.SEED_LOW] & 0xFFFFFFFF) | (
        (integers[Integer.SEED_HIGH] & 0xFFFFFFFF) << 32
    )
    u = torch.tensor([uniform(seed, position, t) for t in tokens.tolist()], dtype=torch.float64)
    return a + (-torch.log(-torch.log(u))).float()


def summaries(
    a: torch.Tensor,
    begin: int,
    position: int,
    integers: list[int],
    reals: list[float],
    limited: bool,
) -> list[list[float]]:
    """Peak, mass, score and token of each segment of the adjusted logits from token ``begin`` on."""
    tokens = torch.arange(begin, begin + len(a))
    ranked = scores(a, tokens, position, integers) if reals[Real.TEMPERATURE] else a
    segments, best = [], [(-math.inf, 0)] * SCORES
    for number, first in enumerate(range(0, len(a), SEGMENT_TOKENS)):
        within = slice(first, first + SEGMENT_TOKENS)
        peak, mass = a[within].max(), torch.tensor(0.0)
        if peak > -math.inf:
            mass = torch.exp(a[within] - peak).sum()
        segments.append([float(peak), float(mass)] if limited else [0.0, 0.0])
        score = ranked[within].max()
        if score > best[number % SCORES][0]:
            token = int(tokens[within][ranked[within] == score].min())
            best[number % SCORES] = (float(score), token)
    best += [(-math.inf, 0)] * (len(segments) - SCORES)
    return [[*segment, *candidate] for segment, candidate in zip(segments, best, strict=False)]
