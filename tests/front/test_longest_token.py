"""The bound of the tokens of a text, held against tokenizers that encode it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from small_tokenizers import KINDS, SPECIAL, TEXT, byte_fallback, byte_level, write_tokenizer
from tokenizers import models, normalizers, pre_tokenizers

from megavm.longest_token import LongestToken
from megavm.tokenizer import LONG_TEXT, Tokenizer


def like_llama_3() -> tokenizers.Tokenizer:
    backend = byte_level()
    pattern = tokenizers.Regex(r"\s+|\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def like_qwen() -> tokenizers.Tokenizer:
    backend = like_llama_3()
    backend.normalizer = normalizers.NFC()
    return backend


def like_mistral() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


BOUNDED = {**KINDS, "llama 3": like_llama_3, "qwen": like_qwen, "mistral": like_mistral}


@pytest.mark.parametrize("kind", sorted(BOUNDED))
def test_no_text_has_fewer_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, BOUNDED[kind]()))
    numbers = random.Random(1)
    pieces = [*SPECIAL, *TEXT, "he", "ll", " th", "e\u0301", "\u1100\u1161", " " * 50, "\x00", "z"]
    texts = [piece * 300 for piece in pieces]
    texts += ["".join(numbers.choices(pieces, k=200)) for _ in range(100)]
    for text in texts:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, False))
    assert tokenizer.fewest_tokens("h" * 10_000) >= 10_000 // 10
    assert tokenizer.fewest_tokens("") == 0


def _with(change: Callable[[tokenizers.Tokenizer], None]) -> tokenizers.Tokenizer:
    backend = byte_level()
    change(backend)
    return backend


def _strip(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def _collapse(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Replace(tokenizers.Regex(" +"), " ")


def _shorten(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.Replace("``", '"')


def _drop(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior="removed"), pre_tokenizers.ByteLevel()]
    )


def _whitespace(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )


def _no_bytes(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = None  # letters that the vocabulary lacks are left out


def _takes_spaces(backend: tokenizers.Tokenizer) -> None:
    backend.add_tokens([tokenizers.AddedToken("<end>", lstrip=True)])


@pytest.mark.parametrize(
    "change", [_strip, _collapse, _shorten, _drop, _whitespace, _no_bytes, _takes_spaces]
)
def test_a_tokenizer_that_may_leave_out_text_has_no_bound(
    change: Callable[[tokenizers.Tokenizer], None],
) -> None:
    assert LongestToken.of(byte_level()) is not None
    assert LongestToken.of(_with(change)) is None


def test_unknown_characters_have_no_bound_where_a_row_of_them_is_one_token() -> None:
    for fused, bounded in ((True, False), (False, True)):
        model = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=fused)
        backend = tokenizers.Tokenizer(model)
        assert (LongestToken.of(backend) is not None) == bounded
    for other in (models.WordLevel({"<unk>": 0}, "<unk>"), models.Unigram([("a", 0.0)])):
        assert LongestToken.of(tokenizers.Tokenizer(other)) is None


def test_a_normalizer_that_joins_characters_has_a_bound_for_ascii_alone() -> None:
    longest = LongestToken.of(like_qwen())
    assert longest is not None
    assert longest.fewest_tokens("h" * 1000)
    assert longest.fewest_tokens("h" * 1000 + "e\u0301") == 0


def test_without_a_tokenizer_nothing_is_known(tmp_path: Path) -> None:
    assert Tokenizer(tmp_path).fewest_tokens("hello") == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_long_text_has_the_tokens_of_its_parts(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, KINDS[kind]()))
    part = "<s>hello, 你好 world</s>"
    count = LONG_TEXT // len(part) + 1
    assert tokenizer.encode(part * count, False) == tokenizer.encode(part, False) * count
