"""Checks of user input: prompts, sampling parameters and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megavm.sampling_params import SamplingParams, is_integer
from megavm.scheduler.engine.sequence import TokenIds
from megavm.tokenizer import Tokenizer

Prompts = str | TokenIds | Sequence[str] | Sequence[TokenIds]


def read_prompts(
    prompts: Any, tokenizer: Tokenizer
) -> tuple[list[str | None], list[TokenIds], bool]:
    """(texts, token ids, whether `prompts` is a list of prompts); a text is None for token ids.

    Raises:
        ValueError: there is no prompt, one is empty or neither a text nor token ids, or texts and
            token ids are mixed.
    """
    integers = isinstance(prompts, list | tuple) and _are_integers(prompts)
    many = isinstance(prompts, list | tuple) and not integers
    if isinstance(prompts, list | tuple) and not prompts:
        raise ValueError("the prompt is empty: it must be a text or hold at least one token id")
    items = list(prompts) if many else [prompts]
    texts: list[str | None] = []
    ids: list[TokenIds] = []
    for i, item in enumerate(items):
        with PromptIndex(i if many else None, "prompt"):
            if isinstance(item, str) != isinstance(items[0], str):
                raise ValueError(
                    f"it is {describe(item)}, prompt 0 is {describe(items[0])}:"
                    " give either texts or token ids"
                )
            if isinstance(item, str):
                if not item:
                    raise ValueError("the prompt is empty: it must hold at least one character")
                texts.append(item)
                ids.append(tokenizer.encode(item))
            elif integers or is_token_ids(item):
                texts.append(None)
                ids.append(item)
            else:
                raise ValueError(
                    f"a prompt must be a text or a list of token ids, not {describe(item)}"
                )
    return texts, ids, many


def read_params(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts.

    Raises:
        ValueError: their number differs from `count`, or one is not a SamplingParams.
    """
    every: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * count
    if len(every) != count:
        raise ValueError(f"{len(every)} SamplingParams for {count} prompts")
    for item in every:
        if not isinstance(item, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {describe(item)}")
    return every


class PromptIndex:
    """Context manager: puts the number of the prompt before the message of a ValueError."""

    def __init__(self, index: int | None, what: str) -> None:
        self._index = index
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ValueError) and self._index is not None:
            raise ValueError(f"{self._what} {self._index}: {error}") from error


def check_positive(**values: int | None) -> None:
    """Raise ValueError for a size that is not a positive integer; None means not given."""
    for name, value in values.items():
        if value is not None and (not is_integer(value) or value < 1):
            raise ValueError(f"{name} must be a positive integer, not {value!r}")


def check_flags(**values: bool) -> None:
    """Raise ValueError for a flag that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")


def _are_integers(values: Sequence[object]) -> bool:
    # One check for each type: prompts have many thousands of tokens.
    return all(
        issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, values))
    )


def is_token_ids(value: object) -> bool:
    """Whether a value is a list or an array of integers."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    return isinstance(value, list | tuple) and _are_integers(value)


def describe(value: object) -> str:
    """A few words about the type of a value, for an error message."""
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, list | tuple):
        odd = next((item for item in value if not is_integer(item)), None)
        if odd is None:
            return "token ids"
        return f"a {type(value).__name__} that holds a {type(odd).__name__}"
    return f"a {type(value).__name__}"
