"""Structured outputs over HTTP, asked for by the clients that people use."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from typing import Any, Literal

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field
from serving import RunningServer, assert_idle, serving, wait_until

from megavm.restrictions import RestrictionCompiler

MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
CHAT = "/v1/chat/completions"


class Pet(BaseModel):
    """A pet."""

    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


SCHEMA: dict[str, Any] = {**Pet.model_json_schema(), "additionalProperties": False}
JSON_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA},
}


def ask(server: RunningServer, **fields: Any) -> Any:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200, **fields}
    response = server.post(CHAT, body)
    assert response.status == 200, response.content
    return response.json["choices"][0]


# Clients.


def test_parse_of_the_openai_client(server: RunningServer) -> None:
    answer = server.client().chat.completions.parse(
        model="stories", messages=MESSAGES, response_format=Pet, max_tokens=200, temperature=1, n=3
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Pet)
        assert choice.finish_reason == "stop"


def test_a_stream_of_the_openai_client_is_parsed(server: RunningServer) -> None:
    with server.client().chat.completions.stream(
        model="stories", messages=MESSAGES, response_format=Pet, max_tokens=200, temperature=0
    ) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Pet)


def test_an_answer_that_max_tokens_cuts_is_an_error_of_the_client(server: RunningServer) -> None:
    import openai

    with pytest.raises(openai.LengthFinishReasonError):
        server.client().chat.completions.parse(
            model="stories", messages=MESSAGES, response_format=Pet, max_tokens=5, temperature=0
        )


@pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA"])
def test_instructor(server: RunningServer, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    client = instructor.from_openai(server.client(), mode=getattr(instructor.Mode, mode))
    options: Any = {"model": "stories", "max_tokens": 300, "temperature": 0, "max_retries": 0}
    if mode == "JSON":
        # This mode asks for any object and puts the schema into the prompt, which the small model
        # does not heed; vLLM's field holds it to the schema.
        options["extra_body"] = {"guided_json": SCHEMA, "response_format": None}
    pet = client.chat.completions.create(messages=MESSAGES, response_model=Pet, **options)
    assert isinstance(pet, Pet)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_with_structured_output(server: RunningServer, method: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    extra = {"guided_json": SCHEMA, "response_format": None} if method == "json_mode" else None
    chat = langchain.ChatOpenAI(
        model="stories",
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=300,
        extra_body=extra,
    )
    pet = chat.with_structured_output(Pet, method=method).invoke("Who are you?")
    assert isinstance(pet, Pet)


# Fields.


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": JSON_SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
    ],
    ids=str,
)
def test_json_schemas_by_every_name(server: RunningServer, fields: dict[str, Any]) -> None:
    choice = ask(server, **fields, temperature=1, seed=5)
    assert choice["finish_reason"] == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(choice["message"]["content"]))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 1000}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" /b+/ "c"'}}, "ab+c"),
        ({"guided_grammar": 'root ::= "a" [b]+ "c"'}, "ab+c"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
                }
            },
            ".*",
        ),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
    ids=str,
)
def test_other_forms_by_every_name(
    server: RunningServer, fields: dict[str, Any], pattern: str
) -> None:
    text = ask(server, **fields)["message"]["content"]
    assert re.fullmatch(pattern, text, re.DOTALL), text


def test_completions_take_them_too_for_several_prompts(server: RunningServer) -> None:
    body = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 100, "guided_regex": "[a-f]{6}"}
    answer = server.complete(**body)
    assert len(answer["choices"]) == 4
    assert all(re.fullmatch("[a-f]{6,7}", c["text"]) for c in answer["choices"])


def test_a_stream_brings_the_same_text(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    whole = ask(server, response_format=JSON_SCHEMA)["message"]["content"]
    events = server.stream(CHAT, **body, response_format=JSON_SCHEMA)
    parts = [e["choices"][0]["delta"].get("content", "") for e in events]
    assert "".join(parts) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_biases_allowed_tokens_bad_words_and_min_p(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": " said", "add_special_tokens": False}).json["tokens"]
    said = ids[0]
    for fields in ({"logit_bias": {str(said): 100}}, {"allowed_token_ids": [said]}):
        answer = server.complete(max_tokens=4, return_token_ids=True, **fields)
        assert answer["choices"][0]["token_ids"] == [said] * 4
    answer = server.complete(max_tokens=12, temperature=0)["choices"][0]["text"]
    word = answer.split()[1]
    assert (
        word
        not in server.complete(max_tokens=12, temperature=0, bad_words=[word])["choices"][0]["text"]
    )
    # With min_p 1 only the likeliest token is left.
    certain = server.complete(max_tokens=12, temperature=2, min_p=1.0)["choices"][0]["text"]
    assert certain == answer


# Errors.


def test_a_form_that_the_library_refuses_is_a_400_with_its_sentence(server: RunningServer) -> None:
    described = {"name": "x", "schema": {"type": "objekt"}}
    form = {"type": "json_schema", "json_schema": described}
    body = {"messages": MESSAGES, "response_format": form}
    error = server.post(CHAT, body).error
    assert error["message"] == "json is refused: Invalid type: objekt"
    assert error["param"] == "response_format"


def test_two_forms_at_once_are_refused(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "response_format": JSON_SCHEMA, "guided_regex": "a"}
    error = server.post(CHAT, body).error
    assert error["message"] == "response_format and guided_regex both give the form of the output"


INTERFACES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


def own_fault(server: RunningServer, path: str, **fields: Any) -> tuple[str, str | None]:
    """The sentence and the field of a 400, which the stream of the same request ends with too."""
    body = {**INTERFACES[path], **fields}
    whole = server.post(path, body)
    assert whole.status == 400, whole.content
    streamed = server.post(path, {**body, "stream": True})
    if path == "/v1/messages":
        error = whole.anthropic_error
        last = streamed.named_events[-1]["error"] if streamed.status == 200 else error
    elif path == "/v1/responses" and streamed.status == 200:
        error, response = whole.error, streamed.named_events[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"]["code"] == "invalid_prompt"
        last = {**error, "message": response["error"]["message"]}
    else:
        error = whole.error
        last = streamed.events[-1]["error"] if streamed.status == 200 else error
    assert error["type"] == last["type"] == "invalid_request_error"
    assert error == last
    return error["message"], error.get("param")


@pytest.mark.parametrize("path", INTERFACES)
def test_a_grammar_that_leaves_no_token_is_an_error_of_its_request_alone(
    server: RunningServer, path: str
) -> None:
    ids = server.post("/tokenize", {"prompt": "abc", "add_special_tokens": False}).json["tokens"]
    for form in ({"guided_regex": "[0-9]"}, {"structured_outputs": {"regex": "[0-9]"}}):
        message, param = own_fault(server, path, **form, allowed_token_ids=ids)
        assert "leave no token to choose" in message
        assert param in (None, *form)
    assert ask(server, guided_regex="[0-9]")["message"]["content"].isdigit()


@pytest.mark.parametrize("path", INTERFACES)
def test_a_form_that_becomes_too_large_is_the_fault_of_its_request(
    server: RunningServer, path: str
) -> None:
    """The automata exceed their limits behind any first token, which only the output shows."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
    form = {"json": {"anyOf": [large, {"type": "array", "items": large, "minItems": 2}]}}
    message, param = own_fault(server, path, structured_outputs=form)
    assert message.startswith("the grammar cannot go on: Parser Error")
    assert param in (None, "structured_outputs")


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a{100000}"},
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}},
    ],
    ids=["regex", "json"],
)
def test_a_form_whose_first_bytes_exceed_the_limits_is_refused_before_it_runs(
    server: RunningServer, form: dict[str, Any]
) -> None:
    launches = server.engine.counters.launches
    body = {"prompt": "a", "structured_outputs": form, "stream": True}
    error = server.post("/v1/completions", body).error
    assert error["param"] == "structured_outputs"
    assert "is refused: " in error["message"]
    assert server.engine.counters.launches == launches


