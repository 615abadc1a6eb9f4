"""Tools with clients that nobody here wrote: openai's helpers and LangChain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from scripts import model_with, writing
from serving import RunningServer, assert_idle, running, wait_until

from megavm import LLM

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
WRITTEN = (
    'I look.\n<tool_call>\n{"name": "Weather", "arguments": {"city": "Köln", "unit": "C"}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bern", "unit": "F"}}\n</tool_call>'
)
CITIES = [{"city": "Köln", "unit": "C"}, {"city": "Bern", "unit": "F"}]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather?"}]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Köln", "Bern"]
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model with calls as Hermes and Qwen write them."""
    directory = model_with(tmp_path_factory.mktemp("model"), TEMPLATE)
    with running(
        lambda progress: LLM(directory, dtype="float32"), tool_call_parser="hermes"
    ) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
        assert_idle(server)


def test_openais_parse_gives_objects(with_tools: RunningServer) -> None:
    fields: dict[str, Any] = {
        "model": "stories",
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Weather)],
    }
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "Weather"}}]
    for choice in choices:
        answer = with_tools.client().chat.completions.parse(
            **fields, tool_choice=choice, parallel_tool_calls=False, seed=1
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)


def test_openais_stream_helper_reports_each_call(with_tools: RunningServer) -> None:
    fields: dict[str, Any] = {
        "model": "stories",
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": "auto",
    }
    texts: list[str] = []
    done: list[Any] = []
    with (
        writing(with_tools.service.tokenizer, WRITTEN),
        with_tools.client().chat.completions.stream(**fields) as stream,
    ):
        for event in stream:
            if event.type == "content.delta":
                texts.append(event.delta)
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.index, event.name, json.loads(event.arguments)))
    assert "".join(texts) == "I look."
    assert done == [(i, "Weather", city) for i, city in enumerate(CITIES)]


def test_langchain_binds_tools(with_tools: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{with_tools.url}/v1", api_key="none", model="stories", seed=1, max_retries=0
    )
    with writing(with_tools.service.tokenizer, WRITTEN):
        bound = chat.bind_tools([Weather])
        answer = bound.invoke("What is the weather?")
        chunks = list(bound.stream("What is the weather?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    for message in (answer, whole):
        assert message.content == "I look."
        assert [call["args"] for call in message.tool_calls] == CITIES
        assert [call["name"] for call in message.tool_calls] == ["Weather"] * 2
        assert all(call["id"] for call in message.tool_calls)
        assert not message.invalid_tool_calls
    forced = chat.bind_tools([Weather], tool_choice="Weather").invoke("What is the weather?")
    assert Weather(**forced.tool_calls[0]["args"])
    structured = chat.with_structured_output(Weather, method="function_calling")
    assert isinstance(structured.invoke("What is the weather?"), Weather)


def test_instructor_in_its_default_mode(with_tools: RunningServer) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(with_tools.client())
    found = client.chat.completions.create(
        model="stories", messages=MESSAGES, response_model=Weather, max_retries=0, seed=1
    )
    assert isinstance(found, Weather)


def test_litellm_chats_streams_and_calls_tools(
    with_tools: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it fetches prices
    litellm = pytest.importorskip("litellm")
    where = {
        "model": "openai/stories",
        "api_base": f"{with_tools.url}/v1",
        "api_key": "none",
        "num_retries": 0,
    }
    short: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 12}
    right = with_tools.client().chat.completions.create(model="stories", **short)
    whole = litellm.completion(**where, **short)
    assert whole.choices[0].message.content == right.choices[0].message.content
    assert right.usage is not None
    assert whole.usage.completion_tokens == right.usage.completion_tokens
    chunks = list(litellm.completion(**where, **short, stream=True))
    joined = litellm.stream_chunk_builder(chunks)
    assert joined.choices[0].message.content == right.choices[0].message.content

    # Not strict: the machine would follow a grammar that the text written here does not.
    function = {"name": "Weather", "parameters": Weather.model_json_schema()}
    tools = [{"type": "function", "function": function}]
    with writing(with_tools.service.tokenizer, WRITTEN):
        called = litellm.completion(**where, messages=MESSAGES, tools=tools)
        parts = list(litellm.completion(**where, messages=MESSAGES, tools=tools, stream=True))
    for answer in (called, litellm.stream_chunk_builder(parts)):
        calls = answer.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == CITIES
        assert answer.choices[0].finish_reason == "tool_calls"

    schema = {"name": "weather", "schema": Weather.model_json_schema()}
    structured = litellm.completion(
        **where,
        messages=MESSAGES,
        seed=1,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    Weather.model_validate_json(structured.choices[0].message.content)
