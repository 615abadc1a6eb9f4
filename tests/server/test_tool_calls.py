"""Chats with tools: what the model writes, as OpenAI's client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripts import model_with, writing
from serving import RunningServer, assert_idle, running, wait_until

from megavm import LLM
from megavm.server.tools.parsers import PARSERS

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
TOKENS = (
    *(("<tool_call>", False), ("</tool_call>", True), ("<|python_tag|>", True)),
    *(("<|python_start|>", True), ("<|python_end|>", True), ("<|other|>", True)),
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather?"}]
ZURICH = {"city": "Zürich \U0001f327"}
_JSON = json.dumps(ZURICH, ensure_ascii=False)
FORMATS = {  # a text, a call of weather and a call of now
    "hermes": f'Well.\n<tool_call>\n{{"name": "weather", "arguments": {_JSON}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'Well. <|python_tag|>{{"name": "weather", "parameters": {_JSON}}};'
    ' {"name": "now", "parameters": {}}',
    "pythonic": "Well. <|python_start|>[weather(city='Zürich \U0001f327'), now()]<|python_end|>",
}


@pytest.fixture(scope="module", params=sorted(PARSERS))
def with_tools(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of a model that writes calls in one of the formats."""
    directory = model_with(tmp_path_factory.mktemp("model"), TEMPLATE, TOKENS)
    with running(
        lambda progress: LLM(directory, dtype="float32", max_num_seqs=4),
        tool_call_parser=request.param,
    ) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
        assert_idle(server)


def written(server: RunningServer) -> str:
    """The text of the server's format."""
    return FORMATS[server.service.settings.tool_call_parser or ""]


