"""Conversations of agents: past tool calls and descriptions of tools, through a chat template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, assert_idle, running, wait_until

from megavm import LLM
from megavm.scheduler.llama.hub import resolve

# As Llama 3.1's template does: it asks whether the key is there, and writes arguments as JSON.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }});"
    "{% else %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
]
RENDERED = 'user: Hello;assistant: Hi;weather({"a": 1});tool: rain;'


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the shipped model with a template that knows tools."""
    directory = tmp_path_factory.mktemp("model")
    for file in Path(resolve("stories")).iterdir():
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with running(lambda progress: LLM(directory, dtype="float32")) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
        assert_idle(server)


def prompt(server: RunningServer, body: dict[str, Any]) -> str:
    """The prompt of a body, by /tokenize and /detokenize."""
    response = server.post("/tokenize", body)
    assert response.status == 200, response.content
    text: str = server.post("/detokenize", {"tokens": response.json["tokens"]}).json["prompt"]
    return text


def test_past_tool_calls_are_rendered_once(with_tools: RunningServer) -> None:
    assert prompt(with_tools, {"messages": MESSAGES}) == RENDERED


def test_tokenize_renders_tools(with_tools: RunningServer) -> None:
    text = prompt(with_tools, {"messages": MESSAGES, "tools": [TOOL]})
    assert text.endswith(";" + RENDERED)
    assert text.startswith('{"type": "function", "function": {"name": "weather"')
    response = with_tools.post("/tokenize", {"messages": MESSAGES, "tools": ["weather"]})
    assert response.error["param"].startswith("tools")


def test_a_chat_has_the_prompt_that_tokenize_shows(with_tools: RunningServer) -> None:
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        body = {"messages": MESSAGES, **more}
        count = with_tools.post("/tokenize", body).json["count"]
        answer = with_tools.post("/v1/chat/completions", {**body, "max_tokens": 1})
        assert answer.json["usage"]["prompt_tokens"] == count


def test_calls_of_an_unknown_format_are_refused(with_tools: RunningServer) -> None:
    error = with_tools.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}).error
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]


def test_completions_have_no_tools(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": "Hello", "tools": [TOOL]})
    assert response.error["param"] == "tools"


def test_a_template_that_renders_no_tools_is_refused(server: RunningServer) -> None:
    body = {"messages": MESSAGES[:1], "tools": [TOOL]}
    error = server.post("/v1/chat/completions", body).error
    assert error["param"] == "tools"
    assert "--chat-template" in error["message"]


def test_malformed_tool_calls_are_a_400(with_tools: RunningServer) -> None:
    malformed: list[Any] = ["call", [5], [{"function": {}}]]
    for calls in malformed:
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        response = with_tools.post("/v1/chat/completions", {"messages": [message]})
        assert response.error["param"] == "messages"
        assert "message 0" in response.error["message"]
