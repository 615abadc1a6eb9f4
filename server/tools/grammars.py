"""Grammars of calls, for llguidance: what a model may write if it must call, or call strictly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from megavm.server.errors import ApiError
from megavm.server.tools.request import Function, ToolChoice
from megavm.structured_outputs import StructuredOutputsParams

SpecialId = Callable[[str], int | None]

# Whitespace as models write it; a schema's oneOf counts as anyOf, as in structured outputs.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
_ANY_TEXT: Final = r"/(.|\n)*/"
_ANY_OBJECT: Final = {"type": "object"}
# Keywords of a schema that, beside the properties, say which arguments there may be.
_COMPOSITE: Final = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "minProperties", "maxProperties"),
)
_DEFINITIONS: Final = ("$defs", "definitions")
_REFUSED: Final = "grammar is refused: "
_PLACE: Final = re.compile(r"(?:at )?(\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_RULE_OF_FUNCTION: Final = re.compile(r"[a-z]+_(\d+)")


@dataclass(frozen=True)
class Form:
    """How a model writes calls.

    Attributes:
        key: the key of the arguments in a call that is JSON; "": a call is one of Python.
        begin, end: what stands around each call.
        list_begin, list_end: what stands around all of them.
        separator: what stands between two.
        mark: a control token that may stand before all of them.
        sign: expression for what begins a call in a text; `{names}` are the functions' names.
    """

    key: str
    sign: str
    begin: str = ""
    end: str = ""
    list_begin: str = ""
    list_end: str = ""
    separator: str = ""
    mark: str = ""


def calls_grammar(
    form: Form, choice: ToolChoice, markers: Sequence[str], special_id: SpecialId
) -> StructuredOutputsParams | None:
    """The form that an answer must have; None: any text.

    The answer consists of calls if the choice requires them. Else it may be text as well, and the
    arguments of strict functions follow their schemas. `markers`: texts that are one token each;
    `special_id` gives the ids of those that are control tokens.

    Raises:
        ValueError: a function's parameters are not supported.
    """
    if not choice.required and not any(function.strict for function in choice.functions):
        return None
    writer = _Writer(form, markers, special_id)
    lines = writer.required(choice) if choice.required else writer.possible(choice)
    for number, function in enumerate(choice.functions):
        lines += writer.function(number, function, choice.required or function.strict)
    try:
        return StructuredOutputsParams(grammar="\n".join(["%llguidance {}", *lines]))
    except ValueError as error:
        raise ValueError(f"the schemas of the tools are too long: {error}") from error


@contextmanager
def refusals_name_tools(choice: ToolChoice, form: StructuredOutputsParams) -> Iterator[None]:
    """Context: an error about the form of `calls_grammar` names the function that causes it."""
    try:
        yield
    except ApiError as error:
        if error.message.startswith(_REFUSED):
            reason = error.message.removeprefix(_REFUSED)
            error.message = _about_tools(reason, choice, str(form.grammar).split("\n"))
        raise


def _about_tools(reason: str, choice: ToolChoice, lines: Sequence[str]) -> str:
    place = _PLACE.match(reason)
    if place is not None and 0 < int(place[1]) <= len(lines):
        rule = _RULE_OF_FUNCTION.match(lines[int(place[1]) - 1])
        if rule is not None:
            name = choice.functions[int(rule[1])].name
            return f"parameters of the tool {name}: {reason[place.end() :]}"
    return f"the grammar of the tools is refused: {reason}"


class _Writer:
    """Writes rules in llguidance's dialect of Lark; see `calls_grammar`."""

    def __init__(self, form: Form, markers: Sequence[str], special_id: SpecialId) -> None:
        self._form = form
        self._special = {text: i for text in markers if (i := special_id(text)) is not None}

    def required(self, choice: ToolChoice) -> list[str]:
        """Calls and nothing else."""
        form = self._form
        more = f"({self._text(form.separator)} call)*" if choice.parallel else ""
        # In one token of the grammar, since `[` alone is also a beginning of text.
        first = self._bodies(choice, "first") if form.list_begin else "call"
        return [
            f"start: {first} {more} {self._text(form.list_end)}",
            f"call: {self._text(form.begin)} {self._bodies(choice)} {self._text(form.end)}",
        ]

    def possible(self, choice: ToolChoice) -> list[str]:
        """Text and calls."""
        form, repeat = self._form, "*" if choice.parallel else "?"
        marker = form.begin.strip()
        if marker in self._special:
            _, call = self.required(choice)
            return [f"start: (TEXT call){repeat} TEXT", f"TEXT: {_ANY_TEXT}", call]
        names = "|".join(re.escape(function.name) for function in choice.functions)
        sign = form.sign.replace("{names}", names)
        text = rf"TEXT: {_ANY_TEXT} & ~/(.|\n)*{sign}(.|\n)*/"
        if marker:
            rest = form.begin.removeprefix(marker)
            return [
                f"start: (before {self._text(rest)} {self._bodies(choice)}"
                f" {self._text(form.end)}){repeat} TEXT",
                rf"before[lazy]: /(.|\n)*{sign}/",
                text,
            ]
        # No token tells where calls begin in a text, so there is either text or calls.
        start, call = self.required(choice)
        mark = f"<[{self._special[form.mark]}]>? " if form.mark in self._special else ""
        calls = start.removeprefix("start: ")
        return [f"start: TEXT | {mark}calls", f"calls: {calls}", text, call]

    def function(self, number: int, function: Function, strict: bool) -> list[str]:
        """The rules of one function's calls."""
        name = function.name
        if self._form.key:
            schema = _schema_of(function) if strict else _ANY_OBJECT
            head = json.dumps(f'{{"name": "{name}", "{self._form.key}": ')
            return [
                f"body_{number}: {head} arguments_{number} {json.dumps('}')}",
                f"arguments_{number}: {_json_rule(schema)}",
            ]
        rest = f"arguments_{number}_0 {json.dumps(')')}"
        return [
            f"body_{number}: {json.dumps(f'{name}(')} {rest}",
            f"first_{number}: {json.dumps(f'{self._form.list_begin}{name}(')} {rest}",
            *_keywords(number, name, _schema_of(function), strict),
        ]

    def _bodies(self, choice: ToolChoice, rule: str = "body") -> str:
        return "(" + " | ".join(f"{rule}_{i}" for i in range(len(choice.functions))) + ")"

    def _text(self, text: str) -> str:
        """A text as the grammar has it: control tokens by their ids."""
        if not text:
            return ""
        pattern = "|".join(map(re.escape, self._special)) or r"(?!)"
        parts = re.split(f"({pattern})", text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        )


