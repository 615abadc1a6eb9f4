"""The table of docs/server.md that compares servers: megavm's column is what requests get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import model_with
from serving import RunningServer, assert_idle, running, wait_until

from megavm import LLM

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
PROMPT: Any = {"prompt": "Once upon a time", "max_tokens": 2}
CHAT: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BEGUN = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def both(fields: Any) -> list[tuple[str, Any]]:
    """A completion and a chat with these fields."""
    return [(COMPLETIONS, {**PROMPT, **fields}), (CHATS, {**CHAT, **fields})]


# The requests of each row; a row says yes if all get a 200, and otherwise their status.
ROWS: dict[str, list[tuple[str, Any]]] = {
    "`/v1/completions`, `/v1/chat/completions`": [(COMPLETIONS, PROMPT), (CHATS, CHAT)],
    "`/v1/responses`": [("/v1/responses", {"input": "Hello", "max_output_tokens": 2})],
    "`/v1/messages`": [("/v1/messages", CHAT)],
    "`/v1/messages/count_tokens`": [("/v1/messages/count_tokens", {"messages": CHAT["messages"]})],
    "`/v1/embeddings`": [("/v1/embeddings", {"input": "Hello"})],
    "`/metrics`": [("/metrics", None)],
    "`n`": [(COMPLETIONS, {**PROMPT, "n": 2}), (CHATS, {**CHAT, "n": 2})],
    "`best_of` above `n`": [(COMPLETIONS, {**PROMPT, "best_of": 2})],
    "`min_p`": [(COMPLETIONS, {**PROMPT, "min_p": 0.1}), (CHATS, {**CHAT, "min_p": 0.1})],
    "`logprobs` of the answer": [
        (COMPLETIONS, {**PROMPT, "logprobs": 2}),
        (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ],
    "`echo` with `logprobs`": [(COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 2})],
    "`prompt_logprobs`": [
        (COMPLETIONS, {**PROMPT, "prompt_logprobs": 2}),
        (CHATS, {**CHAT, "prompt_logprobs": 2}),
    ],
    "`truncate_prompt_tokens`": [
        (COMPLETIONS, {**PROMPT, "truncate_prompt_tokens": 2}),
        (CHATS, {**CHAT, "truncate_prompt_tokens": 2}),
    ],
    "`continue_final_message`": [
        (CHATS, {**CHAT, "messages": BEGUN, "continue_final_message": True})
    ],
    "`chat_template_kwargs`": [(CHATS, {**CHAT, "chat_template_kwargs": {"a": 1}})],
    "`logit_bias`": both({"logit_bias": {"300": 5}}),
    "`allowed_token_ids`": both({"allowed_token_ids": [300, 301]}),
    "`bad_words`": both({"bad_words": ["time"]}),
    "`tools` with `tool_choice` auto": [(CHATS, {**CHAT, "tools": TOOLS})],
    "`tool_choice` required": [(CHATS, {**CHAT, "tools": TOOLS, "tool_choice": "required"})],
    "`tool_choice` of a function's name": [(CHATS, {**CHAT, "tools": TOOLS, "tool_choice": NAMED})],
    "`response_format` json_object": both({"response_format": {"type": "json_object"}}),
    "`response_format` json_schema": [
        (CHATS, {**CHAT, "response_format": {"type": "json_schema", "json_schema": SCHEMA}})
    ],
    "a regular expression": both({"structured_outputs": {"regex": "[a-f]{4}"}}),
    "one of several texts": both({"structured_outputs": {"choice": ["yes", "no"]}}),
    "a grammar": both({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}),
    "images": [(CHATS, {**CHAT, "messages": [{"role": "user", "content": [IMAGE]}]})],
}


@pytest.fixture(scope="module")
def capable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model whose chat template knows tools."""
    directory = model_with(tmp_path_factory.mktemp("model"), TEMPLATE)
    with running(
        lambda progress: LLM(directory, dtype="float32", max_num_seqs=4), tool_call_parser="hermes"
    ) as server:
        wait_until(lambda: server.get("/ready").status == 200)
        yield server
        assert_idle(server)


def table() -> dict[str, str]:
    """megavm's column: feature to cell."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index("| feature | vLLM | llama.cpp server | SGLang | megavm |")
    rows: dict[str, str] = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[-1]
    return rows


def test_every_row_is_tried() -> None:
    assert table().keys() == ROWS.keys()


@pytest.mark.parametrize("feature", ROWS)
def test_a_row_says_what_a_request_gets(capable: RunningServer, feature: str) -> None:
    for path, body in ROWS[feature]:
        response = capable.get(path) if body is None else capable.post(path, body)
        cell = table()[feature]
        if response.status == 200:
            assert cell.startswith("yes"), response.content
        else:
            assert cell == f"no: {response.status}", response.content
