"""Texts that come token by token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    TEXT,
    byte_fallback,
    write_tokenizer,
)

from megavm.stream_decoder import StreamDecoder
from megavm.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    return "".join([*(decoder.step(i) for i in ids), decoder.flush()])


@pytest.mark.parametrize("skip", [True, False])
def test_the_pieces_of_a_text_together_are_the_text(tokenizer: Tokenizer, skip: bool) -> None:
    for text in [TEXT, "", " ", "   the", "the<|user|> the", "🦊", "é" * 30, "\ufffd", "a\ufffd b"]:
        ids = tokenizer.encode(text)
        assert stream(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=40))
def test_the_pieces_of_any_text_together_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids) == tokenizer.decode(ids)


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.step(i) for i in tokenizer.encode("🦊 你好 naïve")]
    assert "".join(pieces) == "🦊 你好 naïve"
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_text_that_ends_within_a_character_ends_in_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 🦊", add_special_tokens=False)[:-1]
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.step(i) for i in ids) == "the "
    assert set(decoder.flush()) == {"\ufffd"}


def test_random_bytes_stream_to_what_they_decode_to_at_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    draw = random.Random(3)
    for _ in range(150):
        invalid = draw.random() < 0.5
        ids = [
            draw.randrange(tokenizer.vocab_size) if invalid or draw.random() < 0.7 else 0
            for _ in range(draw.randint(0, 80))
        ]
        assert stream(tokenizer, ids) == tokenizer.decode(ids)
        assert stream(tokenizer, ids, skip=False) == tokenizer.decode(ids, False)


def test_an_id_without_a_token_changes_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, byte_fallback()))
    ids = [
        *tokenizer.encode("he", False),
        tokenizer.vocab_size + 3,
        *tokenizer.encode("the", False),
    ]
    assert stream(tokenizer, ids) == tokenizer.decode(ids) == "he the"


def test_no_sequence_of_ids_raises(tokenizer: Tokenizer) -> None:
    draw = random.Random(4)
    strange: list[Any] = [-1, 1 << 31, 1 << 32, 1 << 70, tokenizer.vocab_size, None, "x", 1.5]
    for _ in range(200):
        decoder = StreamDecoder(tokenizer, skip_special_tokens=draw.random() < 0.5)
        for _ in range(60):
            if draw.random() < 0.1:
                decoder.step(draw.choice(strange))
            else:
                decoder.step(draw.randrange(tokenizer.vocab_size))
        assert isinstance(decoder.flush(), str)


def test_an_endless_run_of_invalid_bytes_is_handed_out_and_forgotten(tokenizer: Tokenizer) -> None:
    byte = max(tokenizer.encode("🦊", add_special_tokens=False))  # part of a character
    decoder = StreamDecoder(tokenizer)
    text = "".join(decoder.step(byte) for _ in range(5000))
    assert len(text) > 4900
    assert len(decoder._ids) < 100


def test_a_space_after_the_prompt_is_kept_when_the_prompt_is_given(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, byte_fallback()))
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert stream(tokenizer, ids) == "the"
    decoder = StreamDecoder(tokenizer, prompt_ids=prompt)
    assert "".join(decoder.step(i) for i in ids) == " the"


@pytest.mark.parametrize("skip", [False, True])
def test_a_text_is_the_same_wherever_the_prompt_ends(tokenizer: Tokenizer, skip: bool) -> None:
    ids = tokenizer.encode("the hello 🦊, the llo")
    for special in filter(tokenizer.is_special, range(tokenizer.vocab_size)):
        ids.insert(len(ids) // 2, special)
    whole = tokenizer.decode(ids, skip)
    for count in range(len(ids) + 1):
        before = tokenizer.decode(ids[:count], skip)
        decoder = StreamDecoder(tokenizer, skip, ids[:count])
        text = "".join([*map(decoder.step, ids[count:]), decoder.flush()])
        if not before.endswith("\ufffd"):
            assert before + text == whole


def test_a_character_that_the_prompt_began_is_completed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("🦊 the", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, prompt_ids=ids[:2])
    pieces = [decoder.step(i) for i in ids[2:]]
    assert "".join([*pieces, decoder.flush()]).endswith(" the")
