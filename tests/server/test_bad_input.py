"""Bad input gets a sentence and a status below 500, and costs no neighbour anything."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, assert_idle, serving

from megavm import LLM, SamplingParams
from megavm.server import unsupported

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Hello"}]
HUGE = 10**400

# (field, value): each of them alone is wrong, in completions.
BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", HUGE),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", HUGE),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("n", 0),
    ("n", 129),
    ("n", HUGE),
    ("seed", 1 << 63),
    ("seed", "seven"),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", {"a": "b"}),
    ("stop", ["x"] * 17),
    ("stop", ["x" * 257]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", list(range(5000))),
    ("stop_token_ids", {}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("min_tokens", 100),
    ("ignore_eos", "yes"),
    ("echo", 1),
    ("stream", "true"),
    ("stream_options", []),
    ("stream_options", {"include_usage": True}),
    ("best_of", 0),
    ("best_of", 129),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", "5"),
    ("suffix", "end"),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"99999": 1}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2048]),
    ("bad_words", [" "]),
    ("bad_words", "fox"),
    ("guided_json", {"type": "objekt"}),
    ("guided_json", "{"),
    ("guided_regex", "(a"),
    ("guided_choice", []),
    ("guided_grammar", "start: nothing"),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": {}, "regex": "a"}),
    ("structured_outputs", {"xml": "a"}),
    ("structured_outputs", {"regex": 5}),
    ("structured_outputs", {"structural_tag": {"triggers": ["<"], "structures": []}}),
    ("use_beam_search", True),
    ("prompt", None),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", {"text": "x"}),
    ("prompt", [1.5, 2]),
    ("prompt", [True]),
    ("prompt", [-1]),
    ("prompt", [2048]),
    ("prompt", [HUGE]),
    ("prompt", ["a", 5]),
    ("prompt", [[1], ["a"]]),
    ("prompt", [[1], None]),
    ("prompt", [1] * 1024),
    ("prompt", ["a"] * 300),
    ("prompt", "word " * 2000),
    ("model", 5),
]


@pytest.fixture(scope="module", autouse=True)
def neighbour(server: RunningServer, llm: LLM) -> Iterator[None]:
    """A request that generates all the while; in the end it must have lost nothing."""
    # Soon enough for the client's limit of time, on a busy computer too.
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    expected = llm.generate(PROMPT, params)[0].outputs[0].text
    fields = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
    ended, results = threading.Event(), []

    def work() -> None:
        while not ended.is_set():
            results.append(server.complete(**fields)["choices"][0]["text"])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join(60)
    assert results
    assert set(results) == {expected}


@pytest.mark.parametrize(
    ("field", "value"), BAD_FIELDS, ids=[f"{f}-{str(v)[:20]}" for f, v in BAD_FIELDS]
)
def test_a_bad_field_is_named(server: RunningServer, field: str, value: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, field: value}
    response = server.post("/v1/completions", body)
    assert response.status == 400, response.content[:300]
    assert response.error["type"] == "invalid_request_error"
    assert response.error["param"] == field
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
        ({}, "messages"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": 1}, "logprobs"),
        ({"messages": CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": CHAT, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": CHAT, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"messages": CHAT, "best_of": 2, "stream": True}, "best_of"),
        ({"messages": CHAT, "best_of": 2, "n": 3}, "best_of"),
        (
            {"messages": CHAT, "max_tokens": 1024, "truncate_prompt_tokens": -1},
            "truncate_prompt_tokens",
        ),
        (
            {"messages": CHAT, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
    ],
)
def test_a_bad_conversation_is_refused(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = server.post("/v1/chat/completions", fields)
    assert response.status == 400, response.content[:300]
    assert response.error["param"] == param


# Fields that other servers take and that would change the answer.
UNSUPPORTED: dict[str, Any] = {
    # OpenAI
    "functions": [{"name": "f"}],
    "verbosity": "low",
    # vLLM
    "cache_salt": "x",
    "documents": [{"title": "a", "text": "b"}],
    "logprob_token_ids": [5],
    "prompt_embeds": "AAAA",
    "repetition_detection": {"max_pattern_size": 4},
    "return_tokens_as_token_ids": True,
    "thinking_token_budget": 5,
    "truncation_side": "right",
    # SGLang
    "custom_logit_processor": "x",
    "ebnf": "root ::= 'a'",
    "input_ids": [5],
    "json_schema": '{"type": "object"}',
    "lora_path": "x",
    "no_stop_trim": True,
    "regex": "a*",
    "return_hidden_states": True,
    "session_params": {"id": "x"},
    "stop_regex": "a*",
    # others
    "length_penalty": 0.5,
    "no_repeat_ngram_size": 3,
    "top_a": 0.2,
    # llama.cpp
    "dry_multiplier": 0.8,
    "dynatemp_range": 0.5,
    "grammar": "root ::= 'a'",
    "lora": [{"id": 0, "scale": 1.0}],
    "min_keep": 2,
    "mirostat": 2,
    "n_indent": 4,
    "n_predict": 5,
    "n_probs": 3,
    "penalize_nl": True,
    "repeat_last_n": 64,
    "repeat_penalty": 1.1,
    "samplers": ["top_k"],
    "t_max_predict_ms": 100,
    "tfs_z": 0.5,
    "top_n_sigma": 1.0,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
}
# Values of such fields that ask for nothing.
NEUTRAL: dict[str, Any] = {
    "bad_words": [],
    "dry_multiplier": 0.0,
    "dynatemp_range": 0,
    "grammar": "",
    "json_schema": None,
    "lora": [],
    "mirostat": 0,
    "regex": None,
    "repeat_penalty": 1.0,
    "response_format": {"type": "text"},
    "return_hidden_states": False,
    "t_max_predict_ms": -1,
    "thinking_token_budget": -1,
    "tool_choice": "none",
    "tools": [],
    "tfs_z": 1.0,
    "top_n_sigma": -1,
    "truncation_side": "left",
    "typical_p": 1,
    "xtc_probability": 0.0,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_of_another_server_that_would_change_the_answer_is_refused(
    server: RunningServer, path: str
) -> None:
    source = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    for name, value in UNSUPPORTED.items():
        response = server.post(path, {**source, "max_tokens": 2, name: value})
        assert response.status == 400, name
        assert response.error["param"] == name
        assert response.error["message"].startswith(f"{name} is not supported by this server")
    assert server.post(path, {**source, "max_tokens": 2, **NEUTRAL}).status == 200


def test_the_documentation_names_every_field_that_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    for name in unsupported.UNSUPPORTED:
        assert f"`{name}`" in text, name


def test_a_name_of_another_server_is_answered_with_ours(server: RunningServer) -> None:
    for name, value, ours in (
        ("n_predict", 5, "max_tokens"),
        ("max_new_tokens", 5, "max_tokens"),
        ("max_completion_tokens", 5, "max_tokens"),
        ("repeat_penalty", 1.2, "repetition_penalty"),
    ):
        error = server.post("/v1/completions", {"prompt": PROMPT, name: value}).error
        assert error["message"] == f"{name} is not supported by this server, use {ours}"


def test_tokenize_refuses_what_would_change_the_prompt_only(server: RunningServer) -> None:
    body = {"messages": CHAT, "guided_regex": "a*", "logit_bias": {"5": 1}}
    assert server.post("/tokenize", body).status == 200
    response = server.post("/tokenize", {"messages": CHAT, "truncate_prompt_tokens": 5})
    assert response.error["param"] == "truncate_prompt_tokens"


def test_harmless_values_are_taken(server: RunningServer) -> None:
    plain: dict[str, Any] = {"messages": CHAT, "temperature": 0, "max_tokens": 5}
    expected = server.post("/v1/chat/completions", plain).json["choices"][0]["message"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for more in (
        {"logprobs": False, "top_logprobs": 0},
        {"tools": tools, "tool_choice": "none"},
        {"max_tokens": 5.0, "n": 1.0, "top_k": 0.0, "seed": 7.0},
        {"max_tokens": None, "max_completion_tokens": 5.0},
        {"tool_choice": "auto"},
    ):
        response = server.post("/v1/chat/completions", {**plain, **more})
        assert response.status == 200, response.content
        assert response.json["choices"][0]["message"] == expected
        assert response.json["usage"]["completion_tokens"] == 5


def test_special_tokens_of_a_prompt_may_be_left_out(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json["tokens"]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
    without = server.complete(add_special_tokens=False, **fields)
    assert without["usage"]["prompt_tokens"] == len(ids) - 1
    assert (
        without["choices"][0]["text"]
        == server.complete(prompt=ids[1:], **fields)["choices"][0]["text"]
    )
    chat = {"messages": CHAT, **fields}
    plain = server.post("/v1/chat/completions", chat).json["usage"]["prompt_tokens"]
    response = server.post("/v1/chat/completions", {**chat, "add_special_tokens": True})
    assert response.json["usage"]["prompt_tokens"] == plain + 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"prompt"',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} trailing',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": [' + b"9" * 50_000 + b"]}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"\x00" * 100,
        b"\xef\xbb\xbf{}",
        b'{"prompt": "a", "stop_token_ids": [' + b'"x",' * 500_000 + b'"x"]}',
        b'{"prompt": [' + b'"x",' * 500_000 + b"1]}",
        b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
    ],
    ids=range(24),
)
def test_a_malformed_body_is_refused(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/detokenize"):
        response = server.send("POST", path, body, content_type="application/json")
        assert response.status == 400, response.content[:300]
        assert response.error
        assert len(response.content) < 1000


def test_a_body_that_is_not_json_by_its_type_is_refused(server: RunningServer) -> None:
    body = json.dumps({"prompt": PROMPT})
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = server.send("POST", "/v1/completions", body, content_type=media_type)
        assert response.status == 400
        assert "content-type" in response.error["message"]


def test_a_body_of_10_mb_is_too_large(server: RunningServer) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000})
    response = server.send("POST", "/v1/completions", body, content_type="application/json")
    assert response.status == 413
    assert "4194304 bytes" in response.error["message"]


def test_a_body_that_does_not_say_how_large_it_is_is_measured(server: RunningServer) -> None:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    pieces = (b"x" * 65536 for _ in range(100))
    client.request(
        "POST",
        "/v1/completions",
        pieces,
        {"content-type": "application/json", "transfer-encoding": "chunked"},
        encode_chunked=True,
    )
    answer = client.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "request_too_large"
    client.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/profile"])
def test_a_wrong_method_gets_an_error_object(server: RunningServer, path: str) -> None:
    response = server.get(path)
    assert response.status == 405
    assert response.headers["allow"] == "POST"
    assert response.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/models/gpt-4", "/v1/%00", "/docs"])
def test_an_unknown_path_gets_an_error_object(server: RunningServer, path: str) -> None:
    response = server.get(path)
    assert response.status == 404
    assert response.error


def test_null_is_as_good_as_nothing_and_unknown_fields_are_taken(server: RunningServer) -> None:
    nothing = dict.fromkeys(
        ("max_tokens", "temperature", "logprobs", "stop", "seed", "n", "suffix", "logit_bias")
    )
    plain = {"temperature": 0, "max_tokens": 5}
    more = {**nothing, **plain, "user": "me", "brand_new_field": [1, {"x": None}], "tools": []}
    assert (
        server.complete(**more)["choices"][0]["text"]
        == server.complete(**plain)["choices"][0]["text"]
    )


def test_an_empty_text_is_the_token_that_begins_a_text(server: RunningServer) -> None:
    assert server.complete(prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1


def test_what_the_template_refuses_is_said_without_the_place_of_the_model(
    server: RunningServer,
) -> None:
    messages = [{"role": "wizard", "content": "Hello"}]
    error = server.post("/v1/chat/completions", {"messages": messages}).error
    assert error["message"] == "the chat template of stories failed: Unsupported role: wizard"
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "x" * 500_000, "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 500_000}]}]},
        {"messages": CHAT, "logit_bias": {"x" * 500_000: "y"}},
    ],
    ids=["role", "part", "bias"],
)
def test_an_error_does_not_repeat_what_is_long(
    server: RunningServer, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "megavm"):
        response = server.post("/v1/chat/completions", fields)
    assert response.status == 400
    assert response.error["message"]
    assert len(response.content) < 1000
    assert all(len(str(record.__dict__)) < 3000 for record in caplog.records)


def test_bad_tokens_are_refused(server: RunningServer) -> None:
    for tokens in ([-1], ["a"], [1 << 32], [HUGE], "abc", None, [[1]]):
        response = server.post("/detokenize", {"tokens": tokens})
        assert response.status == 400
        assert response.error["param"] == "tokens"
    for body in ({}, {"prompt": "a", "messages": CHAT}, {"messages": 5}, {"prompt": 5}):
        assert server.post("/tokenize", body).status == 400


def test_a_long_text_is_read_while_others_go_on() -> None:
    with serving() as server:
        text = "word and word " * 200_000
        body = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 5}
        statuses: list[int] = []
        thread = threading.Thread(
            target=lambda: statuses.append(server.post("/v1/completions", body).status)
        )
        thread.start()
        others = 0
        while thread.is_alive():
            server.complete(max_tokens=2)
            others += 1
        assert statuses == [200]
        assert others > 5
        assert_idle(server)


def test_what_takes_long_is_done_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        threads: dict[str, set[str]] = {"encode": set(), "decode": set(), "token_text": set()}
        tokenizer = server.service.tokenizer
        for name, seen in threads.items():
            monkeypatch.setattr(tokenizer, name, _watched(getattr(tokenizer, name), seen))
        echo = {"echo": True, "logprobs": 5, "max_tokens": 1}
        for prompts in (["word and word " * 10] * 50, [[5, 6, 7] * 30] * 50):
            answer = server.complete(prompt=prompts, **echo)
            assert [choice["index"] for choice in answer["choices"]] == list(range(50))
        text = "word and word " * 3000
        answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
        assert answer["tokens"] == server.llm.tokenizer.encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 8192
        assert "".join(answer["token_strs"][1:]) == text
        for name in threads:
            assert all(thread.startswith("megavm-reader") for thread in threads[name]), name
        assert_idle(server)


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        tokenizer, lengths = server.service.tokenizer, list[int]()
        encode, tokens = tokenizer.encode, server.service.context

        def watched(text: str, *given: Any) -> list[int]:
            lengths.append(len(text))
            return encode(text, *given)

        monkeypatch.setattr(tokenizer, "encode", watched)
        text = "word and word " * 20_000
        messages = [{"role": "user", "content": text}]
        for path, field, body in (
            ("/v1/completions", "prompt", {"prompt": ["short", text], "max_tokens": 5}),
            ("/v1/completions", "prompt", {"prompt": text, "max_tokens": 5, "stream": True}),
            ("/v1/chat/completions", "messages", {"messages": messages, "max_tokens": 5}),
            ("/v1/responses", "input", {"input": text, "max_output_tokens": 5}),
        ):
            error = server.post(path, body).error
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert (
                f"maximum context length is {tokens} tokens. However, you requested at least"
                in (error["message"])
            )
        body = {"messages": messages, "max_tokens": 5}
        assert "context length" in server.post("/v1/messages", body).anthropic_error["message"]
        assert lengths == []
        # Whatever has room is tokenized and counted.
        body = {"prompt": "a " * tokens, "max_tokens": 5}
        assert "you requested at least" not in server.post("/v1/completions", body).error["message"]
        assert server.complete(prompt=text, max_tokens=1, truncate_prompt_tokens=5)
        assert server.post("/tokenize", {"prompt": text}).json["count"] > 20_000
        assert server.post("/v1/messages/count_tokens", {"messages": messages}).status == 200
        assert len(lengths) == 4
        assert_idle(server)


def _watched(function: Callable[..., Any], threads: set[str]) -> Callable[..., Any]:
    """`function`, which notes the threads of the server that call it, but for the engine's."""

    def watched(*given: Any, **named: Any) -> Any:
        name = threading.current_thread().name
        if name != "megavm-engine":
            threads.add(name)
        return function(*given, **named)

    return watched
