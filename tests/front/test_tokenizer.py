"""Text to token ids and back, as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_tokenizers import (
    KINDS,
    TEXT,
    byte_level,
    write_tokenizer,
)

from megavm.stream_decoder import StreamDecoder
from megavm.tokenizer import Tokenizer


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "config",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True},
     {"add_bos_token": True, "add_eos_token": True}],
)  # fmt: skip
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str, config: dict[str, bool]) -> None:
    write_tokenizer(tmp_path, KINDS[kind](), **config)
    ours = Tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ["", "hello", TEXT, " the  the", "<s>hello</s> there", "a<|user|>b"]:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
            ids = ours.encode(text, special)
            assert ours.decode(ids, special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )


def test_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("hello there, world")) == "hello there, world"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer(write_tokenizer(tmp_path, backend))
    assert len(tokenizer.encode("x" * 50)) == 51


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 5, (1 << 32) - 1]) == "the"


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 80, 1.5, "1", None])
def test_what_is_not_a_token_id_is_refused_by_decode(tokenizer: Tokenizer, bad: Any) -> None:
    with pytest.raises(ValueError, match="token id"):
        tokenizer.decode([bad])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, b"bytes", 3])
def test_what_is_not_text_is_refused_by_encode(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        tokenizer.encode(text)


def test_special_tokens_are_known_by_name_and_by_id(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, bos_token={"content": "<s>", "lstrip": False}, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<|user|>"}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.special_tokens == {
        "unk_token": "<|user|>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    assert tokenizer.bos_token_id == tokenizer.encode("")[0]
    assert tokenizer.eos_token_id is not None
    assert tokenizer.is_special(tokenizer.eos_token_id)
    assert not tokenizer.is_special(0)
    assert tokenizer.decode(tokenizer.encode("a<s>b</s>")) == "ab"


def test_a_directory_without_a_tokenizer_can_still_be_used_by_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.available
    assert tokenizer.vocab_size == 0
    assert tokenizer.bos_token_id is None
    for action in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(ValueError, match=r"no tokenizer\.json in .*token ids only"):
            action()
    decoder = StreamDecoder(tokenizer)
    assert [decoder.step(i) for i in (0, 5, -3)] == ["", "", ""]
    assert decoder.flush() == ""
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"tokenizer\.model alone"):
        Tokenizer(tmp_path).encode("a")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\x00"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"nope"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_whole_text_is_what_the_token_adds_to_any_text(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, KINDS[kind]()))
    around = tokenizer.encode("the hello 🦊", add_special_tokens=False)
    texts = {i: tokenizer.whole_text(i) for i in range(tokenizer.vocab_size)}
    for token, text in texts.items():
        if text is None:
            continue
        for count in range(len(around) + 1):
            parts = tokenizer.decode(around[:count], False), tokenizer.decode(around[count:], False)
            whole = tokenizer.decode([*around[:count], token, *around[count:]], False)
            expected = text.join(parts) if text else tokenizer.decode(around, False)
            assert whole == expected
    assert any(texts.values()) == (kind == "byte_level")
    assert tokenizer.whole_text(tokenizer.vocab_size) == ""
    other = Tokenizer(tokenizer.directory)
    other.remember_texts()
    assert {i: other.whole_text(i) for i in texts} == texts
    assert other.plain_texts == tokenizer.plain_texts


def test_the_texts_of_tokens_make_up_the_text(tokenizer: Tokenizer) -> None:
    text = "the hello, the ll"
    ids = tokenizer.encode("he " + text, add_special_tokens=False)
    for _ in range(2):
        assert "".join(map(tokenizer.token_text, ids)).endswith(text)
    for token in filter(tokenizer.is_special, range(tokenizer.vocab_size)):
        text = tokenizer.token_text(token)
        assert tokenizer.encode(text, add_special_tokens=False) == [token]