def nested(depth: int) -> dict[str, Any]:
    """A schema whose grammar is large: objects in objects, each with optional properties."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        names = [f"{level}_{i}" for i in range(12)]
        schema = {"type": "object", "properties": dict.fromkeys(names, schema)}
    return schema


def test_huge_schemas_are_bounded(server: RunningServer) -> None:
    begin = time.monotonic()
    for form in (
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"regex": "((a{1000}){1000}){1000}"},
        {"json": nested(4)},
        {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
        {"json": {"type": "string", "minLength": 10**9}},
        {"choice": [f"{i}" for i in range(20_000)]},
    ):
        response = server.post(
            CHAT, {"messages": MESSAGES, "max_tokens": 3, "structured_outputs": form}
        )
        assert response.status in (200, 400), form
        assert response.status == 200 or response.error["message"]
    assert time.monotonic() - begin < 60
    assert ask(server, guided_regex="[0-9]")["message"]["content"].isdigit()


def test_other_requests_go_on_while_a_grammar_is_compiled(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    compile_now = RestrictionCompiler.compile

    def slow(self: RestrictionCompiler, params: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return compile_now(self, params)

    monkeypatch.setattr(RestrictionCompiler, "compile", slow)

    async def both() -> tuple[Any, Any]:
        client = server.async_client()
        options: Any = {"model": "stories", "messages": MESSAGES, "max_tokens": 8}
        slowly = asyncio.create_task(
            client.chat.completions.create(**options, extra_body={"guided_regex": "[0-9]{3}"})
        )
        await asyncio.to_thread(begun.wait, 30)
        plain = await client.chat.completions.create(**options)
        assert not slowly.done()
        go_on.set()
        return plain, await slowly

    plain, formed = asyncio.run(both())
    assert plain.choices[0].message.content
    assert re.fullmatch("[0-9]{3}", formed.choices[0].message.content)


def test_a_client_that_goes_away_frees_its_sequence(server: RunningServer) -> None:
    connection = server.open(
        CHAT, messages=MESSAGES, stream=True, guided_regex="[a-z ]{2000}", max_tokens=2000
    )
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    engine = server.engine
    wait_until(lambda: not engine.has_work)


def test_many_forms_at_once_with_a_short_cache() -> None:
    """Preemption, prefix caching and plain requests between them."""
    with serving(num_blocks=24, block_size=16, max_num_seqs=6) as server:
        results: dict[int, Any] = {}

        def one(i: int) -> None:
            fields: dict[str, Any] = {"temperature": 1, "seed": i, "max_tokens": 120}
            if i % 3:
                fields["structured_outputs"] = {"json": SCHEMA} if i % 2 else {"regex": "[a-z]{60}"}
            results[i] = server.post(CHAT, {"messages": MESSAGES, **fields})

        threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for i, response in results.items():
            assert response.status == 200, response.content
            choice = response.json["choices"][0]
            if i % 3 and choice["finish_reason"] == "stop":
                text = choice["message"]["content"]
                if i % 2:
                    jsonschema_rs.validate(SCHEMA, json.loads(text))
                else:
                    assert re.fullmatch("[a-z]{60,}", text)
        assert len(results) == 12
        assert_idle(server)


def slowly(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> threading.Event:
    """Let grammars be compiled only when they may; set when the first begins."""
    compile, begun = server.llm.restrictions.compile, threading.Event()

    def slow(params: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return compile(params)

    monkeypatch.setattr(server.llm.restrictions, "compile", slow)
    return begun


def test_a_request_whose_grammar_is_compiled_when_the_server_drains_ends_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, answers = threading.Event(), list[Any]()
    with serving() as server:
        begun = slowly(server, monkeypatch, go_on)
        body = {"prompt": "A number:", "guided_regex": "[0-9]{3}", "temperature": 0}
        thread = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body))
        )
        thread.start()
        assert begun.wait(30)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(), server.loop)
        wait_until(lambda: server.get("/health").status == 503)
        go_on.set()
        draining.result(30)
        thread.join()
        assert answers[0].status == 200, answers
        assert answers[0].json["choices"][0]["text"].strip().isdigit()


def test_a_panic_of_the_grammars_library_is_an_error_of_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        pass

    def panic(params: Any) -> Any:
        raise Panic("called unwrap on None")

    with serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.llm.restrictions, "compile", panic)
            response = server.post("/v1/completions", {"prompt": "x", "guided_regex": "[0-9]"})
        assert response.status == 500
        assert "called unwrap on None" in response.error["message"]
        answer = server.complete(guided_regex="[0-9]", max_tokens=5)
        assert answer["choices"][0]["text"].strip().isdigit()
        assert_idle(server)
