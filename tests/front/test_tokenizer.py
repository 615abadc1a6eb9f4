"""Tokenizers and chat templates of model directories, and decoding token by token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megavm.stream_decoder import StreamDecoder
from megavm.tokenizer import Tokenizer

TEXT = (
    "Once upon a time there was a little fox. The fox said: hello, world! "
    "Ünïcödé naïve 你好 世界 🦊🌍 👩‍👩‍👧 ½ ﷽ end.\n\tdef f(x):\n  return x  # ok"
)
SPECIAL = ["<s>", "</s>", "<|user|>"]
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """Like Llama 3: bytes as letters, merges, and a BOS token from the post-processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), ("ð", "Ł"), ("ä", "½")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2: pieces of text with bytes for the rest, spaces as U+2581."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|user|>": 3}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,!:", "he", "ll", "▁t", "▁th", "ï"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("h", "e"), ("l", "l"), ("▁", "t"), ("▁t", "h")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def write_tokenizer(
    directory: Path, backend: tokenizers.Tokenizer | None = None, **config: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (backend or byte_level()).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, KINDS[request.param]()))


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    return "".join([*(decoder.step(i) for i in ids), decoder.flush()])


# --- text and ids -------------------------------------------------------------------------------


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


# --- chat templates -----------------------------------------------------------------------------

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi 🦊"},
    {"role": "assistant", "content": "Hello.\n"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "plain": CHATML,
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m | tojson }}{% endfor %}",
    "tojson": "{{ messages | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ eos_token }}{{ nothing_such }}",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompts_are_those_of_transformers(
    tmp_path: Path, name: str, add_generation_prompt: bool
) -> None:
    write_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert Tokenizer(tmp_path).chat_prompt(CHAT, add_generation_prompt) == expected


STRIPPING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, STRIPPING], ids=["plain", "stripping"])
@pytest.mark.parametrize("content", ["Sure: 1,", "Sure: ", "Sure.\n\n", "", " 🦊"])
def test_a_prompt_within_the_last_message_is_that_of_transformers(
    tmp_path: Path, template: str, content: str
) -> None:
    write_tokenizer(tmp_path, chat_template=template)
    messages = [*CHAT, {"role": "assistant", "content": content}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.chat_prompt(messages, continue_final_message=True) == expected
    assert tokenizer.chat_prompt(messages, False, continue_final_message=True) == expected
    assert messages[-1]["content"] == content


def test_a_last_message_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=TEMPLATES["whitespace"]))
    message = {"role": "assistant", "content": "Sure"}  # this template shows users only
    with pytest.raises(ValueError, match="leaves out the content of the last message"):
        tokenizer.chat_prompt([*CHAT, message], continue_final_message=True)
    with pytest.raises(ValueError, match="message 4 has no text"):
        tokenizer.chat_prompt([*CHAT, {**message, "content": None}], continue_final_message=True)
    with pytest.raises(ValueError, match="exclude each other"):
        tokenizer.chat_prompt([*CHAT, message], True, continue_final_message=True)


def test_variables_of_a_template_are_those_of_transformers(tmp_path: Path) -> None:
    template = (
        "{% if enable_thinking is defined %}{{ enable_thinking }};{% endif %}"
        "{{ bos_token }}{{ date }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    write_tokenizer(tmp_path, chat_template=template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    cases: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"date": 5, "bos_token": "!"}]
    for variables in cases:
        expected = theirs.apply_chat_template(CHAT, tokenize=False, **variables)
        assert ours.chat_prompt(CHAT, chat_template_kwargs=variables) == expected
    with pytest.raises(ValueError, match="must not hold messages, tools"):
        ours.chat_prompt(CHAT, chat_template_kwargs={"tools": [], "messages": [], "a": 1})


# As Llama 3.1's template does: it asks whether the key is there, takes one call, writes JSON.
TOOLS_TEMPLATE = (
    "{% if tools is not none %}{% for tool in tools %}{{ tool | tojson }};{% endfor %}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if not m.tool_calls | length == 1 %}{{ raise_exception('single tool-calls') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
)


def test_no_tool_calls_are_none_however_they_are_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=TOOLS_TEMPLATE))
    absent: list[Any] = [None, []]
    for calls in absent:
        message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
        assert tokenizer.chat_prompt([message]) == "assistant: Hi;"
        assert message["tool_calls"] is calls


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city": "Köln", "days": [1, 2.5]}', '{"city": "Köln", "days": [1, 2.5]}'),
        ({"city": "Köln"}, '{"city": "Köln"}'),
        ("{}", "{}"),
        ("", "{}"),
        (None, "{}"),
        # What a model wrote wrongly must not end the conversation.
        ('{"city": ', "{}"),
        ("[1]", "{}"),
        ("[" * 100_000, "{}"),
        ("9" * 5000, "{}"),
        (5, "{}"),
    ],
)
def test_arguments_of_tool_calls_reach_the_template_as_an_object(
    tmp_path: Path, arguments: Any, rendered: str
) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=TOOLS_TEMPLATE))
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    prompt = tokenizer.chat_prompt([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert prompt == f'{{"name": "weather", "parameters": {rendered}}}'
    assert function["arguments"] is arguments


@pytest.mark.parametrize(
    "calls", ["call", [5], [{}], [{"function": "f"}], [{"function": {}}], {"a": 1}]
)
def test_malformed_tool_calls_are_refused(tmp_path: Path, calls: Any) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=TOOLS_TEMPLATE))
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(ValueError, match="message 0 must be"):
        tokenizer.chat_prompt([message])


