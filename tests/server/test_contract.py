"""The bytes that clients parse: events, tokens, roles, usage, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from serving import RunningServer, serving

from megavm import LLM, SamplingParams
from megavm.scheduler.engine.logprobs import TokenLogprobs, log_softmax
from megavm.server.logprobs import LEAST, CompletionLogprobs, chat_logprobs
from megavm.tokenizer import Tokenizer

PROMPT = "Once upon a time"
CHAT: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def in_fours() -> Iterator[RunningServer]:
    """A server whose engine brings four tokens at once."""
    with serving(steps_per_launch=4) as running_server:
        yield running_server


@pytest.fixture(params=["one", "four"])
def any_server(request: pytest.FixtureRequest) -> RunningServer:
    name = {"one": "server", "four": "in_fours"}[request.param]
    return cast(RunningServer, request.getfixturevalue(name))


def test_one_token_is_one_event(any_server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    chunks = list(llm.stream(PROMPT, params))
    fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    events = any_server.stream("/v1/completions", prompt=PROMPT, **fields)
    assert [e["choices"][0]["text"] for e in events] == [c.text for c in chunks]
    assert {e["object"] for e in events} == {"text_completion"}
    assert len({e["id"] for e in events}) == len({e["created"] for e in events}) == 1
    events = any_server.stream("/v1/chat/completions", messages=CHAT, **fields)
    assert len(events) == 30
    assert {e["object"] for e in events} == {"chat.completion.chunk"}


def test_the_role_comes_with_the_first_token_and_the_reason_with_the_last(
    any_server: RunningServer,
) -> None:
    events = any_server.stream(
        "/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=5, ignore_eos=True
    )
    first, *others = [e["choices"][0] for e in events]
    assert first["delta"]["role"] == "assistant"
    assert first["delta"]["content"] != ""
    assert all(set(c["delta"]) == {"content"} for c in others)
    reasons = [c["finish_reason"] for c in (first, *others)]
    assert reasons == [None] * 4 + ["length"]


def test_the_token_that_ends_a_chat_has_no_content(any_server: RunningServer, llm: LLM) -> None:
    events = any_server.stream("/v1/chat/completions", messages=CHAT, temperature=0)
    output = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=None))[0].outputs[0]
    assert len(events) == len(output.token_ids)
    last = events[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_a_stream_says_that_it_must_not_be_kept_back(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": PROMPT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


def test_stop_strings_are_held_back_and_never_sent(any_server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    whole = llm.generate(PROMPT, params)[0].outputs[0].text
    stop = whole[20:31]  # it begins and ends inside of tokens
    fields = {"temperature": 0, "max_tokens": 60, "stop": ["not there", stop]}
    events = any_server.stream("/v1/completions", prompt=PROMPT, **fields)
    assert "".join(e["choices"][0]["text"] for e in events) == whole[:20]
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    answer = any_server.complete(**fields)["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (whole[:20], "stop")


def test_usage_is_null_until_it_comes(server: RunningServer) -> None:
    events = server.stream(
        "/v1/completions",
        prompt=[PROMPT, PROMPT],
        n=2,
        max_tokens=3,
        stream_options={"include_usage": True},
        ignore_eos=True,
    )
    *tokens, usage = events
    assert all(e["usage"] is None and e["choices"] for e in tokens)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["id"] == tokens[0]["id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_the_tokens_of_each_choice(
    any_server: RunningServer, path: str
) -> None:
    source = {"messages": CHAT} if "chat" in path else {"prompt": PROMPT}
    both = {"include_usage": True, "continuous_usage_stats": True}
    fields = {**source, "n": 2, "max_tokens": 6, "ignore_eos": True}
    *tokens, whole = any_server.stream(path, stream_options=both, **fields)
    prompt = whole["usage"]["prompt_tokens"]
    for choice in (0, 1):
        usages = [e["usage"] for e in tokens if e["choices"][0]["index"] == choice]
        assert usages == [
            {"prompt_tokens": prompt, "completion_tokens": i, "total_tokens": prompt + i}
            for i in range(1, 7)
        ]
    assert whole["choices"] == []
    assert whole["usage"]["completion_tokens"] == 12
    # As in vLLM, continuous_usage_stats alone asks for nothing.
    alone = {"continuous_usage_stats": True}
    assert all("usage" not in e for e in any_server.stream(path, stream_options=alone, **fields))


def test_text_beyond_ascii_is_escaped_and_comes_through(server: RunningServer, llm: LLM) -> None:
    prompt = "Ünïcödé \u2028 日本"
    answer = server.complete(prompt=prompt, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"].startswith(prompt)
    response = server.post(
        "/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 4, "stream": True}
    )
    assert response.content.isascii()
    assert "".join(e["choices"][0]["text"] for e in response.events).startswith(prompt)


# Echo and log-probabilities, as lm-evaluation-harness asks for them.


def test_the_shape_of_lm_eval_gives_the_log_likelihoods_of_the_logits(
    server: RunningServer, llm: LLM
) -> None:
    context, continuation = PROMPT, ", there was a lively young fox. " * 4
    begin = len(llm.tokenizer.encode(context))
    prompts = [llm.tokenizer.encode(context + continuation), llm.tokenizer.encode(context + " x")]
    answer = server.complete(
        prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    for tokens, choice in zip(prompts, answer["choices"], strict=True):
        values = log_softmax(llm.logits(tokens))
        found = choice["logprobs"]
        likelihoods = found["token_logprobs"][begin:-1]
        assert likelihoods == [values[i - 1, tokens[i]] for i in range(begin, len(tokens))]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert len(found["tokens"]) == len(tokens) + 1
        for i in range(begin, len(tokens)):
            top = found["top_logprobs"][i]
            greedy = max(top, key=top.__getitem__) == found["tokens"][i]
            assert greedy == (int(values[i - 1].argmax()) == tokens[i])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_new_tokens_is_the_prompt(
    server: RunningServer, llm: LLM, stream: bool
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0, "n": 2}
    response = server.post("/v1/completions", {**fields, "stream": stream})
    answers = response.events if stream else [response.json]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert [c["text"] for c in choices] == [PROMPT, PROMPT]
    assert {c["finish_reason"] for c in choices} == {"length"}
    tokens = llm.tokenizer.encode(PROMPT)
    values = log_softmax(llm.logits(tokens))
    expected = [None, *(values[i - 1, tokens[i]] for i in range(1, len(tokens)))]
    for choice in choices:
        assert choice["logprobs"]["token_logprobs"] == expected
        assert choice["logprobs"]["text_offset"] == [0, 0, 4, 9, 11]


def test_a_streamed_echo_has_all_log_probabilities_of_the_whole(server: RunningServer) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 4, "echo": True, "logprobs": 2, "temperature": 0}
    whole = server.complete(**fields)["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in server.stream("/v1/completions", **fields)]
    assert len(parts) == 4
    for key, values in whole.items():
        assert [value for part in parts for value in part[key]] == values


def test_impossible_tokens_have_a_finite_log_probability(llm: LLM) -> None:
    entry = TokenLogprobs(5, float("-inf"), 2, ((6, float("nan")), (7, -0.5)))
    found = CompletionLogprobs(llm.tokenizer).object([5, entry])
    assert found["token_logprobs"] == [None, LEAST]
    assert set(found["top_logprobs"][1].values()) == {LEAST, -0.5}
    content = chat_logprobs([entry], llm.tokenizer)["content"][0]
    assert content["logprob"] == content["top_logprobs"][0]["logprob"] == LEAST


def test_a_part_of_a_character_has_no_bytes(llm: LLM) -> None:
    tokenizer: Tokenizer = llm.tokenizer
    part = tokenizer.encode("日", add_special_tokens=False)[0]
    assert "\ufffd" in tokenizer.token_text(part)
    entry = TokenLogprobs(part, -1.0, 1, ())
    assert chat_logprobs([entry], tokenizer)["content"][0]["bytes"] is None


def test_prompt_logprobs_are_those_of_the_logits_as_vllm_writes_them(
    server: RunningServer, llm: LLM
) -> None:
    tokens = llm.tokenizer.encode(PROMPT)
    values = log_softmax(llm.logits(tokens))
    choices = server.complete(prompt_logprobs=2, max_tokens=1, n=2)["choices"]
    first, *entries = choices[0]["prompt_logprobs"]
    assert (first, len(entries)) == (None, len(tokens) - 1)
    for token, before, entry in zip(tokens[1:], values, entries, strict=False):
        assert entry[str(token)]["logprob"] == before[token]
        assert entry[str(token)]["decoded_token"] == llm.tokenizer.token_text(token)
        assert entry[str(token)]["rank"] == 1 + (before > before[token]).sum()
        assert set(map(int, entry)) == {token, *(-before).argsort()[:2].tolist()}
    assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    fields = {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", fields).json
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


def test_an_echo_has_its_own_number_of_alternatives(server: RunningServer) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    plain = server.complete(**fields)["choices"][0]
    more = server.complete(prompt_logprobs=4, **fields)["choices"][0]
    assert more["logprobs"] == plain["logprobs"]
    assert len(more["prompt_logprobs"][1]) >= 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_best_of_answers_with_the_most_likely(server: RunningServer, path: str) -> None:
    fields: dict[str, Any] = {"seed": 11, "max_tokens": 8, "logprobs": 0}
    if "chat" in path:
        fields |= {"messages": CHAT, "logprobs": True}
    else:
        fields |= {"prompt": [PROMPT, "A"]}

    def likelihood(choice: dict[str, Any]) -> float:
        found = choice["logprobs"]
        if "chat" in path:
            values = [entry["logprob"] for entry in found["content"]]
        else:
            values = found["token_logprobs"]
        return float(sum(values)) / len(values)

    every = server.post(path, {**fields, "n": 6}).json
    answer = server.post(path, {**fields, "n": 2, "best_of": 6}).json
    expected = []
    for begin in range(0, len(every["choices"]), 6):
        own = every["choices"][begin : begin + 6]
        expected += sorted(own, key=likelihood, reverse=True)[:2]
    for i, (choice, wanted) in enumerate(zip(answer["choices"], expected, strict=True)):
        assert choice == {**wanted, "index": i}
    assert answer["usage"] == every["usage"]
    # Log-probabilities are computed for the choice, and shown only to those who ask.
    del fields["logprobs"]
    hidden = server.post(path, {**fields, "n": 2, "best_of": 6}).json["choices"]
    assert hidden == [{**choice, "logprobs": None} for choice in answer["choices"]]


def test_a_truncated_prompt_is_its_last_tokens(server: RunningServer, llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPT)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "echo": True}
    answer = server.complete(truncate_prompt_tokens=3, **fields)
    assert answer["usage"]["prompt_tokens"] == 3
    expected = server.complete(prompt=tokens[-3:], **fields)
    assert answer["choices"] == expected["choices"]
    answer = server.complete(prompt=[5] * 2000, truncate_prompt_tokens=-1, max_tokens=6)
    assert answer["usage"]["prompt_tokens"] == llm.max_model_len - 6
    long = [{"role": "user", "content": "word " * 2000}]
    fields = {"messages": long, "max_tokens": 6, "truncate_prompt_tokens": 100}
    answer = server.post("/v1/chat/completions", fields).json
    assert answer["usage"]["prompt_tokens"] == 100


def test_a_chat_goes_on_with_its_last_message(server: RunningServer, llm: LLM) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = server.post("/tokenize", body).json["tokens"]
    text = llm.tokenizer.chat_prompt(CHAT) + "Once upon"
    assert tokens == llm.tokenizer.encode(text, add_special_tokens=False)
    fields = {"temperature": 0, "max_tokens": 9}
    answer = server.post("/v1/chat/completions", {**body, **fields}).json
    expected = server.complete(prompt=tokens, **fields)["choices"][0]["text"]
    assert answer["choices"][0]["message"]["content"] == expected
    plain = {"messages": messages, "chat_template_kwargs": {"anything": [1]}}
    assert server.post("/v1/chat/completions", {**plain, **fields}).status == 200


# The tokenizer's endpoints.


def test_tokenize_and_detokenize(server: RunningServer, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    found = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json
    assert found["tokens"] == ids
    assert (found["count"], found["max_model_len"]) == (len(ids), 1024)
    assert "".join(found["token_strs"][1:]) == PROMPT
    plain = server.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json
    assert plain["tokens"] == ids[1:]
    chat = server.post("/tokenize", {"messages": CHAT}).json
    text = llm.tokenizer.chat_prompt(CHAT)
    assert chat["tokens"] == llm.tokenizer.encode(text, add_special_tokens=False)
    with_special = server.post("/tokenize", {"messages": CHAT, "add_special_tokens": True}).json
    assert with_special["tokens"] == llm.tokenizer.encode(text)
    text = server.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert text == llm.tokenizer.decode(ids, skip_special_tokens=False)


def test_requests_with_equal_values_share_their_parameters(server: RunningServer) -> None:
    make = server.service.sampling_params
    assert make(temperature=0.5, seed=1) is make(seed=1, temperature=0.5)
    assert make(temperature=0.5, seed=2).seed == 2
    assert make(stop=["a"]).stop == ("a",)  # a list is no key
    with pytest.raises(ValueError, match="temperature"):
        make(temperature=-1.0)
