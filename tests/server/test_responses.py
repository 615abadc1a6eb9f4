"""/v1/responses: the `openai` package as the client, and the order of the events."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from serving import RunningServer, assert_idle, serving, wait_until

from megavm import LLM, SamplingParams
from megavm.vm.machine import MachineFault

ASK: Any = {"model": "stories", "input": "Hello", "temperature": 0, "max_output_tokens": 12}
CHAT: Any = [{"role": "user", "content": "Hello"}]


def expected(llm: LLM, messages: Any = CHAT, **params: Any) -> Any:
    return llm.chat(messages, SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}))[0]


def test_a_response_is_the_answer_of_chat(server: RunningServer, llm: LLM) -> None:
    answer = server.client().responses.create(**ASK)
    output = expected(llm)
    assert answer.output_text == output.outputs[0].text
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.model, answer.status) == ("response", "stories", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(output.prompt_token_ids)
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == 12 + len(output.prompt_token_ids)
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    params = llm.default_params(temperature=0.0)
    assert (answer.temperature, answer.top_p) == (0, params.top_p)
    assert answer.max_output_tokens == 12


def test_a_response_that_ends_by_itself_is_completed(server: RunningServer, llm: LLM) -> None:
    answer = server.client().responses.create(model="stories", input="Hello", temperature=0)
    output = expected(llm, max_tokens=None).outputs[0]
    assert (answer.output_text, answer.status) == (output.text, "completed")
    assert answer.incomplete_details is None
    assert answer.output[0].status == "completed"  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(output.token_ids)


ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.mark.parametrize("end", ["incomplete", "completed"])
def test_the_events_of_a_stream_come_in_the_order_of_openai(
    server: RunningServer, end: str
) -> None:
    fields = {"input": "Hello", "temperature": 0, "stream": True}
    if end == "incomplete":
        fields["max_output_tokens"] = 12
    response = server.post("/v1/responses", fields)
    assert b"[DONE]" not in response.content
    events = response.named_events
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == [*ORDER, f"response.{end}"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    text = "".join(event["delta"] for event in deltas)
    done = {event["type"]: event for event in events}
    assert done["response.output_text.done"]["text"] == text
    assert done["response.content_part.done"]["part"]["text"] == text
    assert done["response.output_item.done"]["item"]["content"][0]["text"] == text
    assert done["response.output_item.added"]["item"]["content"] == []
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    last = events[-1]["response"]
    assert last["status"] == end
    assert last["output"] == [done["response.output_item.done"]["item"]]
    assert events[0]["response"]["id"] == last["id"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["usage"] is None
    del fields["stream"]
    whole = server.post("/v1/responses", fields).json
    assert whole["output"][0]["content"] == last["output"][0]["content"]
    counts = ("input_tokens", "output_tokens", "total_tokens")  # the prompt may be cached now
    assert [whole["usage"][key] for key in counts] == [last["usage"][key] for key in counts]


def test_the_streaming_helper_of_the_client_gets_the_answer(
    server: RunningServer, llm: LLM
) -> None:
    client = server.client()
    with client.responses.stream(model="stories", input="Hello", temperature=0) as stream:
        pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    text = expected(llm, max_tokens=None).outputs[0].text
    assert "".join(pieces) == final.output_text == text
    assert final.status == "completed"
    events = list(client.responses.create(stream=True, **ASK))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected(llm).outputs[0].text


def test_an_answer_without_text_has_an_empty_part(server: RunningServer, llm: LLM) -> None:
    fields = {**ASK, "stop": [expected(llm).outputs[0].text[:5]]}
    whole = server.post("/v1/responses", fields).json
    assert whole["output"][0]["content"][0]["text"] == ""
    assert whole["status"] == "completed"
    events = server.post("/v1/responses", {**fields, "stream": True}).named_events
    kinds = [event["type"] for event in events]
    assert kinds == [*(kind for kind in ORDER if "delta" not in kind), "response.completed"]
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


@pytest.mark.parametrize(
    ("given", "instructions", "messages"),
    [
        ([{"role": "user", "content": "Hello"}], None, CHAT),
        ("Hello", "Be brief.", [{"role": "system", "content": "Be brief."}, *CHAT]),
        (
            [{"role": "developer", "content": [{"type": "input_text", "text": "x"}]}, *CHAT],
            "Be brief.",
            [{"role": "system", "content": "Be brief.\n\nx"}, *CHAT],
        ),
        (
            [
                {"type": "message", "role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Ho", "annotations": []}],
                },
                {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            ],
            None,
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho"},
                {"role": "user", "content": "Hello"},
            ],
        ),
    ],
)
def test_items_of_the_input_are_messages_of_a_chat(
    server: RunningServer, llm: LLM, given: Any, instructions: str | None, messages: Any
) -> None:
    fields = {**ASK, "input": given, "instructions": instructions}
    answer = server.client().responses.create(**fields)
    output = expected(llm, messages)
    assert answer.output_text == output.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(output.prompt_token_ids)
    assert answer.instructions == instructions


def test_an_answer_can_be_sent_back_as_input(server: RunningServer, llm: LLM) -> None:
    client = server.client()
    first = client.responses.create(**ASK)
    said = [item.model_dump() for item in first.output]
    conversation: Any = [*CHAT, *said, {"role": "user", "content": "More"}]
    second = client.responses.create(**{**ASK, "input": conversation})
    messages = [
        *CHAT,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "More"},
    ]
    assert second.output_text == expected(llm, messages).outputs[0].text


def test_log_probabilities_of_a_response_are_those_of_chat(server: RunningServer) -> None:
    include: Any = ["message.output_text.logprobs"]
    client = server.client()
    answer = client.responses.create(include=include, top_logprobs=2, **ASK)
    chat = client.chat.completions.create(
        model="stories", messages=CHAT, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
    )
    output: Any = answer.output
    found = output[0].content[0].logprobs
    assert chat.choices[0].logprobs is not None
    wanted = chat.choices[0].logprobs.content or []
    assert [(e.token, e.logprob) for e in found] == [(e.token, e.logprob) for e in wanted]
    assert all(len(entry.top_logprobs) == 2 for entry in found)
    fields = {**ASK, "include": include, "stream": True}
    events = server.post("/v1/responses", fields).named_events
    streamed = [e for event in events if "delta" in event for e in event["logprobs"]]
    assert [e["logprob"] for e in streamed] == [e.logprob for e in wanted]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == streamed


def test_fields_of_vllm_reach_the_sampler(server: RunningServer, llm: LLM) -> None:
    extra = {"top_k": 5, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.1, "stop": ["."]}
    fields = {**ASK, "temperature": 1, "max_output_tokens": 40}
    answer = server.client().responses.create(extra_body=extra, **fields)
    output = expected(llm, temperature=1.0, max_tokens=40, **extra).outputs[0]
    assert answer.output_text == output.text


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort is not"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tool 0 has the type 'web_search'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", '"name": ...}, not'),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required, or the object"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input",
            "holds a part of type 'input_text' without a text",
        ),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "a text or a list"),
        ({"input": [5]}, "input", "item 0 of input must be an object"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input", "must have a role of"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "must have a text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "holds a part of type 'input_image'",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        ({"input": "word " * 2000}, "input", "in the input"),
        ({"model": "gpt-4"}, "model", "does not exist"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str, said: str
) -> None:
    response = server.post("/v1/responses", {"input": "Hello", **fields})
    assert response.status in (400, 404)
    assert response.error["param"] == param
    assert said in response.error["message"]


def test_nothing_is_stored(server: RunningServer) -> None:
    answer = server.client().responses.create(store=True, **ASK)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve(answer.id)


def test_a_fault_in_a_stream_is_a_failed_response(
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
    *_, last = server.client().responses.create(stream=True, **ASK)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert "worker 0 gave up" in last.response.error.message
    assert last.response.output_text != ""
    left[0] = 3
    with pytest.raises(openai.InternalServerError, match="worker 0 gave up"):
        server.client().responses.create(**ASK)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_response(server: RunningServer, stream: bool) -> None:
    fields = {"input": "Hello", "ignore_eos": True, "stream": stream}
    connection = server.open("/v1/responses", **fields)
    wait_until(lambda: server.engine.num_running == 1)
    connection.close()
    assert_idle(server)


def test_metrics_and_limits_count_responses(server: RunningServer) -> None:
    before = server.metric("http_requests_total", route="/v1/responses", status="200")
    server.client().responses.create(**ASK)
    after = server.metric("http_requests_total", route="/v1/responses", status="200")
    assert after == before + 1
    with serving({"max_queue": 0, "request_timeout": 0.3}, max_num_seqs=1) as small:
        fields = {"input": "Hello", "ignore_eos": True, "stream": True}
        late = small.post("/v1/responses", fields).named_events[-1]
        assert late["type"] == "response.failed"
        assert "longer than the 0.3 s" in late["response"]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", '{"a": 1e400}'),
        ("text", '{"format": {"type": "text", "x": -1e400}}'),
        ("tools", '[{"type": "function", "name": "f", "parameters": {"default": 1e400}}]'),
    ],
)
def test_a_number_that_no_answer_can_repeat_is_refused(
    server: RunningServer, field: str, value: str, stream: bool
) -> None:
    body = f'{{"input": "a", "stream": {str(stream).lower()}, "{field}": {value}}}'
    response = server.send("POST", "/v1/responses", body, content_type="application/json")
    assert response.status == 400
    assert response.error["message"] == f"{field} holds a number that is not finite"
