"""Parsers of tool calls: formats as their documentation shows them, odd texts, any cut."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavm.server.tools.parser import Parsed
from megavm.server.tools.parsers import PARSERS, detect_parser

FUNCTIONS = ("f", "get_weather", "search.web-2")
Result = tuple[str, list[tuple[str, str]], bool]

# Format, what a model writes, the content and the calls in it. Calls of WEATHER have these words.
WEATHER = {
    "city": "Zürich, 東京 \U0001f327",
    "days": [1, 2.5, -3e-2],
    "deep": {"a": None, "b": True},
}
WEATHER_JSON = json.dumps(WEATHER, ensure_ascii=False)
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER_JSON}}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {WEATHER_JSON}}}'
PYTHONIC = "get_weather({})".format(", ".join(f"{k}={v!r}" for k, v in WEATHER.items()))
CALL = ("get_weather", WEATHER)
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # Hermes 2 Pro, Hermes 3, Qwen 2.5, Qwen 3.
    ("hermes", HERMES, "", [CALL]),
    ("hermes", f"{HERMES}\n{HERMES}", "", [CALL, CALL]),
    ("hermes", f"I look.\n\n{HERMES}\n", "I look.", [CALL]),
    ("hermes", f"<think>\nhm\n</think>\n\n{HERMES}", "<think>\nhm\n</think>", [CALL]),
    (
        "hermes",
        '<tool_call>{"arguments":{"a":[]},"name":"new"}</tool_call>',
        "",
        [("new", {"a": []})],
    ),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", {"a": 1})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', "", [("f", {"a": 1})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("f", {"a": "x\ny"})],
    ),
    ("hermes", f"<tool_call>oops<tool_call>{HERMES}", "<tool_call>oops<tool_call>", [CALL]),
    ("hermes", f"{HERMES} and more", " and more", [CALL]),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    (
        "hermes",
        '<tool_call>{"name": 5, "arguments": {}}',
        '<tool_call>{"name": 5, "arguments": {}}',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"name": "", "arguments": {}}',
        [],
    ),
    ("hermes", '<tool_call>{"name": "f\\', '<tool_call>{"name": "f\\', []),
    ("hermes", "a <b> \n <tool_call", "a <b> \n <tool_call", []),
    ("hermes", " \n", " \n", []),
    # Llama 3.1, 3.2, 3.3.
    ("llama3_json", LLAMA, "", [CALL]),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", [CALL]),
    ("llama3_json", f"{LLAMA}; {LLAMA};\n{LLAMA}", "", [CALL, CALL, CALL]),
    ("llama3_json", f"So: {LLAMA} ; done", "So: ; done", [CALL]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3_json", '<|python_tag|>{"name": "new", "parameters": {}}', "", [("new", {})]),
    ("llama3_json", '{"name": "new", "parameters": {}}', '{"name": "new", "parameters": {}}', []),
    ("llama3_json", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", '{"name": "f", "parameters": [1]}', '{"name": "f", "parameters": [1]}', []),
    # Llama 4, Llama 3.2.
    ("pythonic", f"[{PYTHONIC}]", "", [CALL]),
    ("pythonic", f"[{PYTHONIC}, f(), {PYTHONIC}]", "", [CALL, ("f", {}), CALL]),
    ("pythonic", f"<|python_start|>[{PYTHONIC}]<|python_end|>", "", [CALL]),
    ("pythonic", "<|python_start|>[new(a=1)]<|python_end|>", "", [("new", {"a": 1})]),
    ("pythonic", "[ search.web-2 ( )]", "[ search.web-2 ( )]", []),
    (
        "pythonic",
        '[search.web-2(q="a", n=0x1F, m=+1_0, t=true, x=.5)]',
        "",
        [("search.web-2", {"q": "a", "n": 31, "m": 10, "t": True, "x": 0.5})],
    ),
    (
        "pythonic",
        r"[f(a='\x41\u00e9\101\N{BULLET}\'\"\q\d0\ud83c\udf27')]",
        "",
        [("f", {"a": "Aé\101\u2022'\"\\q\\d0\U0001f327"})],
    ),
    ("pythonic", "[f(a=(1, (2,), ()), b=[[],], )]", "", [("f", {"a": [1, [2], []], "b": [[]]})]),
    ("pythonic", f"Text [1] [{PYTHONIC}] more", "Text [1] more", [CALL]),
    ("pythonic", "[print(1)] [new(a=1)] [f(1)]", "[print(1)] [new(a=1)] [f(1)]", []),
]
# Calls that are malformed or cut within their arguments, which are passed on as they are.
BROKEN: list[tuple[str, str, str, str, bool]] = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call> x',
        " x",
        '{"a": nope}}',
        False,
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', "", '{"a": "x', True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1 </tool', "", '{"a": 1 </tool', False),
    ("llama3_json", '{"name": "f", "parameters": {"a": 01}}', "", '{"a": 01}}', False),
    ("llama3_json", '{"name": "f", "parameters": {"a": tru', "", '{"a": tru', True),
    ("pythonic", "[f(a=nope(1), b=2)]", "", '{"a": nope(1), b=2)]', False),
    ("pythonic", "[f(a='x', 2)]", "", '{"a": "x", 2)]', False),
    ("pythonic", "[f(a=(1))]", "", '{"a": [1))]', False),
    ("pythonic", "[f(a=1e999)]", "", '{"a": 1e999}', False),
    ("pythonic", "[f(a=12", "", '{"a": 12', True),
    ("pythonic", "[f(a='x\\", "", '{"a": "x\\', True),
]


def parse(name: str, pieces: list[str]) -> Result:
    """The content, the calls and `unfinished` of a text in pieces; deltas must be well formed."""
    parser = PARSERS[name](FUNCTIONS)
    results: list[Parsed] = [*map(parser.push, pieces), parser.finish()]
    calls: list[tuple[str, str]] = []
    for delta in (delta for result in results for delta in result.calls):
        if delta.name is not None:
            assert delta.index == len(calls), "calls begin in order"
            calls.append((delta.name, ""))
        assert delta.index == len(calls) - 1, "only the last call grows"
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    return "".join(result.content for result in results), calls, parser.unfinished


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found, raw, unfinished = parse(name, [text])
    assert found == content
    assert [(function, json.loads(arguments)) for function, arguments in raw] == calls
    assert not unfinished


@pytest.mark.parametrize(("name", "text", "content", "arguments", "unfinished"), BROKEN)
def test_malformed_arguments_are_passed_on(
    name: str, text: str, content: str, arguments: str, unfinished: bool
) -> None:
    assert parse(name, [text]) == (content, [("f", arguments)], unfinished)


TEXTS = sorted({(case[0], case[1]) for case in (*CASES, *BROKEN)})


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_a_text_may_be_cut_anywhere(name: str, text: str) -> None:
    whole = parse(name, [text])
    assert parse(name, list(text)) == whole
    for cut in range(len(text)):
        assert parse(name, [text[:cut], "", text[cut:]]) == whole


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        *('{"name": "f", "arguments": {', '"parameters": ', '{"name": "f"', '"a": "', "[f(", "a='"),
        *(
            "f(a=",
            "\\",
            "\\u",
            '"',
            "'",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            ",",
            ":",
            ";",
            "=",
            " ",
            "\n",
        ),
        *("1", "-", "e5", "true", "None", "é", "\U0001f327", "\x00", "<", "x"),
    ]
)


@given(st.sampled_from(sorted(PARSERS)), st.lists(FRAGMENTS, max_size=24))
@settings(max_examples=300, deadline=None)
def test_any_text_may_be_cut_anywhere(name: str, pieces: list[str]) -> None:
    whole = parse(name, ["".join(pieces)])
    assert parse(name, pieces) == whole
    assert parse(name, list("".join(pieces))) == whole
    if not whole[1]:
        assert whole[0] == "".join(pieces), "nothing is lost"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYWORDS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4)


@given(KEYWORDS, st.integers(0, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_json_writes_is_read(arguments: dict[str, Any], indent: int, ascii: bool) -> None:
    call = json.dumps(
        {"name": "f", "arguments": arguments}, indent=indent or None, ensure_ascii=ascii
    )
    for name, text in (("hermes", f"<tool_call>{call}</tool_call>"), ("llama3_json", call)):
        content, calls, unfinished = parse(name, list(text))
        assert (content, len(calls), unfinished) == ("", 1, False)
        assert json.loads(calls[0][1]) == arguments


@given(KEYWORDS)
@settings(max_examples=200, deadline=None)
def test_what_python_writes_is_read(arguments: dict[str, Any]) -> None:
    text = "[f({})]".format(", ".join(f"{key}={value!r}" for key, value in arguments.items()))
    content, calls, unfinished = parse("pythonic", list(text))
    assert (content, len(calls), unfinished) == ("", 1, False)
    assert json.loads(calls[0][1]) == arguments


STRINGS = st.lists(
    st.sampled_from(["\\" + c for c in "\\'\"abfnrtvNxuU01789q \n"] + list("aN{}0189'\"é")),
    max_size=8,
).map("".join)


@given(STRINGS)
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_strings_are_those_of_python(inner: str) -> None:
    """Where Python reads a string, the parser reads the same."""
    try:
        expected = ast.literal_eval(f"'{inner}'")
    except (SyntaxError, ValueError):
        return
    if not isinstance(expected, str) or "'" in inner.replace("\\'", ""):
        return  # several strings, or one that ends early
    _, calls, _ = parse("pythonic", [f"[f(a='{inner}')]"])
    value = json.loads(calls[0][1])["a"]
    assert value == expected


def test_deep_nesting_is_no_recursion() -> None:
    deep = "[" * 5000
    for name, text in (
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}'),
        ("llama3_json", f'{{"name": "f", "parameters": {{"a": {deep}'),
        ("pythonic", f"[f(a={deep}"),
    ):
        _, calls, unfinished = parse(name, [text])
        assert calls == [("f", f'{{"a": {deep}')]
        assert unfinished


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        # As in the templates of Qwen 2.5 and Hermes, Llama 3.1, 3.2 and 4, Qwen3-Coder, GLM 4.
        (
            'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>',
            "hermes",
        ),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        (
            "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
            "llama3_json",
        ),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2)]", "pythonic"),
        ("{{ '<|python_start|>' }}", "pythonic"),
        ("<tool_call>\n<function=example>", None),
        ("<tool_call>name\n<arg_key>key</arg_key>", None),
        ("{{ message.content }}", None),
        (None, None),
    ],
)
def test_the_chat_template_tells_the_parser(template: str | None, parser: str | None) -> None:
    assert detect_parser(template) == parser
