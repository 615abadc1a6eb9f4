"""Sample in torch."""

import math

import torch

from megavm.instructions.sample import MASK_BITS, Integer, Real, Sample, uniform
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: Sample, m: View) -> None:
    for row in range(*m.live(inst.logit_count, inst.row_begin, inst.row_end)):
        step_row = int(m.raw(inst.logit_row)[row])
        sequence = int(m.raw(inst.row_sequence)[step_row])
        position = m.position(inst.row_position, step_row)
        integers = [int(v) for v in m.raw(inst.sampling_integer)[sequence]]
        reals = [float(v) for v in m.raw(inst.sampling_real)[sequence]]
        if not integers[Integer.ENABLED]:
            continue
        restricted = inst.allowed != NONE and (integers[Integer.MASKED] or integers[Integer.BIASED])
        if inst.peaks != NONE and not restricted and takes_largest(position, integers, reals):
            peaks, columns = m.read(inst.peaks, (row, row + 1)).view(-1, 2).T
            if bool(peaks.isnan().any()):
                raise IndexError(f"logits of row {row} hold NaN")
            m.raw(inst.tokens)[sequence, position + 1] = int(columns[peaks == peaks.max()].min())
            continue
        logits = m.read(inst.logits, (row, row + 1))[0]
        if bool(logits.isnan().any()):
            raise IndexError(f"logits of row {row} hold NaN")
        if restricted:
            logits = restrict(logits, inst, m, sequence, integers)
        tokens = m.raw(inst.tokens)[sequence]
        history = tokens[: position + 1].long()
        tokens[position + 1] = choose(logits, history, integers, reals)


def restrict(
    logits: torch.Tensor, inst: Sample, m: View, sequence: int, integers: list[int]
) -> torch.Tensor:
    """The logits with the sequence's bias, and -inf for tokens that are not allowed."""
    if integers[Integer.BIASED]:
        logits = logits + m.raw(inst.bias)[sequence]
    if integers[Integer.MASKED]:
        written, awaited = (
            int(m.raw(handle)[0]) & 0xFFFFFFFF
            for handle in (inst.masks_written, inst.masks_awaited)
        )
        if (written - awaited) & 0x80000000:
            raise IndexError(f"the host has not written mask {awaited}, the last one is {written}")
        words = m.raw(inst.allowed)[sequence]
        token = torch.arange(len(logits))
        bits = words[token // MASK_BITS] >> (token % MASK_BITS) & 1
        logits = torch.where(bits == 1, logits, -math.inf)
    return logits


def takes_largest(position: int, integers: list[int], reals: list[float]) -> bool:
    """Whether the choice is the largest unadjusted logit."""
    masks = position + 1 < integers[Integer.MIN_LENGTH] and integers[Integer.NUM_STOP] > 0
    neutral = {
        Real.TEMPERATURE: 0.0,
        Real.REPETITION_PENALTY: 1.0,
        Real.PRESENCE_PENALTY: 0.0,
        Real.FREQUENCY_PENALTY: 0.0,
    }
    return not masks and all(reals[column] == value for column, value in neutral.items())


def choose(
    logits: torch.Tensor, history: torch.Tensor, integers: list[int], reals: list[float]
) -> int:
    """The next token for float32 logits [vocabulary] after the token ids ``history``."""
    a = logits.clone()
    position = len(history) - 1
    if position + 1 < integers[Integer.MIN_LENGTH]:
        stops = integers[Integer.STOP : Integer.STOP + integers[Integer.NUM_STOP]]
        a[[t for t in stops if t < len(a)]] = -math.inf
    seen = torch.unique(history)
    penalty = reals[Real.REPETITION_PENALTY]
    a[seen] = torch.where(a[seen] > 0, a[seen] / penalty, a[seen] * penalty)
    produced, counts = torch.unique(history[integers[Integer.PROMPT_LENGTH] :], return_counts=True)
    frequency, presence = reals[Real.FREQUENCY_PENALTY], reals[Real.PRESENCE_PENALTY]
    a[produced] -= frequency * counts + presence
    temperature = reals[Real.TEMPERATURE]
    if temperature == 0:
        return int(a.argmax())
    a /= temperature
    a[a < a.max() + math.log(max(reals[Real.MIN_P], 1e-30))] = -math.inf
    top_k = integers[Integer.TOP_K]
    if 0 < top_k < len(a):
        a[a < a.topk(top_k).values[-1]] = -math.inf
    if reals[Real.TOP_P] < 1:
        values, _ = a.sort(descending=True)
        mass = torch.softmax(values.double(), 0).cumsum(0)
        last = int((mass < reals[Real.TOP_P]).sum())
        a[a < values[min(last, len(a) - 1)]] = -math.inf
    seed = (integers[Integer.SEED_LOW] & 0xFFFFFFFF) | (
        (integers[Integer.SEED_HIGH] & 0xFFFFFFFF) << 32
    )
    kept = torch.nonzero(a > -math.inf).flatten().tolist()
    noise = torch.tensor([-math.log(-math.log(uniform(seed, position, t))) for t in kept])
    return int(kept[int((a[kept] + noise).argmax())])
