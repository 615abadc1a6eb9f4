"""What SamplingParams say about the tokens that may be chosen, compiled for one model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from megavm.grammars import GrammarCompiler
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.restriction import (
    Follower,
    Restriction,
    clear,
    mask_of,
    mask_words,
)
from megavm.scheduler.engine.sequence import stop_token_ids
from megavm.scheduler.engine.step import Ints
from megavm.structured_outputs import StructuredOutputsParams
from megavm.tokenizer import Tokenizer


class RestrictionCompiler:
    """Compiles restrictions for one model. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def prepare(self) -> None:
        """Do what the first grammar would have to wait for, and all other threads with it."""
        with suppress(ValueError):  # the requests that need a grammar get the error
            self._grammars.prepare()

    def compile(self, params: SamplingParams) -> Restriction | None:
        """The restriction of the parameters; None if they restrict nothing.

        A grammar may take as long as a second to compile; other threads run meanwhile.

        Raises:
            ValueError: the grammar is refused, a token id is outside the vocabulary, or no token
                could be chosen. The message begins with the name of the parameter, except that of
                a grammar with the name of its form.
        """
        structured = params.structured_outputs
        if not params.restricts:
            return None
        assert structured is None or isinstance(structured, StructuredOutputsParams)
        bias = dict(params.logit_bias or {})
        self._check_tokens("logit_bias", list(bias))
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        words = self._bad_words(params)
        allowed = self._allowed(params, [word[0] for word in words if len(word) == 1])
        restriction = Restriction(
            None if structured is None else self._grammars.compile(structured),
            allowed,
            bias,
            tuple(word for word in words if len(word) > 1),
        )
        if restriction.dynamic:
            stops = stop_token_ids(params, self._eos_token_ids)
            first = np.empty(mask_words(self._vocab_size), dtype=np.int32)
            nothing = np.empty(0, dtype=np.int32)
            if cause := Follower(restriction, stops, params.min_tokens).fill(nothing, first):
                raise ValueError(cause)
        return restriction

    def _allowed(self, params: SamplingParams, bad: Sequence[int]) -> Ints | None:
        if params.allowed_token_ids is None and not bad:
            return None
        chosen = params.allowed_token_ids
        tokens = np.array(range(self._vocab_size) if chosen is None else chosen, dtype=np.int32)
        mask = mask_of(tokens, self._vocab_size)
        for token in bad:
            clear(mask, token)
        if not mask.any():
            raise ValueError("allowed_token_ids holds no token that bad_words allows")
        if params.min_tokens > 0:
            first = mask.copy()
            for token in stop_token_ids(params, self._eos_token_ids):
                clear(first, token)
            if not first.any():
                raise ValueError(
                    "allowed_token_ids and bad_words allow only stop tokens, which may not be"
                    f" among the first tokens: min_tokens is {params.min_tokens}"
                )
        return mask

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token ids of the bad words, as they are spelled inside and at the beginning of a text."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    self._check_tokens("bad_words", ids)
                    words[ids] = None
        return list(words)

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"{name} holds token id {token}, which is outside the vocabulary"
                    f" [0, {self._vocab_size})"
                )
