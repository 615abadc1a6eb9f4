"""Chat templates, as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_tokenizers import (
    CHATML,
    write_tokenizer,
)

from megavm.tokenizer import Tokenizer

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


def test_developers_speak_as_the_system_where_a_template_does_not_know_them(tmp_path: Path) -> None:
    chat = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    system = [{**chat[0], "role": "system"}, chat[1]]
    write_tokenizer(tmp_path, chat_template=CHATML)
    assert Tokenizer(tmp_path).chat_prompt(chat) == Tokenizer(tmp_path).chat_prompt(system)
    knows = "{% for m in messages %}{{ m.role == 'developer' }}{% endfor %}"
    write_tokenizer(tmp_path, chat_template=knows)
    assert Tokenizer(tmp_path).chat_prompt(chat) == "TrueFalse"


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
    file.write_text(" \n")
    with pytest.raises(ValueError, match=r"the chat template own\.jinja is empty"):
        Tokenizer(tmp_path, file)
    file.unlink()
    with pytest.raises(ValueError, match=f"cannot read {file}: No such file or directory"):
        Tokenizer(tmp_path, file)
