"""The form that a request asks for: response_format, structured_outputs, vLLM's older guided_*."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from megavm.server.errors import bad_request, shorten
from megavm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from megavm.server.protocol import GenerationRequest

_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FORMAT_FIELDS: Final = ("response_format", "structured_outputs", *_GUIDED)


def read_format(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form of the output that a body asks for; None if it may be any text.

    Raises:
        ApiError: a field is invalid, or two ask for different forms.
    """
    if body.model_fields_set.isdisjoint(FORMAT_FIELDS):
        return None
    read: dict[str, Callable[[Any], StructuredOutputsParams | None]] = {
        "response_format": _response_format,
        "structured_outputs": StructuredOutputsParams.read,
        **{name: functools.partial(_guided, body, name) for name in _GUIDED},
    }
    found: dict[str, StructuredOutputsParams] = {}
    for name in FORMAT_FIELDS:
        value = getattr(body, name)
        if value is None:
            continue
        try:
            form = read[name](value)
        except ValueError as error:
            raise bad_request(shorten(str(error)), name) from error
        if form is not None:
            found[name] = form
    if len(found) > 1:
        first, second = list(found)[:2]
        raise bad_request(f"{first} and {second} both give the form of the output", second)
    return next(iter(found.values()), None)


def _response_format(value: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Raises ValueError."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # as llama.cpp and Together name it
        return StructuredOutputsParams(json_object=True) if schema is None else _json(schema)
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, Mapping) or described.get("schema") is None:
            raise ValueError("response_format of type json_schema needs a schema")
        return _json(described["schema"])
    if kind == "structural_tag":
        content = {name: value[name] for name in ("triggers", "structures") if name in value}
        return StructuredOutputsParams(structural_tag=content)
    raise ValueError(
        "response_format must have the type text, json_object, json_schema or structural_tag,"
        f" not {kind!r}"
    )


def _json(schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)


def _guided(body: GenerationRequest, name: str, value: Any) -> StructuredOutputsParams:
    pattern = body.guided_whitespace_pattern
    return StructuredOutputsParams(
        **{name.removeprefix("guided_"): value}, whitespace_pattern=pattern
    )
