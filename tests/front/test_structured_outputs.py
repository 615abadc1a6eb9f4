"""Structured outputs, held against `json`, `re` and a foreign validator of JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from megavm import LLM, SamplingParams, StructuredOutputsParams
from megavm.grammars import GrammarCompiler
from megavm.structured_outputs import MAX_DEPTH, MAX_GRAMMAR_LENGTH
from megavm.tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
ANSWER: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]},
        {"const": None},
        {"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 1, "maxItems": 2},
    ]
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("stories", dtype="float32", max_num_seqs=8) as model:
        yield model


def outputs(llm: LLM, n: int = 3, **params: Any) -> list[Any]:
    """Completions of one prompt, which must have ended by themselves."""
    values = {"max_tokens": 400, "temperature": 1.0, "seed": 1, **params}
    (result,) = llm.generate(["Once upon a time"], SamplingParams(n=n, **values))
    assert result.error is None
    assert [o.finish_reason for o in result.outputs] == ["stop"] * n
    return list(result.outputs)


@pytest.mark.parametrize("schema", [PERSON, ANSWER], ids=["object", "any of three"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("spaces", [True, False])
def test_json_satisfies_its_schema(
    llm: LLM, schema: dict[str, Any], temperature: float, spaces: bool
) -> None:
    form = StructuredOutputsParams(
        json=schema, disable_any_whitespace=not spaces, disable_additional_properties=True
    )
    for output in outputs(llm, temperature=temperature, structured_outputs=form):
        jsonschema_rs.validate(schema, json.loads(output.text))
        assert spaces or json.dumps(json.loads(output.text), separators=(",", ":")) == output.text


@pytest.mark.parametrize("regex", [r"[0-9]{3}-[a-z]{2,4}", r"(ab|cd)+e", "é[à-ü]{2}日本"])
def test_a_text_matches_its_expression_as_a_whole(llm: LLM, regex: str) -> None:
    for output in outputs(llm, structured_outputs={"regex": regex}):
        assert re.fullmatch(regex, output.text), output.text


def test_a_choice_is_one_of_the_texts(llm: LLM) -> None:
    choices = ['a "quoted" \\ one', "two\nlines", "zwölf", "a/b", "a/b c"]
    found = {o.text for o in outputs(llm, n=8, structured_outputs={"choice": choices})}
    assert found <= set(choices)
    assert len(found) > 1


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" inner ")"\ninner: start | "x"\n',
        'root ::= "(" inner ")"\ninner ::= root | "x"\n',
    ],
    ids=["lark", "gbnf"],
)
def test_a_text_is_of_its_grammar(llm: LLM, grammar: str) -> None:
    for output in outputs(llm, structured_outputs={"grammar": grammar}):
        opened = output.text.count("(")
        assert output.text == "(" * opened + "x" + ")" * opened


def test_a_structural_tag_holds_json_of_its_schema(llm: LLM) -> None:
    tag = {
        "triggers": ["<call"],
        "structures": [{"begin": "<call f>", "schema": ANSWER["anyOf"][0], "end": "</call>"}],
    }
    form = StructuredOutputsParams(structural_tag=tag, disable_additional_properties=True)
    grammar = llm.restrictions.compile(SamplingParams(structured_outputs=form))
    assert grammar is not None
    assert grammar.grammar is not None
    for text, good in (
        ('Let me see. <call f>{"yes": true}</call> Done.', True),
        ("No calls at all", True),
        ('<call f>{"yes": 3}</call>', False),
        ('<call g>{"yes": true}</call>', False),
    ):
        matcher = grammar.grammar.matcher()
        for token in llm.tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
        assert (matcher.error == "") == good, text


def test_json_object_is_any_object(llm: LLM) -> None:
    for output in outputs(llm, structured_outputs={"json_object": True}, seed=3):
        assert isinstance(json.loads(output.text), dict)


def test_an_end_may_come_only_where_the_grammar_is_satisfied(llm: LLM) -> None:
    eos = llm.checkpoint.eos_token_ids[0]
    form = {"regex": "[a-z]{3,6}"}
    bias = {eos: 100.0}
    for output in outputs(llm, structured_outputs=form, logit_bias=bias):
        assert re.fullmatch("[a-z]{3,4}", output.text)  # as soon as it may end, it does
    for output in outputs(llm, structured_outputs=form, logit_bias=bias, ignore_eos=True):
        assert re.fullmatch("[a-z]{3,4}", output.text)


def test_max_tokens_ends_an_output_in_the_middle(llm: LLM) -> None:
    form = {"json": PERSON, "disable_any_whitespace": True}
    params = SamplingParams(max_tokens=5, temperature=0.0, structured_outputs=form)
    output = llm.generate("Once", params)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)
    assert output.text.startswith('{"name"')


def test_the_last_token_may_complete_the_output(llm: LLM) -> None:
    whole = outputs(llm, n=1, structured_outputs={"choice": ["said"]})[0]
    form = {"choice": ["said"]}
    same = outputs(llm, n=1, structured_outputs=form, max_tokens=len(whole.token_ids))[0]
    assert same.text == "said"


def test_log_probabilities_are_those_before_tokens_are_excluded(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=2, structured_outputs={"regex": "[0-9]"}
    )
    masked = llm.generate("Once upon a time", params)[0].outputs[0]
    plain = llm.generate(
        "Once upon a time", SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
    )
    assert masked.logprobs is not None
    assert plain[0].outputs[0].logprobs is not None
    first, other = masked.logprobs[0], plain[0].outputs[0].logprobs[0]
    assert masked.text.isdigit()
    assert first[masked.token_ids[0]].rank > 2
    best = {token: p.logprob for token, p in other.items()}
    assert {t: p.logprob for t, p in first.items() if t in best} == pytest.approx(best)


def test_streams_and_stop_strings(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=100, stop='"name"', structured_outputs={"json": PERSON}
    )
    chunks = list(llm.stream("Once", params))
    assert chunks[-1].stop_reason == '"name"'
    assert "".join(chunk.text for chunk in chunks).strip() == "{"


def test_plain_requests_beside_one_with_a_grammar_are_what_they_are_alone(llm: LLM) -> None:
    prompts = ["Once upon a time", "The dog", "A cat"]
    plain = SamplingParams(temperature=0.0, max_tokens=24)
    form = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs={"json": PERSON})
    alone = [llm.generate(p, plain)[0].outputs[0].text for p in prompts]
    mixed = llm.generate([*prompts, "Once"], [plain, plain, plain, form])
    assert [r.outputs[0].text for r in mixed[:3]] == alone


# What is refused.


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({}, "exactly one of json, regex"),
        ({"json": {}, "regex": "a"}, "not json and regex"),
        ({"xml": "a"}, "has no field 'xml'"),
        ({"json": "{"}, "json must be a JSON schema"),
        ({"json": 5}, "json must be a JSON schema: it is a int"),
        ({"choice": []}, "at least one text"),
        ({"choice": [1]}, "at least one text"),
        ({"choice": "yes"}, "at least one text"),
        ({"regex": 5}, "regex must be a text"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be"),
        ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, f"at most {MAX_GRAMMAR_LENGTH} characters"),
    ],
)
def test_a_bad_form_is_refused_in_one_sentence(form: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\Z") as caught:
        SamplingParams(structured_outputs=form)
    assert sentence in str(caught.value)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="json must be a JSON schema: it is nested"):
        SamplingParams(structured_outputs={"json": schema})
    text = '{"items":' * 100_000 + "{}" + "}" * 100_000
    with pytest.raises(ValueError, match="json must be a JSON schema: it is nested"):
        SamplingParams(structured_outputs={"json": text[: MAX_GRAMMAR_LENGTH * 10]})
    assert MAX_DEPTH < 5000


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"json": {"type": "objekt"}}, "json is refused: Invalid type: objekt"),
        ({"json": {"$ref": "#/nowhere"}}, "json is refused: Pointer '/nowhere'"),
        ({"json": {"$ref": "https://example.com/schema"}}, "json is refused"),
        ({"json": {"not": {"type": "string"}}}, 'json is refused: Unimplemented keys: ["not"]'),
        ({"json": False}, "json is refused: nothing satisfies"),
        ({"json": {"enum": []}}, "json is refused: Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "(a"}}, "json is refused: regex parse error"),
        ({"regex": "[a-"}, "regex is refused"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, "grammar is refused"),
        ({"grammar": "::="}, "grammar is refused"),
        ({"structural_tag": {"triggers": ["<"], "structures": []}}, "structural_tag is refused"),
        (
            {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "[", "end": "]"}]}},
            "begin of structure 0 starts with none of the triggers",
        ),
    ],
)
def test_what_the_library_refuses_is_refused_before_anything_runs(
    llm: LLM, form: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\Z") as caught:
        llm.generate("Once", SamplingParams(structured_outputs=form))
    assert sentence in str(caught.value)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a{100000}"},
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}},
    ],
    ids=["regex", "json"],
)
def test_a_form_whose_beginning_exceeds_the_limits_is_refused(
    llm: LLM, form: dict[str, Any]
) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="is refused: "):
            llm.restrictions.compile(SamplingParams(structured_outputs=form))


def test_a_refusal_does_not_quote_the_grammar(llm: LLM) -> None:
    form = {"grammar": 'start: a b\na: "x"\nb: /(?=a)/\n'}
    with pytest.raises(ValueError, match=r"at 3\(4\): .* is not supported$"):
        llm.restrictions.compile(SamplingParams(structured_outputs=form))


@pytest.mark.parametrize(
    ("options", "taken", "refused"),
    [
        ({}, ['{"a":1}', '{ "a": 1}', '{\n\t"a":1}', '{\r\n  "a":1}'], ['{\n\n"a":1}']),
        ({"whitespace_pattern": ""}, ['{"a":1}'], ['{ "a":1}', '{"a": 1}', '{\n"a":1}']),
        ({"whitespace_pattern": " ?"}, ['{"a":1}', '{"a": 1}'], ['{"a":  1}', '{\n"a":1}']),
    ],
)
def test_whitespace_between_tokens_of_json(
    llm: LLM, options: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = StructuredOutputsParams(json=schema, **options)
    grammar = llm.restrictions.compile(SamplingParams(structured_outputs=form))
    assert grammar is not None
    assert grammar.grammar is not None

    def is_taken(text: str) -> bool:
        assert grammar is not None
        assert grammar.grammar is not None
        matcher = grammar.grammar.matcher()
        for token in llm.tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
        return not matcher.error

    assert [is_taken(text) for text in taken] == [True] * len(taken)
    assert [is_taken(text) for text in refused] == [False] * len(refused)


def test_a_grammar_that_admits_nothing_ends_with_a_sentence(llm: LLM) -> None:
    """After the first token, as only what else is excluded shows."""
    one = llm.tokenizer.encode("1", add_special_tokens=False)
    params = SamplingParams(structured_outputs={"regex": "1a"}, allowed_token_ids=one)
    plain = SamplingParams(max_tokens=4, temperature=0.0)
    refused, other = llm.generate(["Once", "Twice"], [params, plain])
    assert refused.error is not None
    assert "leave no token to choose" in refused.error
    assert refused.outputs[0].finish_reason == "error"
    assert other.error is None
    assert not llm.engine.has_work


def test_a_grammar_without_a_first_token_is_refused(llm: LLM) -> None:
    letters = llm.tokenizer.encode("abc", add_special_tokens=False)
    params = SamplingParams(structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=letters)
    with pytest.raises(ValueError, match="bad_words leave no token to choose"):
        llm.generate("Once", params)
    stops = llm.tokenizer.encode("7", add_special_tokens=False)
    params = SamplingParams(
        structured_outputs={"regex": "[7]"}, stop_token_ids=stops, min_tokens=1, max_tokens=2
    )
    with pytest.raises(ValueError, match="min_tokens leave no token to choose"):
        llm.generate("Once", params)


def test_grammars_are_compiled_once_and_a_few_are_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megavm.grammars.MAX_CACHED", 2)
    compiler = GrammarCompiler(llm.tokenizer, llm.runner.vocab_size, [1])
    forms = [StructuredOutputsParams(regex=text) for text in ("a", "b", "c")]
    first = compiler.compile(forms[0])
    assert compiler.compile(StructuredOutputsParams(regex="a")) is first
    compiler.compile(forms[1])
    compiler.compile(forms[0])
    compiler.compile(forms[2])
    assert list(compiler._known) == [forms[0], forms[2]]
    assert compiler.compile(forms[0]) is first


def test_a_model_without_a_tokenizer_says_so(tmp_path: Any) -> None:
    compiler = GrammarCompiler(Tokenizer(tmp_path), 100, [1])
    with pytest.raises(ValueError, match=r"no tokenizer\.json in"):
        compiler.compile(StructuredOutputsParams(regex="a"))


# Biases, allowed tokens, bad words.


def test_allowed_token_ids_are_the_only_ones(llm: LLM) -> None:
    allowed = [300, 301, 302]
    for output in outputs_of_length(llm, allowed_token_ids=allowed):
        assert set(output.token_ids) <= set(allowed)


def test_a_bias_moves_the_choice_as_if_the_logit_were_higher(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("Once upon a time")
    logits = llm.logits(prompt)[-1].copy()
    best, second = logits.argsort()[::-1][:2].tolist()
    gap = float(logits[best] - logits[second])
    for bias, token in ((gap * 0.9, best), (gap * 1.1, second)):
        params = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={second: bias})
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == [token]
    params = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={best: -100})
    assert best not in llm.generate([prompt], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("word", ["there", "lively", "young mole"])
def test_bad_words_do_not_occur(llm: LLM, word: str) -> None:
    plain = llm.generate("Once upon a time", SamplingParams(max_tokens=20, temperature=0.0))
    assert word in plain[0].outputs[0].text
    params = SamplingParams(max_tokens=20, temperature=0.0, bad_words=[word])
    text = llm.generate("Once upon a time", params)[0].outputs[0].text
    assert word not in text
    before = plain[0].outputs[0].text.partition(word.split()[0])[0]
    assert text.startswith(before)  # up to the word the text is what it was


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {2048: 1.0}},
        {"allowed_token_ids": [5, 2048]},
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(llm: LLM, params: dict[str, Any]) -> None:
    name = next(iter(params))
    with pytest.raises(ValueError, match=f"^{name} holds token id 2048, which is outside"):
        llm.generate("Once", SamplingParams(**params))


def test_stop_tokens_alone_are_no_first_tokens(llm: LLM) -> None:
    params: dict[str, Any] = {"allowed_token_ids": [300, 301], "stop_token_ids": [300, 301]}
    assert llm.generate("Once", SamplingParams(max_tokens=4, **params))[0].outputs
    with pytest.raises(ValueError, match=r"allow only stop tokens.*: min_tokens is 2"):
        llm.generate("Once", SamplingParams(max_tokens=4, min_tokens=2, **params))


def outputs_of_length(llm: LLM, **params: Any) -> list[Any]:
    values = {"max_tokens": 12, "temperature": 1.0, "n": 3, **params}
    return list(llm.generate("Once upon a time", SamplingParams(**values))[0].outputs)


def test_what_a_request_leaves_no_token_for_is_no_part_of_the_next_answer() -> None:
    """Keys and values of its prompt are for all that begin as it does."""
    prompt = "Once upon a time there was a little girl who liked to play with a big red ball in"
    other = "Tom had a big dog . The dog was very happy and ran to the tree . Tom said , no , you"
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    contradiction = SamplingParams(
        max_tokens=4,
        structured_outputs={"regex": "xy"},
        bad_words=["y", "xy"],
    )
    with LLM("stories", dtype="float32", machine="cpu", block_size=16, num_blocks=4) as llm:
        right = llm.generate(prompt, greedy)[0].outputs[0]
    with LLM("stories", dtype="float32", machine="cpu", block_size=16, num_blocks=4) as llm:
        llm.generate(other, greedy)  # its keys and values stay in the blocks
        assert "leave no token" in (llm.generate(prompt, contradiction)[0].error or "")
        answer = llm.generate(prompt, greedy)[0].outputs[0]
    assert answer.token_ids == right.token_ids
    assert answer.logprobs == right.logprobs