def ask(server: RunningServer, *texts: str, **fields: Any) -> Any:
    """The choices of an answer in which the model writes `texts`, whole and streamed: the same."""
    fields = {"model": "stories", "messages": MESSAGES, "tools": TOOLS, **fields}
    with writing(server.service.tokenizer, *texts):
        whole = server.client().chat.completions.create(**fields)
        with server.client().chat.completions.stream(**fields) as stream:
            try:
                streamed: Any = stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                streamed = error.completion
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.message.content == other.message.content or not one.message.content
        for message in (one.message, other.message):
            for call in message.tool_calls or ():
                assert call.id.startswith("call_")
        calls = [
            [
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            ]
            for choice in (one, other)
        ]
        assert calls[0] == calls[1]
        assert [e.token for e in (one.logprobs and one.logprobs.content) or ()] == [
            e.token for e in (other.logprobs and other.logprobs.content) or ()
        ]
    return whole.choices


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [
        (c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()
    ]


def test_a_text_and_two_calls(with_tools: RunningServer) -> None:
    (choice,) = ask(with_tools, written(with_tools))
    assert choice.message.content == "Well."
    assert calls_of(choice) == [("weather", ZURICH), ("now", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


def test_content_is_null_beside_calls_alone(with_tools: RunningServer) -> None:
    (choice,) = ask(with_tools, written(with_tools).removeprefix("Well."))
    assert choice.message.content is None
    assert calls_of(choice) == [("weather", ZURICH), ("now", {})]


def test_an_answer_without_calls_is_as_without_tools(with_tools: RunningServer) -> None:
    text = ' I say: 1 < 2, [a], {"b": 1}.\n'
    (choice,) = ask(with_tools, text)
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"
    (choice,) = ask(with_tools, written(with_tools), tool_choice="none")
    assert choice.message.tool_calls is None
    assert "weather" in choice.message.content


def test_control_tokens_that_mark_no_calls_are_left_out(with_tools: RunningServer) -> None:
    (choice,) = ask(with_tools, "a<|other|>b" + written(with_tools))
    assert choice.message.content == "abWell."
    assert len(calls_of(choice)) == 2
    extra = {"skip_special_tokens": False}
    (choice,) = ask(with_tools, "a<|other|>b" + written(with_tools), extra_body=extra)
    assert choice.message.content == "a<|other|>bWell."


def test_without_parallel_calls_the_first_one_is_returned(with_tools: RunningServer) -> None:
    (choice,) = ask(with_tools, written(with_tools), parallel_tool_calls=False)
    assert calls_of(choice) == [("weather", ZURICH)]


def test_choices_have_calls_of_their_own(with_tools: RunningServer) -> None:
    first, second, third = ask(with_tools, written(with_tools), "No.", "Yes.", n=3)
    assert calls_of(first) == [("weather", ZURICH), ("now", {})]
    assert [second.message.content, third.message.content] == ["No.", "Yes."]
    assert [second.finish_reason, third.finish_reason] == ["stop", "stop"]


def test_a_call_that_is_cut_keeps_what_there_is(with_tools: RunningServer) -> None:
    text, tokenizer = written(with_tools), with_tools.service.tokenizer
    for length in range(1, len(tokenizer.encode(text, False)) + 1, 7):
        (choice,) = ask(with_tools, text, max_tokens=length)
        said = (choice.message.content or "", choice.message.tool_calls)
        assert choice.finish_reason == "length"
        assert said[0] or said[1]
    (choice,) = ask(with_tools, text, stop="rich")
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Zü'
    assert choice.finish_reason == "stop"


def test_a_stop_string_after_a_call_ends_with_the_call(with_tools: RunningServer) -> None:
    (choice,) = ask(with_tools, written(with_tools), stop="now")
    assert calls_of(choice) == [("weather", ZURICH)]
    assert choice.finish_reason == "tool_calls"


def test_log_probabilities_are_those_of_all_tokens(with_tools: RunningServer) -> None:
    text, tokenizer = written(with_tools), with_tools.service.tokenizer
    (choice,) = ask(with_tools, text, logprobs=True, top_logprobs=1)
    assert len(choice.logprobs.content) == len(tokenizer.encode(text, False)) + 1


def test_events_are_openais(with_tools: RunningServer) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "stream_options": {"include_usage": True}}
    with writing(with_tools.service.tokenizer, written(with_tools)):
        *events, last = with_tools.stream("/v1/chat/completions", **body)
    tokens = len(with_tools.service.tokenizer.encode(written(with_tools), False)) + 1
    assert last["usage"]["completion_tokens"] == tokens == len(events), "one token is one event"
    choices = [event["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices] == [None] * (tokens - 1) + ["tool_calls"]
    assert "role" in choices[0]["delta"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    named = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]["name"]) for call in named] == [
        (0, "weather"),
        (1, "now"),
    ]
    assert {call["type"] for call in named} == {"function"}
    for call in calls:
        assert call in named or set(call) == {"index", "function"}
        assert call in named or set(call["function"]) == {"arguments"}
    fragments = [call for call in calls if call["index"] == 0]
    assert len(fragments) > 5, "arguments come token by token"


def test_a_conversation_with_its_calls_goes_back_to_the_model(with_tools: RunningServer) -> None:
    (choice,) = ask(with_tools, written(with_tools))
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        for call in choice.message.tool_calls
    ]
    (choice,) = ask(
        with_tools, "Rain.", messages=[*MESSAGES, choice.message.model_dump(), *results]
    )
    assert choice.message.content == "Rain."


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0", "custom"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "no function"),
        (function(name=None), "tools.0.function.name", "None"),
        (function(name="a b"), "tools.0.function.name", "'a b'"),
        (function(name="x" * 65), "tools.0.function.name", "64"),
        (function(description=5), "tools.0.function.description", "int"),
        (function(parameters=[1]), "tools.0.function.parameters", "list"),
        (function(parameters={"type": "array"}), "tools.0.function.parameters", "'array'"),
        (function(strict="yes"), "tools.0.function.strict", "str"),
        ({"tools": [TOOLS[1], TOOLS[0], TOOLS[1]]}, "tools", "now"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any'"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "5"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "g",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ],
)
def test_malformed_tools_are_refused(
    with_tools: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    response = with_tools.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert response.status == 400
    assert response.error["param"] == param
    assert words in response.error["message"]
