"""Calls that must be made, or made strictly: a model that knows nothing of tools writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from scripts import model_with
from serving import RunningServer, assert_idle, running, wait_until

from megavm import LLM
from megavm.server.tools.grammars import calls_grammar
from megavm.server.tools.parsers import PARSERS
from megavm.server.tools.request import Function, ToolChoice, read_tool_choice

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "$defs": {"unit": {"enum": ["°C", "x::=y", 'a"b\\']}},
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "array", "items": {"enum": [1, -7]}, "maxItems": 3},
            "unit": {"$ref": "#/$defs/unit"},
            "exact": {"type": ["boolean", "null"]},
            "at": {
                "type": "object",
                "properties": {"lat": {"enum": [1.5, -2]}, "lon": {"type": "boolean"}},
                "required": ["lat", "lon"],
                "additionalProperties": False,
            },
        },
        "required": ["city", "unit", "at"],
    },
    "set_light": {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "level": {"type": "integer", "maximum": 9, "minimum": 0},
        },
        "required": ["level"],
    },
    "now": {},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module", params=sorted(PARSERS))
def with_tools(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of the shipped model, which has never seen a call, for each of the formats."""
    directory = model_with(tmp_path_factory.mktemp("model"), TEMPLATE)
    with running(
        lambda progress: LLM(directory, dtype="float32", max_num_seqs=8),
        tool_call_parser=request.param,
    ) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
        assert_idle(server)


def ask(server: RunningServer, **fields: Any) -> Any:
    """The choices of an answer; greedy or seeded, so that the streamed one is the same."""
    fields = {"model": "stories", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, **fields}
    whole = server.client().chat.completions.create(**fields)
    with server.client().chat.completions.stream(**fields) as stream:
        try:
            streamed = stream.get_final_completion()
        except openai.LengthFinishReasonError:
            return whole.choices
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert (one.message.content, one.finish_reason) == (
            other.message.content,
            other.finish_reason,
        )
        raw = [
            [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            for choice in (one, other)
        ]
        assert raw[0] == raw[1]
    return whole.choices


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or ()
    ]


def check(calls: list[tuple[str, Any]]) -> None:
    """The arguments must follow the schemas."""
    for name, arguments in calls:
        jsonschema_rs.validate(SCHEMAS[name], arguments)
        assert arguments.keys() <= SCHEMAS[name].get("properties", {}).keys()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_called_once(with_tools: RunningServer, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    for answer in ask(with_tools, tool_choice=choice, n=4, seed=7, temperature=1.5):
        calls = calls_of(answer)
        assert [call[0] for call in calls] == [name]
        assert answer.message.content is None
        assert answer.finish_reason == "tool_calls"
        check(calls)


def test_a_required_call_is_one_of_the_tools(with_tools: RunningServer) -> None:
    seen = set()
    for seed in range(3):
        for answer in ask(
            with_tools,
            tool_choice="required",
            parallel_tool_calls=False,
            n=4,
            seed=seed,
            temperature=5.0,
            top_p=1.0,
        ):
            calls = calls_of(answer)
            assert len(calls) == 1
            assert answer.message.content is None
            check(calls)
            seen.add(calls[0][0])
    assert len(seen) > 1


def test_several_calls_may_be_required(with_tools: RunningServer) -> None:
    small = TOOLS[1:]
    answers = ask(
        with_tools,
        tools=small,
        tool_choice="required",
        n=4,
        seed=1,
        temperature=2.0,
        max_tokens=120,
    )
    for answer in answers:
        assert answer.finish_reason in ("tool_calls", "length")
        calls = answer.message.tool_calls
        assert calls
        if answer.finish_reason == "tool_calls":
            check(calls_of(answer))


def named(name: str) -> Any:
    """A tool whose schema has an unknown type."""
    schema = {"type": "object", "properties": {"a": {"type": "strin"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_what_cannot_be_required_is_refused(with_tools: RunningServer) -> None:
    def refused(parameters: Any, **fields: Any) -> str:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", **fields}
        error = with_tools.post("/v1/chat/completions", body).error
        assert error["param"] == "tools"
        message: str = error["message"]
        return message

    message = refused({"type": "object", "properties": {"a": {"type": "strin"}}})
    assert message == "parameters of the tool f: Invalid type: strin"
    message = refused(
        {"type": "object", "properties": {"a": {"type": "strin"}}}, tools=[TOOLS[1], named("g")]
    )
    assert message == "parameters of the tool g: Invalid type: strin"
    # Each schema is short enough, all of them together are not.
    properties = {f"p{i}": {"type": "integer", "description": "x" * 500} for i in range(250)}
    long = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": name, "parameters": long}} for name in "abc"]
    assert "the schemas of the tools are too long" in refused({}, tools=tools)
    deep: Any = {}
    for _ in range(80):
        deep = {"type": "object", "properties": {"a": deep}}
    assert "nested" in refused(deep)
    assert "response_format" in refused({}, response_format={"type": "json_object"})


CALLS = {
    "hermes": '<tool_call>\n{"name": "set_light", "arguments": {"level": 3}}\n</tool_call>',
    "llama3_json": '{"name": "set_light", "parameters": {"level": 3}}',
    "pythonic": "[set_light(level=3)]",
}


def test_strict_arguments_follow_the_schema_where_the_model_may_choose(
    with_tools: RunningServer,
) -> None:
    """The grammar takes text, a good call, and no bad one."""
    llm, name = with_tools.llm, with_tools.service.settings.tool_call_parser or ""
    call = CALLS[name]
    functions = tuple(Function(f, schema, strict=f == "set_light") for f, schema in SCHEMAS.items())
    parser = PARSERS[name]
    choice = ToolChoice(functions, required=False, parallel=True)
    form = calls_grammar(parser.form, choice, parser.special_tokens, llm.tokenizer.special_id)
    assert form is not None
    grammar = llm.restrictions._grammars.compile(form)

    def accepted(text: str) -> bool:
        """Whether the grammar takes a whole text."""
        matcher = grammar.matcher()._matcher
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert accepted("I like [lists] < {sets} of things.\n")
    assert accepted(call)
    assert accepted(
        call.replace("set_light", "now").replace('"level": 3', "").replace("level=3", "")
    )
    assert not accepted(call.replace("3", "30"))
    assert not accepted(call.replace("3", "true"))
    assert not accepted("So: " + call.replace("3", "30"))
    if name == "hermes":
        assert accepted(f"So: {call}\n{call} done")


def test_without_strict_tools_any_text_may_be_written(with_tools: RunningServer) -> None:
    parser = PARSERS["hermes"]
    choice = ToolChoice((Function("f"),), required=False, parallel=True)
    assert calls_grammar(parser.form, choice, parser.special_tokens, lambda text: None) is None


def test_a_strict_tool_leaves_the_model_free_to_answer(with_tools: RunningServer) -> None:
    (answer,) = ask(with_tools, max_tokens=40, temperature=0, stop=["."])
    assert answer.message.content


def test_tools_are_read_in_a_time_that_grows_as_their_number() -> None:
    def seconds(count: int) -> float:
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
        begin = time.thread_time()
        read_tool_choice(tools, "auto", None)
        return time.thread_time() - begin

    few, many = (min(seconds(count) for _ in range(3)) for count in (1_000, 10_000))
    assert many < 40 * few  # 100 times if each name is compared with all others