def _schema_of(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments: those that it names, unless it says otherwise."""
    schema = {**_ANY_OBJECT, **function.parameters}
    try:
        StructuredOutputsParams(json=schema)
    except ValueError as error:
        raise ValueError(f"parameters of the tool {function.name}: {error}") from error
    if not any(key in schema for key in _COMPOSITE):
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", False)
    return schema


def _json_rule(schema: Mapping[str, Any] | bool) -> str:
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"not": {}}
    text = json.dumps({"x-guidance": _JSON_OPTIONS, **schema})
    # "::=" would let the grammar be taken for GBNF; it occurs within strings only.
    return "%json " + text.replace("::=", "\\u003a:=")


def _keywords(number: int, name: str, schema: Mapping[str, Any], strict: bool) -> list[str]:
    """Rules for keyword arguments in the order of the schema, from `arguments_{number}_0`.

    Values are JSON. Rule i is the rest from property i on, where none has been written yet; rule
    `next_{number}_{i}` is the same where one has been.
    """
    composite = [key for key in _COMPOSITE if key in schema]
    properties, required = schema.get("properties", {}), schema.get("required", [])
    odd = [key for key in properties if not key.isidentifier()]
    unknown = [key for key in required if key not in properties]
    if composite or odd or unknown:
        cause = (
            f"{composite[0]} is not supported in calls of Python"
            if composite
            else f"{odd[0]!r} is no keyword of Python"
            if odd
            else f"{unknown[0]!r} is required and no property"
        )
        raise ValueError(f"parameters of the tool {name}: {cause}")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    lines = []
    for i, (key, value) in enumerate(properties.items()):
        written = f"{json.dumps(f'{key}=')} value_{number}_{i} next_{number}_{i + 1}"
        optional = key not in required or not strict
        skip = (f" | arguments_{number}_{i + 1}", f" | next_{number}_{i + 1}")
        lines += [
            f"arguments_{number}_{i}: {written}{skip[0] if optional else ''}",
            f'next_{number}_{i}: ", " {written}{skip[1] if optional else ""}',
            f"value_{number}_{i}: {_value_rule(value, shared, strict)}",
        ]
    last = len(properties)
    return [*lines, f'arguments_{number}_{last}: ""', f'next_{number}_{last}: ""']


def _value_rule(value: Any, shared: Mapping[str, Any], strict: bool) -> str:
    if not strict:
        return _json_rule(True)
    return _json_rule(value if isinstance(value, bool) else {**shared, **value})
