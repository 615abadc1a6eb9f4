"""Tools and JSON schemas in /v1/responses and /v1/messages, through the clients of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from scripts import model_with, writing
from serving import RunningServer, assert_idle, running, wait_until

from megavm import LLM

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %};{% endfor %}"
)
TOKENS = (("<tool_call>", False), ("</tool_call>", True))
ZURICH = {"city": "Zürich \U0001f327"}
CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ZURICH)}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "?",
        "parameters": CITY,
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False},
]
TOOLS: Any = [
    {"name": "weather", "description": "?", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object"}},
]
ASK: Any = {"model": "stories", "input": "Weather?", "tools": FUNCTIONS}
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]
SAY: Any = {"model": "stories", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model that writes calls as Hermes does, when a script tells it to."""
    directory = model_with(tmp_path_factory.mktemp("model"), TEMPLATE, TOKENS)
    with running(
        lambda progress: LLM(directory, dtype="float32", max_num_seqs=4), tool_call_parser="hermes"
    ) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
        assert_idle(server)


def prompt(server: RunningServer, messages: list[dict[str, Any]]) -> int:
    """Tokens of a chat's prompt without tools."""
    count: int = server.post("/tokenize", {"messages": messages}).json["count"]
    return count


@pytest.mark.parametrize("text", ["", "Well.\n"])
def test_calls_are_items_of_a_response(with_tools: RunningServer, text: str) -> None:
    client = with_tools.client()
    with writing(with_tools.service.tokenizer, text + CALLS):
        whole = client.responses.create(**ASK)
        with client.responses.stream(**ASK) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    answers: list[Any] = [whole, streamed]
    for answer in answers:
        *said, weather, now = answer.output
        assert [item.type for item in said] == ["message"] * bool(text)
        assert answer.output_text.strip() == text.strip()
        assert (weather.type, now.type) == ("function_call", "function_call")
        assert (weather.name, json.loads(weather.arguments)) == ("weather", ZURICH)
        assert (now.name, json.loads(now.arguments)) == ("now", {})
        assert weather.call_id != now.call_id
        assert answer.status == "completed"
    pieces = [e for e in events if e.type == "response.function_call_arguments.delta"]
    first = "".join(e.delta for e in pieces if e.output_index == bool(text))
    assert json.loads(first) == ZURICH
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments) for e in done] == [ZURICH, {}]


def test_results_of_calls_go_back_as_items(with_tools: RunningServer) -> None:
    client = with_tools.client()
    with writing(with_tools.service.tokenizer, CALLS):
        first = client.responses.create(**ASK)
    said: Any = [item.model_dump(exclude_none=True) for item in first.output]
    ids = [item["call_id"] for item in said]
    results = [{"type": "function_call_output", "call_id": i, "output": "rain"} for i in ids]
    given: Any = [*MESSAGES, *said, *results]
    answer = client.responses.create(model="stories", input=given, max_output_tokens=1)
    calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
        for i, n, a in zip(ids, ("weather", "now"), (ZURICH, {}), strict=True)
    ]
    chat = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": i, "content": "rain"} for i in ids),
    ]
    assert answer.usage is not None
    assert answer.usage.input_tokens == prompt(with_tools, chat)


@pytest.mark.parametrize("text", ["", "Well.\n"])
def test_calls_are_blocks_of_a_message(with_tools: RunningServer, text: str) -> None:
    client = with_tools.anthropic()
    with writing(with_tools.service.tokenizer, text + CALLS):
        whole = client.messages.create(**SAY)
        with client.messages.stream(**SAY) as stream:
            streamed = stream.get_final_message()
    messages: list[Any] = [whole, streamed]
    for message in messages:
        *said, weather, now = message.content
        assert [block.type for block in said] == ["text"] * bool(text)
        assert (weather.type, now.type) == ("tool_use", "tool_use")
        assert (weather.name, weather.input) == ("weather", ZURICH)
        assert (now.name, now.input) == ("now", {})
        assert message.stop_reason == "tool_use"


def test_results_of_calls_go_back_as_blocks(with_tools: RunningServer) -> None:
    client = with_tools.anthropic()
    with writing(with_tools.service.tokenizer, CALLS):
        first = client.messages.create(**SAY)
    ids = [block.id for block in first.content if block.type == "tool_use"]
    results: Any = [{"type": "tool_result", "tool_use_id": i, "content": "rain"} for i in ids]
    content = [*results, {"type": "text", "text": "And?"}]
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": content},
    ]
    counted = client.messages.count_tokens(model="stories", messages=messages)
    calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
        for i, n, a in zip(ids, ("weather", "now"), (ZURICH, {}), strict=True)
    ]
    chat = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": i, "content": "rain"} for i in ids),
        {"role": "user", "content": "And?"},
    ]
    assert counted.input_tokens == prompt(with_tools, chat)


def test_a_call_that_max_tokens_cuts_loses_nothing(with_tools: RunningServer) -> None:
    for length in range(1, 40, 3):
        with writing(with_tools.service.tokenizer, CALLS):
            fields = {**SAY, "max_tokens": length}
            whole = with_tools.post("/v1/messages", fields)
            streamed = with_tools.post("/v1/messages", {**fields, "stream": True}).named_events
            response = with_tools.post("/v1/responses", {**ASK, "max_output_tokens": length})
        assert whole.status == response.status == 200
        assert whole.json["stop_reason"] == streamed[-2]["delta"]["stop_reason"] == "max_tokens"
        assert response.json["status"] == "incomplete"
        started = [e["content_block"] for e in streamed if e["type"] == "content_block_start"]
        assert [b["type"] for b in whole.json["content"]] == [b["type"] for b in started]


class Answer(BaseModel):
    """A form for an answer; whatever the model wants to say, few tokens are enough."""

    kind: Literal["sun", "rain"]
    sure: bool


def test_a_response_has_the_form_that_the_client_parses(server: RunningServer) -> None:
    client = server.client()
    answer = client.responses.parse(
        model="stories", input="Weather?", text_format=Answer, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Answer)
    text: Any = answer.to_dict()["text"]
    assert text["format"]["type"] == "json_schema"
    refused = {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}
    response = server.post("/v1/responses", {"input": "x", "text": {"format": refused}})
    assert response.status == 400
    assert response.error["param"] == "text.format"
    response = server.post("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}})
    assert response.error["param"] == "text.format"
    assert response.error["message"].startswith("text.format must have the type text, ")


def test_a_message_has_the_form_of_its_output_config(server: RunningServer) -> None:
    form: Any = {"type": "json_schema", "schema": Answer.model_json_schema()}
    fields = {"messages": MESSAGES, "max_tokens": 200, "output_config": {"format": form}}
    message = server.post("/v1/messages", fields).json
    assert Answer.model_validate_json(message["content"][0]["text"])


@pytest.mark.parametrize("arguments", ['{"a": oops}', '{"a": 1,}', '{"a": 1e400}', '{"a": NaN}'])
def test_a_message_with_malformed_arguments_has_a_call_without_any(
    with_tools: RunningServer, arguments: str
) -> None:
    written = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    with writing(with_tools.service.tokenizer, written):
        whole = with_tools.post("/v1/messages", SAY)
        streamed = with_tools.post("/v1/messages", {**SAY, "stream": True}).named_events
    assert whole.status == 200, whole.content
    (call,) = whole.json["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {})
    pieces = [e["delta"] for e in streamed if e["type"] == "content_block_delta"]
    assert "".join(piece["partial_json"] for piece in pieces).startswith(arguments)