def test_tools_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=TOOLS_TEMPLATE)
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
    assert Tokenizer(tmp_path).chat_prompt(CHAT, False, tools) == expected
    assert Tokenizer(tmp_path).chat_prompt(CHAT, False, []).startswith("system: ")
    with pytest.raises(ValueError, match="tool 1 must be a dict, not str"):
        Tokenizer(tmp_path).chat_prompt(CHAT, False, [*tools, "weather"])  # type: ignore[list-item]


def test_the_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="from the configuration")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer(tmp_path).chat_prompt(CHAT) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer(tmp_path).chat_prompt(CHAT) == "from jinja"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert Tokenizer(write_tokenizer(tmp_path, chat_template=named)).chat_prompt(CHAT) == "plain"
    write_tokenizer(tmp_path, chat_template=named[:1])
    with pytest.raises(ValueError, match="no entry named default"):
        Tokenizer(tmp_path)


def test_content_in_parts_is_joined(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=CHATML))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    expected = "<s><|user|>one\ntwo<|assistant|>"
    assert tokenizer.chat_prompt([{"role": "user", "content": parts}]) == expected
    with pytest.raises(ValueError, match="image_url"):
        tokenizer.chat_prompt([{"role": "user", "content": [{"type": "image_url", "url": "x"}]}])


@pytest.mark.parametrize(
    "messages",
    [[], [{}], ["hello"], [{"role": 3, "content": "x"}], [{"role": "user", "content": 3}],
     [{"role": "user", "content": [3]}], [{"role": "user", "content": b"x"}]],
)  # fmt: skip
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=CHATML))
    with pytest.raises(ValueError, match="message"):
        tokenizer.chat_prompt(messages)


def test_a_model_without_a_template_says_where_one_would_be(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    with pytest.raises(ValueError, match="no chat template") as caught:
        tokenizer.chat_prompt(CHAT)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.require_chat()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "is not valid: line 1: Expected an expression"),
        ("{{ " + 3000 * "(" + "1" + 3000 * ")" + " }}", "is nested too deeply"),
        (25 * "{% for x in [1] %}" + 25 * "{% endfor %}", "is not valid: SyntaxError: too many"),
        ("{{ " + 5000 * "9" + " }}", "is not valid: ValueError: Exceeds the limit"),
        ("{{ messages[9].role.upper() }}", "failed"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{{ range(10000000000) }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
    ],
)
def test_a_template_that_fails_is_one_clear_error(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=said):
        tokenizer.chat_prompt(CHAT)


def test_strftime_now_gives_the_date(tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y') }}"
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=template))
    assert len(tokenizer.chat_prompt(CHAT)) == 4


# --- token by token -----------------------------------------------------------------------------


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


def test_a_character_that_the_prompt_began_is_completed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("🦊 the", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer, prompt_ids=ids[:2])
    pieces = [decoder.step(i) for i in ids[2:]]
    assert "".join([*pieces, decoder.flush()]).endswith(" the")


def test_the_texts_of_tokens_make_up_the_text(tokenizer: Tokenizer) -> None:
    text = "the hello, the ll"
    ids = tokenizer.encode("he " + text, add_special_tokens=False)
    for _ in range(2):
        assert "".join(map(tokenizer.token_text, ids)).endswith(text)
    for token in filter(tokenizer.is_special, range(tokenizer.vocab_size)):
        text = tokenizer.token_text(token)
        assert tokenizer.encode(text, add_special_tokens=False) == [token]


def test_a_template_from_a_file_takes_the_place_of_the_model_s(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="the model's")
    file = tmp_path / "own.jinja"
    file.write_text("own: {{ messages[0].role }}")
    assert Tokenizer(tmp_path, file).chat_prompt(CHAT) == f"own: {CHAT[0]['role']}"
    file.write_text("line 1\n{% if %}")
    with pytest.raises(ValueError, match=r"the chat template own\.jinja is not valid: line 2: "):
        Tokenizer(tmp_path, file)
    file.write_text("{{ raise_exception('not so') }}")
    with pytest.raises(ValueError, match=r"the chat template own\.jinja failed: not so"):
        Tokenizer(tmp_path, file).chat_prompt(CHAT)
    file.unlink()
    with pytest.raises(ValueError, match=f"cannot read {file}: No such file or directory"):
        Tokenizer(tmp_path, file)
