"""Log-probabilities of the chosen and the most likely tokens, from raw logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token and its alternatives, before any sampling parameter.

    ``rank`` is 1 for the most likely token; ``top`` holds (token id, log-probability), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """log(exp(x) / sum(exp(x))) along the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """Log-probability and rank of ``token_id``, and the ``count`` most likely tokens.

    ``logits``: [vocabulary]. Of equally likely tokens the lowest ids come first.
    """
    values = log_softmax(logits)
    own = values[token_id]
    top: tuple[tuple[int, float], ...] = ()
    count = min(count, len(values))
    if count:
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= threshold)
        best = candidates[np.argsort(-values[candidates], kind="stable")[:count]]
        top = tuple((int(t), float(values[t])) for t in best)
    rank = 1 + int(np.count_nonzero(values > own))
    return TokenLogprobs(token_id, float(own), rank, top)
