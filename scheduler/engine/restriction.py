"""The tokens that a sequence may choose: a grammar, a set of tokens, biases, and words to avoid.

A request has a ``Restriction``, made before the request is queued, because that may take long.
Each of its sequences follows it with a ``Follower``, which fills the mask of the next choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from megavm.instructions.sample import MASK_BITS
from megavm.scheduler.engine.step import Floats, Ints


class Matcher(Protocol):
    """Follows a grammar through the tokens of one output. Only one thread uses it at a time."""

    @property
    def complete(self) -> bool:
        """Whether the output satisfies the grammar and nothing may follow."""
        ...

    @property
    def error(self) -> str:
        """Why the matcher cannot go on; "" while it can."""
        ...

    def accept(self, token: int) -> None:
        """Append a token to the output; sets ``error`` if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        ...

    def fill(self, mask: Ints) -> None:
        """Set the bits of the tokens that may come next, end-of-sequence among them."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        ...


@dataclass(frozen=True, eq=False)
class Restriction:
    """The restrictions of a request; see the module.

    ``allowed``: int32 words with a bit per token; tokens without one are never chosen. ``bias``:
    token id to what is added to its logit. ``bad_words``: rows of at least two tokens that may not
    occur in the output.
    """

    grammar: Grammar | None = None
    allowed: Ints | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def masked(self) -> bool:
        """Whether its sequences need a mask of allowed tokens."""
        return self.dynamic or self.allowed is not None

    @property
    def dynamic(self) -> bool:
        """Whether the mask depends on the output, so that a launch can run only one step."""
        return self.grammar is not None or bool(self.bad_words)

    def write_bias(self, row: Floats) -> None:
        """Write the biases of all tokens: float32 [vocabulary]."""
        row[:] = 0
        if self.bias:
            row[list(self.bias)] = list(self.bias.values())


# How the sentences begin that say why a sequence cannot go on.
_STUCK: Final = "the grammar cannot go on"
_NO_TOKEN: Final = "structured_outputs, allowed_token_ids"


class Follower:
    """The restriction of one sequence, at the end of its output.

    The thread that executes plans owns it. The first ``min_tokens`` tokens may be none of
    ``stop_ids``: the machine masks these too.
    """

    def __init__(
        self, restriction: Restriction, stop_ids: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._restriction = restriction
        self._matcher = None if restriction.grammar is None else restriction.grammar.matcher()
        self._accepted = 0  # tokens of the output that the matcher knows

    @property
    def complete(self) -> bool:
        """Whether the output satisfies the grammar and nothing may follow."""
        return self._matcher is not None and self._matcher.complete

    def follow(self, output: Ints) -> str:
        """Bring the matcher to the end of ``output``. Returns why that failed, else ""."""
        matcher = self._matcher
        if matcher is None:
            return ""
        if len(output) < self._accepted:  # a failed launch lost tokens
            matcher.rollback(self._accepted - len(output))
        for token in output[self._accepted :].tolist():
            matcher.accept(token)
        self._accepted = len(output)
        return _sentence(matcher)

    def fill(self, output: Ints, mask: Ints) -> str:
        """Fill the mask of the token after ``output``. Returns why none may follow, else ""."""
        restriction, matcher = self._restriction, self._matcher
        if matcher is None:
            mask[:] = -1
        else:
            matcher.fill(mask)
            if matcher.error:
                return _sentence(matcher)
        if restriction.allowed is not None:
            mask &= restriction.allowed
        for word in restriction.bad_words:
            count = len(word) - 1
            if len(output) >= count and tuple(output[-count:].tolist()) == word[:-1]:
                clear(mask, word[-1])
        early = len(output) < self._min_tokens
        for token in self._stop_ids if early else ():
            clear(mask, token)
        if not mask.any():
            last = ", bad_words and min_tokens" if early else " and bad_words"
            return f"{_NO_TOKEN}{last} leave no token to choose"
        return ""


def _sentence(matcher: Matcher) -> str:
    return f"{_STUCK}: {matcher.error}" if matcher.error else ""


def is_error_of_request(error: str) -> bool:
    """Whether the error of a sequence says that its request asks for what it cannot have."""
    return error.startswith((_STUCK, _NO_TOKEN))


def mask_words(vocabulary: int) -> int:
    """Number of words of a mask for ``vocabulary`` tokens."""
    return -(-vocabulary // MASK_BITS)


def clear(mask: Ints, token: int) -> None:
    """Clear the bit of a token."""
    mask.view(np.uint32)[token // MASK_BITS] &= ~(np.uint32(1) << np.uint32(token % MASK_BITS))


def mask_of(tokens: Ints, vocabulary: int) -> Ints:
    """The mask in which only the bits of ``tokens`` are set."""
    chosen = np.zeros(mask_words(vocabulary) * MASK_BITS, dtype=np.uint8)
    chosen[tokens] = 1
    return np.packbits(chosen, bitorder="little").view(np.int32)
