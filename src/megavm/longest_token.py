"""How much text a token stands for at most: texts that are far too long need not be tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import tokenizers

# Steps before the model that leave no character out. Others may: a normalizer that strips spaces, a
# pre-tokenizer that drops them.
_KEEPING: Final = {"ByteLevel", "Digits", "Metaspace", "Prepend"}
_KEEPING_UNLESS_REMOVED: Final = {"Punctuation", "Split"}  # their behavior may be "Removed"
_KEEPING_ASCII: Final = {"Lowercase", "NFC", "NFD", "NFKC", "NFKD"}
_BYTES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True)
class LongestToken:
    """A bound of the text that one token stands for.

    Attributes:
        characters: most characters of it.
        ascii_only: whether this holds for texts of ASCII only.
    """

    characters: int
    ascii_only: bool

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> LongestToken | None:
        """The bound of a tokenizer; None if it may leave out text, or take it for one token."""
        steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
        kinds = {step["type"] for step in steps if not _keeps(step)}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder().values()
        if kinds - _KEEPING_ASCII or any(token.lstrip or token.rstrip for token in added):
            return None
        if not _has_tokens_for_all(backend, {step["type"] for step in steps}, vocabulary):
            return None
        return cls(max(map(len, vocabulary), default=1), bool(kinds))

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least; 0 if that is not known."""
        if self.ascii_only and not text.isascii():
            return 0
        return -(-len(text) // self.characters)


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, in order."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _flat(inner)


def _keeps(step: dict[str, Any]) -> bool:
    """Whether no text has fewer characters after a step."""
    kind: str = step["type"]
    if kind == "Replace":
        replaced: str | None = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    if kind in _KEEPING_UNLESS_REMOVED:
        return str(step.get("behavior", "Removed")) != "Removed"
    return kind in _KEEPING


def _has_tokens_for_all(
    backend: tokenizers.Tokenizer, kinds: set[str], vocabulary: dict[str, int]
) -> bool:
    """Whether each character, or byte, gives a token of its own if it is in no longer one.

    Else characters that have none are left out, or a row of them is one unknown token.
    """
    from tokenizers import models, pre_tokenizers

    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if "ByteLevel" in kinds:
        return vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback and vocabulary.keys() >= set(_BYTES):
        return True
    return model.unk_token in vocabulary and not model.fuse_unk
