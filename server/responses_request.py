"""The body of POST /v1/responses, and the chat request that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import WithJsonSchema

from megavm.server.errors import bad_request, shorten, to_json
from megavm.server.protocol import Body, ChatRequest, Int, chat_request

_LOGPROBS: Final = "message.output_text.logprobs"
_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
_TOOL_CHOICES: Final = ("auto", "none", "required")
_ROLES: Final = {"user", "assistant", "system", "developer"}
# Fields of the chat request that stand for others here.
FIELDS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}

Input = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text of the user, or the items of a conversation.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}, "minItems": 1},
            ],
        }
    ),
]


class TextOptions(Body):
    """The kind of text of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """How much a model thinks before it answers."""

    effort: str | None = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses. Further fields are those of chat completions."""

    # The server keeps nothing of a request: what would need that is refused.
    unsupported: ClassVar = {
        "background": (),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
        # Chat completions' fields that have other names here, or no place in the answer.
        "best_of": (1,),
        "max_completion_tokens": (),
        "max_tokens": (),
        "messages": (),
        "n": (1,),
        "prompt_logprobs": (),
        "response_format": (),
        "return_token_ids": (),
    }
    reasons: ClassVar = {
        "previous_response_id": ", which stores no responses: send the whole conversation as input",
        "max_tokens": ", use max_output_tokens",
        "max_completion_tokens": ", use max_output_tokens",
        "messages": ", use input",
        "response_format": ", use text.format",
    }

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The chat request that asks for the same.

        Raises:
            ApiError: a field is wrong or not supported.
        """
        self._check_echo()
        own = {"input", "instructions", "max_output_tokens", "text", "reasoning", "include"}
        fields = self.model_dump(exclude=own | {"tools", "tool_choice"}, exclude_none=True)
        fields |= {
            "messages": _messages(self.input, self.instructions),
            "max_tokens": self.max_output_tokens,
            "logprobs": _LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            "tools": [_tool(i, tool) for i, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _tool_choice(self.tool_choice),
        }
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            fields["verbosity"] = self.text.verbosity
            fields["response_format"] = _response_format(self.text.format)
        return chat_request(fields)

    def _check_echo(self) -> None:
        """Raise ApiError for what the answer could not repeat: a number such as 1e400."""
        for name in ("text", "tools", "tool_choice", "metadata"):
            try:
                to_json(self.model_dump(include={name}))
            except ValueError as error:
                raise bad_request(f"{name} holds a number that is not finite", name) from error


def _messages(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a text or a list of at least one item", "input")
    for index, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise _wrong(index, f"must be an object, not {type(item).__name__}")
        _append(messages, index, item)
    return messages


def _append(messages: list[dict[str, Any]], index: int, item: Mapping[str, Any]) -> None:
    """Append what one item says to the messages of a chat."""
    kind = item.get("type", "message")
    last = messages[-1] if messages else {}
    if kind == "message":
        message = _message(index, item)
        if message["role"] == "system" and len(messages) == 1 and last["role"] == "system":
            # Templates know one system message, at the beginning.
            last["content"] += "\n\n" + message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if last.get("role") != "assistant":  # the calls of a turn, and the text before, are one
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _text(index, item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":  # templates leave out what a model thought in earlier turns
        raise _wrong(
            index,
            f"has the type {shorten(str(kind))!r}: this server reads message, function_call,"
            " function_call_output and reasoning",
        )


def _message(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(index, f"must have a role of {', '.join(sorted(_ROLES))}")
    content = _text(index, item.get("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def _text(index: int, content: Any) -> str:
    """The text of an item's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(index, "must have a text, or a list of parts, as its content or output")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise _wrong(index, f"holds a part of type {shorten(str(kind))!r}: only text is read")
        text = part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise _wrong(index, f"holds a part of type {kind!r} without a text")
        texts.append(text)
    return "\n".join(texts)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Chat completions' description of a function."""
    if tool.get("type") != "function":
        kind = shorten(str(tool.get("type")))
        raise bad_request(
            f"tool {index} has the type {kind!r}: only function is supported", "tools"
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    if choice in (None, "", *_TOOL_CHOICES):
        return choice
    if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
        raise bad_request(
            f"tool_choice must be one of {', '.join(_TOOL_CHOICES)}, or the object"
            f' {{"type": "function", "name": ...}}, not {shorten(repr(choice))}',
            "tool_choice",
        )
    return {"type": choice.get("type"), "function": {"name": choice["name"]}}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in given.items() if key != "type"},
    }


def _wrong(index: int, what: str) -> Exception:
    return bad_request(f"item {index} of input {what}", "input")
