"""The `openai` package as the client: every endpoint, in one piece and streamed, and its errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from serving import RunningServer, serving

from megavm import LLM, SamplingParams
from megavm.server.completions import CompletionAnswer
from megavm.vm.machine import MachineFault

PROMPT = "Once upon a time"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": "stories", "temperature": 0, "max_tokens": 12}


def expected(llm: LLM, **params: Any) -> Any:
    params = {"temperature": 0.0, "max_tokens": 12, **params}
    return llm.generate(PROMPT, SamplingParams(**params))[0]


def test_a_completion_is_that_of_generate(server: RunningServer, llm: LLM) -> None:
    answer = server.client().completions.create(prompt=PROMPT, **GREEDY)
    output = expected(llm)
    assert answer.choices[0].text == output.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "stories")
    assert answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 12 + len(output.prompt_token_ids)


def test_a_chat_completion_is_that_of_chat(server: RunningServer, llm: LLM) -> None:
    answer = server.client().chat.completions.create(messages=MESSAGES, **GREEDY)
    output = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)


def test_a_chat_goes_on_to_its_own_end_without_max_tokens(server: RunningServer, llm: LLM) -> None:
    answer = server.client().chat.completions.create(
        model="stories", messages=MESSAGES, temperature=0
    )
    output = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=None))[0].outputs[0]
    assert answer.choices[0].message.content == output.text
    assert answer.choices[0].finish_reason == output.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(output.token_ids)


def test_streams_bring_the_same_text(server: RunningServer, llm: LLM) -> None:
    client = server.client()
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in chunks) == expected(llm).outputs[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 11 + ["length"]
    parts = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    whole = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0]
    assert "".join(p.choices[0].delta.content or "" for p in parts) == whole.text
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(p.choices[0].delta.role is None for p in parts[1:])
    assert len(parts) == 12


def test_the_asynchronous_client_gets_the_same(server: RunningServer, llm: LLM) -> None:
    async def ask() -> tuple[str, str, str]:
        async with server.async_client() as client:
            whole = await client.completions.create(prompt=PROMPT, **GREEDY)
            stream = await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
            text = "".join([c.choices[0].text async for c in stream])
            chat = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
            said = "".join([c.choices[0].delta.content or "" async for c in chat])
            return whole.choices[0].text, text, said

    whole, text, said = asyncio.run(ask())
    assert whole == text == expected(llm).outputs[0].text
    assert (
        said
        == llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text
    )


def test_usage_comes_with_a_stream_that_asks_for_it(server: RunningServer) -> None:
    client = server.client()
    cases: Any = (({"include_usage": True}, 1), ({"include_usage": False}, 0), ({}, 0))
    for options, wanted in cases:
        chunks = list(
            client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **GREEDY)
        )
        assert len(chunks) == 12 + wanted
        assert all(chunk.usage is None for chunk in chunks[:12])
        for chunk in chunks[12:]:
            assert chunk.choices == []
            assert chunk.usage.completion_tokens == 12
            assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + 12


def test_several_prompts_and_completions_are_numbered_in_order(
    server: RunningServer, llm: LLM
) -> None:
    prompts = [PROMPT, "The little fox"]
    fields = {**GREEDY, "temperature": 1, "seed": 7, "n": 2}
    answer = server.client().completions.create(prompt=prompts, **fields)
    params = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12)
    outputs = [o for output in llm.generate(prompts, params) for o in output.outputs]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == [o.text for o in outputs]
    texts = [""] * 4
    for chunk in server.client().completions.create(prompt=prompts, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [o.text for o in outputs]


def test_prompts_may_be_token_ids(server: RunningServer, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    text = expected(llm).outputs[0].text
    client = server.client()
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == text
    answer = client.completions.create(prompt=[ids, ids], **GREEDY)
    assert [c.text for c in answer.choices] == [text, text]


def test_logprobs_of_a_completion(server: RunningServer, llm: LLM) -> None:
    answer = server.client().completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    output = expected(llm, logprobs=2).outputs[0]
    assert "".join(found.tokens) == output.text
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert found.token_logprobs[i] == entry[token].logprob
        assert sorted(found.top_logprobs[i].values()) == sorted(e.logprob for e in entry.values())
    places = zip(found.text_offset, found.tokens, strict=True)
    assert all(output.text[offset:].startswith(token) for offset, token in places)


def test_logprobs_of_a_chat_come_with_each_token(server: RunningServer, llm: LLM) -> None:
    fields = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **GREEDY}
    client = server.client()
    whole = client.chat.completions.create(**fields).choices[0].logprobs.content
    assert len(whole) == 12
    for entry in whole:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert bytes(entry.bytes).decode() == entry.token
    parts = client.chat.completions.create(stream=True, **fields)
    assert [entry for part in parts for entry in part.choices[0].logprobs.content] == whole


def test_content_in_parts_is_text(server: RunningServer, llm: LLM) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    client = server.client()
    assert (
        client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content
        == client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    )


def test_parameters_of_other_servers_are_taken(server: RunningServer, llm: LLM) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "min_tokens": 2,
        "best_of": 1,
    }
    answer = server.client().completions.create(
        model="stories", prompt=PROMPT, max_tokens=30, seed=3, stop=["."], extra_body=extra
    )
    del extra["best_of"]
    params = SamplingParams(max_tokens=30, seed=3, stop=["."], **extra)  # type: ignore[arg-type]
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert answer.choices[0].text == output.text
    assert answer.choices[0].finish_reason == output.finish_reason


def test_models(server: RunningServer) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["stories"]
    model: Any = client.models.retrieve("stories")
    assert (model.id, model.owned_by, model.max_model_len) == ("stories", "megavm", 1024)


def test_errors_are_the_classes_of_the_client(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model="stories", prompt=PROMPT, temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="`gpt-4` does not exist") as unknown:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="stories", input="x")
    with pytest.raises(openai.BadRequestError, match="does not render tools") as tools:
        client.chat.completions.create(
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            **GREEDY,
        )
    assert tools.value.param == "tools"


def test_a_prompt_over_the_context_is_said_as_openai_says_it(server: RunningServer) -> None:
    client, long = server.client(), [5] * 1024
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="stories", prompt=long, max_tokens=7)
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "prompt"
    assert error.value.body["message"] == (  # type: ignore[index]
        "This model's maximum context length is 1024 tokens. However, you requested 1031 tokens"
        " (1024 in the prompt, 7 in the completion). Please reduce the length of the prompt or"
        " completion."
    )
    messages: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError, match=r"in the messages, 1 in the compl") as error:
        client.chat.completions.create(model="stories", messages=messages)
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "messages"
    # A prompt that leaves room is answered up to the end of the context.
    answer = client.completions.create(model="stories", prompt=long[:1020], max_tokens=100)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4


def test_a_prompt_over_the_kv_cache_is_said_with_what_fits() -> None:
    with serving(num_blocks=4, block_size=16) as server:
        response = server.post("/v1/completions", {"prompt": [5] * 65, "max_tokens": 1})
        assert response.error["code"] == "context_length_exceeded"
        assert "maximum context length is 65 tokens" in response.error["message"]
        assert "you requested 66 tokens" in response.error["message"]
        assert server.post("/v1/completions", {"prompt": [5] * 64, "max_tokens": 1}).status == 200


def test_a_fault_of_the_machine_is_an_error_of_the_client_and_no_end_of_the_server(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = server.engine.runner
    run, left = runner.run, [0]

    def fail_at_last(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise MachineFault("worker 0 gave up")
        run(*arguments)

    monkeypatch.setattr(runner, "run", fail_at_last)
    client = server.client()
    left[0] = 3
    with pytest.raises(openai.InternalServerError, match="worker 0 gave up"):
        client.completions.create(prompt=PROMPT, **GREEDY)
    left[0] = 3
    stream = client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
    with pytest.raises(openai.APIError, match="worker 0 gave up"):
        list(stream)
    assert server.metric("engine_faults_total") == 2
    assert client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text


def test_a_mistake_of_ours_in_a_stream_is_an_error_event(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionAnswer, "render", lambda *_: 1 // 0)
    with pytest.raises(openai.APIError, match="The server has a fault"):
        list(server.client().completions.create(prompt=PROMPT, stream=True, **GREEDY))


def test_a_request_keeps_its_id(server: RunningServer) -> None:
    client = server.client(default_headers={"x-request-id": "my-id-1"})
    assert client.models.list()._request_id == "my-id-1"
    assert server.client().models.list()._request_id
    answer = server.get("/health", x_request_id="no\x01good")
    assert answer.headers.get("x-request-id") != "no\x01good"  # httptools refuses the request
