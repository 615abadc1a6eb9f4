"""Requests as benchmark clients send them: accepted, streamed, and counted as they count."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer

PROMPT = "Once upon a time"
PARTS = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
USAGE = {"include_usage": True}
CONTINUOUS = {**USAGE, "continuous_usage_stats": True}

# (client, path, body). Every body asks for eight tokens; `ignore_eos` comes as each client sends
# it, or as the option for extra fields that its manual advises.
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "guidellm 0.8",
        "/v1/completions",
        {
            "model": "stories",
            "stream": True,
            "stream_options": CONTINUOUS,
            "max_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "prompt": PROMPT,
        },
    ),
    (
        "guidellm 0.8",
        "/v1/chat/completions",
        {
            "model": "stories",
            "stream": True,
            "stream_options": CONTINUOUS,
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
            "messages": PARTS,
        },
    ),
    (
        "aiperf 0.13",
        "/v1/completions",
        {
            "prompt": PROMPT,
            "model": "stories",
            "stream": True,
            "max_tokens": 8,
            "ignore_eos": True,
            "stream_options": CONTINUOUS,
        },
    ),
    (
        "aiperf 0.13",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": PROMPT}],
            "model": "stories",
            "stream": True,
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "min_tokens": 8,
            "stream_options": USAGE,
        },
    ),
    (
        "vllm bench serve",
        "/v1/completions",
        {
            "model": "stories",
            "prompt": PROMPT,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    (
        "vllm bench serve",
        "/v1/chat/completions",
        {
            "model": "stories",
            "messages": PARTS,
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
        },
    ),
    (
        "genai-perf 0.0.16",
        "/v1/completions",
        {
            "model": "stories",
            "prompt": [PROMPT],
            "stream": True,
            "max_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
        },
    ),
    (
        "genai-perf 0.0.16",
        "/v1/chat/completions",
        {
            "model": "stories",
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": True,
            "max_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
        },
    ),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [request[1:] for request in REQUESTS],
    ids=[f"{client}{path}" for client, path, _ in REQUESTS],
)
def test_a_request_of_a_load_tool_gets_its_tokens_one_by_one(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    events = server.post(path, body).events
    tokens = [event for event in events if event["choices"]]
    assert len(tokens) == 8
    assert tokens[-1]["choices"][0]["finish_reason"] == "length"
    if "stream_options" in body:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 8
    if body.get("stream_options") == CONTINUOUS:
        assert [event["usage"]["completion_tokens"] for event in tokens] == list(range(1, 9))
