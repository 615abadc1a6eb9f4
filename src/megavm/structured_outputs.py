"""What an output must look like, with the names and meanings of vLLM's StructuredOutputsParams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

MAX_GRAMMAR_LENGTH: Final = 256 * 1024  # characters of a schema, an expression or a grammar
MAX_DEPTH: Final = 128  # of a schema's objects and lists in each other
_FORMS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of a completion; exactly one of the first six is given.

    Attributes:
        json: a JSON schema, as a dict or as JSON; stored as JSON.
        regex: a regular expression in Rust's syntax that the whole output matches.
        choice: texts, one of which is the output; stored as a tuple.
        grammar: a context-free grammar in llguidance's dialect of Lark, or in GBNF ("::=").
        json_object: True asks for any JSON object.
        structural_tag: JSON of {"triggers": [...], "structures": [{"begin", "schema", "end"}]}:
            text in which each begin, which starts with a trigger, is followed by JSON of its schema
            and by its end. Stored as JSON.
        disable_any_whitespace: no whitespace between the tokens of JSON.
        disable_additional_properties: objects have no properties but those that the schema names,
            where the schema does not say otherwise.
        whitespace_pattern: regular expression for the whitespace between the tokens of JSON; the
            default allows what people and programs write, and no endless rows of it.

    Raises:
        ValueError: none or several are given, or one has a wrong type or is too long.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            self._set("json_object", None)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"structured_outputs must hold exactly one of {', '.join(_FORMS)}, not {found}"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                self._read_json(name)
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise ValueError(f"json_object must be True or False, not {self.json_object!r}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a text, not {type(value).__name__}")
        if self.choice is not None:
            self._read_choice(self.choice)
        for name in (*given, "whitespace_pattern"):
            self._check_length(name)

    @classmethod
    def read(cls, value: object) -> StructuredOutputsParams:
        """The parameters in a dict of the same names, as in a JSON body; None counts as absent.

        Raises:
            ValueError: as for the constructor, or a name is unknown.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"structured_outputs must be an object, not {type(value).__name__}")
        known = {field.name for field in fields(cls)}
        present = {name: item for name, item in value.items() if item is not None}
        unknown = sorted(str(name) for name in present.keys() - known)
        if unknown:
            raise ValueError(f"structured_outputs has no field {unknown[0][:80]!r}")
        return cls(**present)

    @property
    def form(self) -> str:
        """The name of the form that is given, such as "json"."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _read_json(self, name: str) -> None:
        """Store a schema as JSON, so that parameters can be compared and are safe to keep."""
        value = getattr(self, name)
        try:
            content = json.loads(value) if isinstance(value, str) else value
            if not isinstance(content, Mapping | bool):
                raise ValueError(f"it is a {type(content).__name__}, not an object")
            _check_depth(content)
            self._set(name, json.dumps(content, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"{name} must be a JSON schema: {reason}") from error

    def _read_choice(self, choice: Sequence[str]) -> None:
        good = isinstance(choice, list | tuple) and all(isinstance(text, str) for text in choice)
        if not good or not choice:
            raise ValueError("choice must be a list of at least one text")
        self._set("choice", tuple(choice))

    def _check_length(self, name: str) -> None:
        value = getattr(self, name)
        texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
        length = sum(map(len, texts))
        if length > MAX_GRAMMAR_LENGTH:
            raise ValueError(
                f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters, not {length}"
            )


def _check_depth(value: object, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for item in value.values():
            _check_depth(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_depth(item, depth + 1)
