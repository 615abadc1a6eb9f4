"""/v1/messages: the `anthropic` package as the client, and the events of a stream."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from serving import RunningServer, assert_idle, serving, wait_until

from megavm import LLM, SamplingParams
from megavm.vm.machine import MachineFault

CHAT: Any = [{"role": "user", "content": "Hello"}]
ASK: Any = {
    "model": "stories",
    "messages": CHAT,
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
}
RAW = {"messages": CHAT, "max_tokens": 12, "temperature": 0}


def expected(llm: LLM, messages: Any = CHAT, **params: Any) -> Any:
    params = {"temperature": 0.0, "max_tokens": 12, **params}
    continued = messages[-1]["role"] == "assistant"
    return llm.chat(messages, SamplingParams(**params), continue_final_message=continued)[0]


def test_a_message_is_the_answer_of_chat(server: RunningServer, llm: LLM) -> None:
    message = server.anthropic().messages.create(**ASK)
    output = expected(llm)
    (block,) = message.content
    assert (block.type, block.text) == ("text", output.outputs[0].text)
    assert (message.type, message.role, message.model) == ("message", "assistant", "stories")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached == len(output.prompt_token_ids)
    assert usage.output_tokens == 12


def test_the_end_of_a_message_has_anthropic_s_reasons(server: RunningServer, llm: LLM) -> None:
    client = server.anthropic()
    whole = client.messages.create(**{**ASK, "max_tokens": 900})
    text = expected(llm, max_tokens=900).outputs[0].text
    assert (whole.stop_reason, whole.content[0].text) == ("end_turn", text)
    stop = text[20:31]
    cut = client.messages.create(stop_sequences=["not there", stop], **{**ASK, "max_tokens": 900})
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def test_the_events_of_a_stream_are_those_of_anthropic(server: RunningServer, llm: LLM) -> None:
    response = server.post("/v1/messages", {**RAW, "stream": True})
    assert b"[DONE]" not in response.content
    events = response.named_events
    assert list(dict.fromkeys(event["type"] for event in events)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    output = expected(llm)
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == len(output.prompt_token_ids)
    assert events[2]["content_block"] == {"type": "text", "text": ""}
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == output.outputs[0].text
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 12
    assert {event["index"] for event in events if "index" in event} == {0}


def test_the_streaming_helper_of_the_client_gets_the_message(
    server: RunningServer, llm: LLM
) -> None:
    with server.anthropic().messages.stream(**{**ASK, "max_tokens": 900}) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == expected(llm, max_tokens=900).outputs[0].text  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 12


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *CHAT]),
        (
            {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            [{"role": "system", "content": "a\nb"}, *CHAT],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
            CHAT,
        ),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "Once upon"}]},
            [*CHAT, {"role": "assistant", "content": "Once upon"}],
        ),
        (
            {
                "messages": [
                    *CHAT,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": "x"},
                            {"type": "text", "text": "Hi"},
                        ],
                    },
                    *CHAT,
                ]
            },
            [*CHAT, {"role": "assistant", "content": "Hi"}, *CHAT],
        ),
    ],
)
def test_blocks_are_messages_of_a_chat(
    server: RunningServer, llm: LLM, fields: Any, messages: Any
) -> None:
    client = server.anthropic()
    message = client.messages.create(**{**ASK, **fields})
    output = expected(llm, messages)
    assert message.content[0].text == output.outputs[0].text
    counted = client.messages.count_tokens(model="stories", **{"messages": CHAT, **fields})
    assert counted.input_tokens == len(output.prompt_token_ids)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_a_message_can_be_sent_back(server: RunningServer, llm: LLM) -> None:
    client = server.anthropic()
    first = client.messages.create(**ASK)
    said: Any = {"role": "assistant", "content": first.content}
    second = client.messages.create(**{**ASK, "messages": [*CHAT, said, *CHAT]})
    text = first.content[0].text
    messages = [*CHAT, {"role": "assistant", "content": text}, *CHAT]
    assert second.content[0].text == expected(llm, messages).outputs[0].text


def test_parameters_reach_the_sampler(server: RunningServer, llm: LLM) -> None:
    extra = {"temperature": 0.9, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    message = server.anthropic().messages.create(**{**ASK, "extra_body": extra})
    output = expected(llm, **extra).outputs[0]
    assert message.content[0].text == output.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "at least one message"),
        ({"messages": [5]}, "message 0 must be an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "must have the role"),
        ({"messages": [{"role": "user", "content": 5}]}, "must have a text or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 0 of the user holds a block of type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "message 0 holds a block of type 'text' without a text",
        ),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "maximum context length"),
        ({"system": 5}, "system holds a block of type 'int'"),
        ({"stop_sequences": ["x" * 300]}, "a stop string must have at most"),
        ({"stop_sequences": [""]}, "stop_sequences must hold strings"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking is not supported"),
        ({"output_config": {"effort": "high"}}, "output_config.effort is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "only custom is supported"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice has the type 'maybe'"),
        ({"tool_choice": {"type": "tool"}}, '{"type": "tool", "name": ...}, not'),
        ({"container": "c"}, "container is not supported"),
        ({"n": 2}, "n is not supported"),
        ({"temperature": -1}, "temperature must be"),
    ],
)
def test_what_is_not_supported_is_refused_in_anthropic_s_form(
    server: RunningServer, fields: dict[str, Any], said: str
) -> None:
    response = server.post("/v1/messages", {**RAW, **fields})
    assert response.status == 400
    assert response.anthropic_error["type"] == "invalid_request_error"
    assert said in response.anthropic_error["message"]


def test_errors_are_the_classes_of_the_client(server: RunningServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature must be"):
        server.anthropic().messages.create(**{**ASK, "extra_body": {"temperature": -1}})
    with pytest.raises(anthropic.NotFoundError, match="`claude` does not exist") as error:
        server.anthropic().messages.create(**{**ASK, "model": "claude"})
    assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    for path in ("/v1/messages", "/v1/messages/nothing", "/v1/messages/count_tokens"):
        assert server.get(path).anthropic_error["message"]
    assert server.get("/v1/messagesandmore").error


def test_a_key_may_come_as_anthropic_s_clients_send_it() -> None:
    with serving({"api_keys": ("secret",)}) as server:
        assert server.anthropic(api_key="secret").messages.create(**ASK).content
        bearer = server.anthropic(api_key=None, auth_token="secret")
        assert bearer.messages.create(**ASK).content
        assert server.client(api_key="secret").models.list().data
        assert server.get("/v1/models", x_api_key="secret").status == 200
        for headers in ({}, {"x_api_key": "wrong"}, {"x_api_key": ""}):
            response = server.post("/v1/messages", RAW, **headers)
            assert response.status == 401
            assert response.anthropic_error["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            server.anthropic(api_key="wrong").messages.create(**ASK)


def test_a_fault_is_an_error_of_the_client(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = server.engine.runner
    run, left = runner.run, [3]

    def fail_at_last(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise MachineFault("worker 0 gave up")
        run(*arguments)

    monkeypatch.setattr(runner, "run", fail_at_last)
    with pytest.raises(anthropic.InternalServerError, match="worker 0 gave up"):
        server.anthropic().messages.create(**ASK)
    left[0] = 3
    events: list[Any] = []
    with pytest.raises(anthropic.APIStatusError, match="worker 0 gave up"):
        events.extend(server.anthropic().messages.create(stream=True, **ASK))
    left[0] = 3
    *_, last = server.post("/v1/messages", {**RAW, "stream": True}).named_events
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_message(server: RunningServer, stream: bool) -> None:
    fields = {**RAW, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    connection = server.open("/v1/messages", **fields)
    wait_until(lambda: server.engine.num_running == 1)
    connection.close()
    assert_idle(server)


def test_metrics_count_messages(server: RunningServer) -> None:
    before = server.metric("http_requests_total", route="/v1/messages", status="200")
    server.anthropic().messages.create(**ASK)
    after = server.metric("http_requests_total", route="/v1/messages", status="200")
    assert after == before + 1
