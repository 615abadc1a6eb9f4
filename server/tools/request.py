"""The tools of a request: `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megavm.server.errors import ApiError, bad_request, shorten

MAX_NAME: Final = 64  # characters of a function's name, as OpenAI's
_NAME: Final = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")
_CHOICES: Final = ("none", "auto", "required")


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: its name.
        parameters: JSON schema of its arguments.
        strict: whether the arguments of every call must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """The functions that an answer may call.

    Attributes:
        functions: all functions, or the one that must be called.
        required: whether there must be a call.
        parallel: whether there may be several.
    """

    functions: tuple[Function, ...]
    required: bool
    parallel: bool


def read_tool_choice(
    tools: Sequence[Any] | None, choice: object, parallel: bool | None
) -> ToolChoice | None:
    """The functions that the answer may call; None if it may call none.

    Raises:
        ApiError: a tool or the choice is malformed; `param` names it.
    """
    functions = [_read_tool(index, tool) for index, tool in enumerate(tools or ())]
    names = [function.name for function in functions]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise bad_request(f"two tools have the name {twice}", "tools")
    if choice is None or choice == "":
        choice = "auto"
    if isinstance(choice, Mapping):
        function = functions[_index(_chosen_name(choice), names)]
        return ToolChoice((function,), required=True, parallel=False)
    if choice not in _CHOICES:
        raise bad_request(
            f"tool_choice must be one of {', '.join(_CHOICES)}, or the object"
            f' {{"type": "function", "function": {{"name": ...}}}}, not {shorten(repr(choice))}',
            "tool_choice",
        )
    if choice == "required" and not functions:
        raise bad_request('tool_choice "required" needs tools', "tool_choice")
    if choice == "none" or not functions:
        return None
    return ToolChoice(tuple(functions), choice == "required", parallel is not False)


def _read_tool(index: int, tool: Any) -> Function:
    where = f"tools.{index}"
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        what = "an object" if kind is None else f"a function, not of type {shorten(repr(kind))}"
        raise bad_request(f"tool {index} must be {what}", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_request(f"tool {index} has no function", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(
            f"the name of tool {index} must be 1 to {MAX_NAME} letters, digits, _, - or .,"
            f" not {shorten(repr(name))}",
            f"{where}.function.name",
        )
    for key, kinds in (("description", str), ("parameters", Mapping), ("strict", bool)):
        value = function.get(key)
        if value is not None and not isinstance(value, kinds):
            raise _wrong(name, f"{where}.function.{key}", key, type(value).__name__)
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object":
        kind = shorten(repr(parameters["type"]))
        raise _wrong(name, f"{where}.function.parameters", "parameters", f"of type {kind}")
    return Function(name, parameters, bool(function.get("strict")))


def _wrong(name: str, param: str, key: str, found: str) -> ApiError:
    what = {
        "description": "must be a text",
        "parameters": "must be the JSON schema of an object",
        "strict": "must be true or false",
    }[key]
    return bad_request(f"{key} of the tool {name} {what}, not {found}", param)


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise bad_request(
            'a tool_choice that is an object must be {"type": "function", "function":'
            f' {{"name": ...}}}}, not {shorten(repr(dict(choice)))}',
            "tool_choice",
        )
    return name


def _index(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise bad_request(
            f"tool_choice names the function {shorten(name)}, which is none of the tools",
            "tool_choice",
        )
    return names.index(name)
