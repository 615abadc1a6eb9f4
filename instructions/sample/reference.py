"""Sample in torch."""

import math

import torch

from megavm.instructions.adjust_logits.reference import choices, scores
from megavm.instructions.sample import SEGMENT_WORDS, Integer, Real, Sample, is_limited
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: Sample, m: View) -> None:
    for row, sequence, position, integers, reals in choices(inst, m):
        if inst.segments == NONE:
            token = largest(inst, m, row)
        elif is_limited(reals, integers):
            a = m.read(inst.adjusted, (row, row + 1))[0]
            token = choose(a, position, integers, reals)
        else:
            segments = m.read(inst.segments, (row, row + 1)).view(-1, SEGMENT_WORDS)
            token = lowest_of_largest(segments[:, 2], segments[:, 3])
        m.raw(inst.tokens)[sequence, position + 1] = token


def largest(inst: Sample, m: View, row: int) -> int:
    """The token of the largest logit of a row."""
    if inst.peaks == NONE:
        values = m.read(inst.logits, (row, row + 1))[0]
        columns = torch.arange(len(values))
    else:
        values, columns = m.read(inst.peaks, (row, row + 1)).view(-1, 2).T
    if bool(values.isnan().any()):
        raise IndexError(f"logits of row {row} hold NaN")
    return lowest_of_largest(values, columns)


def lowest_of_largest(values: torch.Tensor, tokens: torch.Tensor) -> int:
    """The lowest token among those of the largest value."""
    return int(tokens[values == values.max()].min())


def choose(a: torch.Tensor, position: int, integers: list[int], reals: list[float]) -> int:
    """The choice among adjusted logits, float32 [vocabulary], if it is limited."""
    a = a.clone()
    a[a < a.max() + math.log(max(reals[Real.MIN_P], 1e-30))] = -math.inf
    top_k = integers[Integer.TOP_K]
    if 0 < top_k < len(a):
        a[a < a.topk(top_k).values[-1]] = -math.inf
    if reals[Real.TOP_P] < 1:
        values, _ = a.sort(descending=True)
        mass = torch.softmax(values.double(), 0).cumsum(0)
        last = int((mass < reals[Real.TOP_P]).sum())
        a[a < values[min(last, len(a) - 1)]] = -math.inf
    kept = torch.nonzero(a > -math.inf).flatten()
    return lowest_of_largest(scores(a[kept], kept, position, integers), kept) if len(kept) else 0
