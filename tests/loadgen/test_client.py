"""One request: what is sent, what counts as a token, and what is a failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
from fake_server import FIRST_SECONDS, GAP_SECONDS, USAGE_SECONDS, WRITTEN, FakeServer
from hypothesis import given
from hypothesis import strategies as st

from megavm.loadgen import client
from megavm.loadgen.client import Lines, Outcome, Target, carries_token, open_session, send
from megavm.loadgen.workload import Prompt

PROMPT = Prompt([11, 12, 13], 3, 5)
# Timers are late on a machine that does other work, and never early.
LATE_SECONDS = 0.5


def ask(server: FakeServer, model: str, prompt: Prompt = PROMPT, **options: Any) -> Outcome:
    async def one() -> Outcome:
        async with open_session() as session:
            return await send(session, Target(server.url, model, **options), prompt)

    return asyncio.run(one())


def test_times_are_those_of_the_server(server: FakeServer) -> None:
    began = time.perf_counter()
    outcome = ask(server, "steady")
    assert outcome.failure is None
    assert began < outcome.started
    assert outcome.ttft >= FIRST_SECONDS
    assert len(outcome.gaps) == 4
    came = list(itertools.accumulate(outcome.gaps, initial=outcome.started + outcome.ttft))
    late = [a - b for a, b in zip(came, WRITTEN, strict=True)]
    assert min(late) > 0
    assert statistics.median(late) < 0.005
    assert outcome.last == pytest.approx(came[-1])
    # The usage chunk comes 100 ms after the last token and does not count.
    assert time.perf_counter() - outcome.last >= USAGE_SECONDS
    assert outcome.tpot == pytest.approx((outcome.latency - outcome.ttft) / 4)
    assert sum(outcome.gaps) == pytest.approx(outcome.latency - outcome.ttft)
    assert (outcome.input_tokens, outcome.output_tokens) == (7, 5)


def test_a_completion_asks_for_a_stream_with_usage(server: FakeServer) -> None:
    ask(server, "fast", ignore_eos=True, extra_body={"temperature": 0}, api_key="secret")
    assert server.bodies == [
        {
            "model": "fast",
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt": [11, 12, 13],
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0,
        }
    ]
    assert server.headers[-1]["Authorization"] == "Bearer secret"


def test_a_chat_sends_a_message(server: FakeServer) -> None:
    outcome = ask(server, "steady", Prompt("hello", 1, 2), endpoint="chat")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.bodies[0]["max_completion_tokens"] == 2
    assert FIRST_SECONDS <= outcome.ttft < FIRST_SECONDS + LATE_SECONDS
    assert (outcome.failure, len(outcome.gaps), outcome.output_tokens) == (None, 1, 2)


def test_tokens_that_arrive_together_have_no_gap(server: FakeServer) -> None:
    outcome = ask(server, "fast")
    assert (outcome.output_tokens, outcome.gaps[:2]) == (4, [0, 0])


def test_without_usage_chunks_are_counted(server: FakeServer) -> None:
    outcome = ask(server, "no_usage")
    assert (outcome.failure, outcome.input_tokens, outcome.output_tokens) == (None, 3, 2)


def test_a_token_without_text_is_a_token(server: FakeServer) -> None:
    outcome = ask(server, "empty_text")
    assert (outcome.output_tokens, len(outcome.gaps)) == (3, 2)
    assert GAP_SECONDS <= outcome.ttft < GAP_SECONDS + LATE_SECONDS


def test_a_bare_end_is_a_token_where_the_usage_counts_it(server: FakeServer) -> None:
    outcome = ask(server, "end_of_text")
    assert outcome.output_tokens == 2
    assert GAP_SECONDS <= outcome.gaps[0] < GAP_SECONDS + LATE_SECONDS


def test_an_answer_that_ends_at_once_is_one_token(server: FakeServer) -> None:
    outcome = ask(server, "end_at_once")
    assert (outcome.failure, outcome.output_tokens) == (None, 1)


def test_the_role_alone_is_not_the_first_token(server: FakeServer) -> None:
    outcome = ask(server, "role_first", endpoint="chat")
    assert outcome.failure is None
    assert FIRST_SECONDS <= outcome.ttft < FIRST_SECONDS + LATE_SECONDS
    assert (outcome.output_tokens, outcome.gaps, outcome.tpot) == (1, [], None)


def test_reasoning_is_text(server: FakeServer) -> None:
    assert ask(server, "reasoning", endpoint="chat").output_tokens == 2


def test_a_stream_without_done_is_whole_when_it_has_a_finish_reason(server: FakeServer) -> None:
    outcome = ask(server, "no_done")
    assert (outcome.failure, outcome.output_tokens) == (None, 2)


def test_events_may_be_cut_anywhere(server: FakeServer) -> None:
    outcome = ask(server, "split")
    assert (outcome.failure, outcome.input_tokens, outcome.output_tokens) == (None, 9, 2)


@pytest.mark.parametrize(
    ("model", "failure", "said"),
    [
        ("full", "429", "The queue is full."),
        ("fault", "500", "Internal Server Error"),
        ("flat", "422", "bad input"),
        ("detail", "400", "max_tokens is missing"),
        ("plain_json", "bad stream", "not a stream of events but application/json"),
        ("no_end", "bad stream", "without a finish_reason and without [DONE]"),
        ("no_token", "bad stream", "without a token"),
        ("error_event", "bad stream", "worker 3 waits"),
        ("not_json", "bad stream", "not JSON: b'{oops'"),
        ("strange", "bad stream", "no choice that is an object"),
        ("cut", "broken connection", "ClientPayloadError"),
    ],
)
def test_a_failure_has_its_kind_and_a_sentence(
    server: FakeServer, model: str, failure: str, said: str
) -> None:
    outcome = ask(server, model)
    assert outcome.failure == failure
    assert said in outcome.message
    assert "\n" not in outcome.message


def test_a_server_that_hangs_is_left_after_the_timeout(server: FakeServer) -> None:
    began = time.perf_counter()
    outcome = ask(server, "hang", timeout=0.3)
    assert (outcome.failure, outcome.message) == ("timeout", "no whole answer within 0.3 s")
    assert time.perf_counter() - began < 3


def test_a_server_that_is_not_there_is_no_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = replace(Target("", "m"), base_url=f"http://127.0.0.1:{taken.getsockname()[1]}")

        async def one() -> Outcome:
            async with open_session() as session:
                return await send(session, nobody, PROMPT)

        assert asyncio.run(one()).failure == "no connection"


@pytest.mark.parametrize(
    ("choice", "carries"),
    [
        ({"text": "a"}, True),
        ({"text": ""}, True),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"text": "", "finish_reason": "stop", "token_ids": [2]}, True),
        ({"text": "a", "finish_reason": "length"}, True),
        ({"text": None, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"role": "assistant", "content": ""}, "logprobs": {"content": [1]}}, True),
        ({"delta": {"role": "assistant", "content": "a"}}, True),
        ({"delta": {"content": ""}}, True),
        ({"delta": {"tool_calls": [{}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"delta": {"content": ""}, "finish_reason": "stop"}, False),
    ],
)
def test_which_chunks_carry_a_token(choice: dict[str, Any], carries: bool) -> None:
    assert carries_token(choice) is carries


def test_lines_are_cut_into_payloads() -> None:
    lines = Lines()
    assert lines.feed(b": ping\n\nevent: x\ndata: 1\r\n\r\nda") == [b"1"]
    assert lines.feed(b"ta:2\n\ndata: 3") == [b"2"]
    assert lines.end() == [b"3"]


TEXTS = st.one_of(st.text(max_size=3), st.sampled_from(['"', "\\", '","x":"', "a", "data", "\n"]))
FIELDS = st.fixed_dictionaries(
    {"text": TEXTS},
    optional={"finish_reason": st.sampled_from([None, "stop"]), "token_ids": st.just([1])},
)
DELTAS = st.dictionaries(st.sampled_from(["role", "content", "reasoning"]), TEXTS).map(
    lambda delta: {"delta": delta}
)
EVENTS = st.builds(
    lambda choice, usage: {"id": "data", "choices": [choice]} | usage,
    st.one_of(FIELDS, DELTAS),
    st.sampled_from([{}, {"usage": None}, {"usage": {"completion_tokens": 3}}]),
)


@given(st.lists(EVENTS, max_size=12), st.booleans())
def test_events_that_are_not_parsed_count_as_if_they_were(
    events: list[dict[str, Any]], ascii_only: bool
) -> None:
    payloads = [json.dumps(event, ensure_ascii=ascii_only).encode() for event in events]

    def outcome(*, parse_all: bool) -> Outcome:
        made = Outcome(0.0, 3)
        answer = client._Answer(made)
        for now, payload in enumerate([*payloads, b"[DONE]"], 1):
            if parse_all:
                answer._plain = None
            answer.event(payload, now)
        if made.first is not None:
            answer.end()
        return made

    assert outcome(parse_all=False) == outcome(parse_all=True)


def test_most_events_of_a_stream_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = json.loads

    def counted(text: str) -> Any:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(json, "loads", counted)
    answer = client._Answer(made := Outcome(0.0, 3))
    texts = ["a", "b", "c", 'd"', "e"]
    for now, text in enumerate(texts):
        answer.event(json.dumps({"choices": [{"text": text}], "usage": None}).encode(), now)
    answer.event(b"[DONE]", len(texts))
    answer.end()
    assert (made.output_tokens, len(parsed)) == (5, 2)


@pytest.mark.parametrize("text", [b"\xff", b"\\", b'"'])
def test_a_broken_text_is_a_broken_stream(text: bytes) -> None:
    answer = client._Answer(Outcome(0.0, 3))
    answer.event(b'{"choices": [{"text": "a"}]}', 1.0)
    with pytest.raises(client._StreamError, match="not JSON"):
        answer.event(b'{"choices": [{"text": "a%b"}]}' % text, 2.0)
