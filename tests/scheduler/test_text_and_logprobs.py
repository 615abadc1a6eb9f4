"""Text up to a stop string, log-probabilities and the seeds of a request's sequences."""

from __future__ import annotations

import numpy as np
import toy_runner as toy
from hypothesis import example, given
from hypothesis import strategies as st

from megavm.scheduler.engine.logprobs import token_logprobs
from megavm.scheduler.engine.sequence import derived_seed
from megavm.scheduler.engine.text import TextStream


@given(
    tokens=st.lists(st.integers(0, 39), max_size=30),
    stops=st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@example(tokens=[2, 2, 3, 1], stops=["ccd"], include=False)
def test_streamed_text_is_the_text_up_to_the_first_stop_string(
    tokens: list[int], stops: list[str], include: bool
) -> None:
    whole = "".join(map(toy.piece, tokens))
    stream = TextStream(toy.ToyDecoder(), stops, include)
    text, stop = "", None
    for token in tokens:
        piece, stop = stream.push(token)
        text += piece
        assert not any(s in text for s in stops) or stop is not None
        if stop is not None:
            break
    else:
        rest, stop = stream.finish()
        text += rest
    if stop is None:
        assert text == whole
        assert not any(s in whole for s in stops)
    else:
        begin = whole.index(stop)
        assert text == whole[: begin + (len(stop) if include else 0)]


def test_logprobs_of_impossible_tokens_are_minus_infinity() -> None:
    logits = np.array([0.0, -np.inf, 1.0], dtype=np.float32)
    entry = token_logprobs(logits, 1, 3)
    assert entry.logprob == -np.inf
    assert entry.rank == 3
    assert [t for t, _ in entry.top] == [2, 0, 1]


def test_equal_logits_rank_the_lowest_token_first() -> None:
    entry = token_logprobs(np.zeros(6, dtype=np.float32), 4, 2)
    assert entry.rank == 1
    assert [t for t, _ in entry.top] == [0, 1]


def test_derived_seeds_differ_and_the_first_is_the_seed_itself() -> None:
    assert derived_seed(42, 0) == 42
    assert len({derived_seed(42, i) for i in range(1000)}) == 1000
