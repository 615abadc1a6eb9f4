"""The body of POST /v1/messages, and the chat request that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import WithJsonSchema

from megavm.server.errors import bad_request, shorten
from megavm.server.protocol import Body, ChatRequest, Int, chat_request

# Fields of the chat request that have other names here.
FIELDS: Final = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_LEFT_OUT: Final = {"thinking", "redacted_thinking"}  # templates leave out earlier thoughts

Messages = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["user", "assistant"]},
                    "content": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "array", "items": {"type": "object"}},
                        ]
                    },
                },
            },
            "minItems": 1,
        }
    ),
]
System = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, or blocks of text.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}},
                {"type": "null"},
            ],
        }
    ),
]


class CountTokensRequest(Body):
    """The body of POST /v1/messages/count_tokens. Further fields are those of chat completions."""

    unsupported: ClassVar = {
        "container": (),
        "mcp_servers": (),
        "thinking": ({"type": "disabled"},),
        # Chat completions' fields that have other names here, or no place in the answer.
        "best_of": (1,),
        "logprobs": (),
        "max_completion_tokens": (),
        "n": (1,),
        "prompt_logprobs": (),
        "response_format": (),
        "return_token_ids": (),
        "stop": (),
    }
    reasons: ClassVar = {
        "max_completion_tokens": ", use max_tokens",
        "response_format": ", use output_config.format",
        "stop": ", use stop_sequences",
    }

    model: str | None = None
    messages: Messages
    system: System = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The chat request that asks for the same.

        Raises:
            ApiError: a field is wrong or not supported.
        """
        return chat_request(self.chat_fields())

    def chat_fields(self) -> dict[str, Any]:
        """The fields of that chat request."""
        own = {"messages", "system", "tools", "tool_choice"}
        fields = self.model_dump(exclude=own, exclude_none=True)
        for name in ("thinking", "cache_control"):
            fields.pop(name, None)
        messages = _messages(self.messages, self.system)
        fields |= {
            "messages": messages,
            "tools": [_tool(i, tool) for i, tool in enumerate(self.tools or ())] or None,
            # The model goes on with an answer that the client has begun.
            "continue_final_message": messages[-1]["role"] == "assistant",
        }
        if self.tool_choice is not None:
            fields |= _tool_choice(self.tool_choice)
        return fields


class OutputConfig(Body):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages. Further fields are those of chat completions."""

    max_tokens: Int
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None

    def chat_fields(self) -> dict[str, Any]:
        if self.max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        fields = super().chat_fields()
        fields["stop"] = fields.pop("stop_sequences", None)
        fields.pop("output_config", None)
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            fields["response_format"] = _response_format(self.output_config.format)
        return fields


def _messages(given: Any, system: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be a list of at least one message", "messages")
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": _text("system", system, "system")})
    for index, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise _wrong(index, f"must be an object, not {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise _wrong(index, "must have the role user or assistant")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _blocks(index, role, content)
        else:
            raise _wrong(index, "must have a text or a list of blocks as its content")
    return messages


def _blocks(index: int, role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """The messages of a chat that one message stands for: results of tools, then the rest."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind == "text":
            texts.append(_text(f"message {index}", [block], "messages"))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            content = _text(f"message {index}", block.get("content") or "", "messages")
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            results.append({**result, "content": content})
        elif not (kind in _LEFT_OUT and role == "assistant"):
            raise _wrong(
                index,
                f"of the {role} holds a block of type {shorten(str(kind))!r}: this server reads"
                " text, tool_use of the assistant and tool_result of the user",
            )
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts else None}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


def _text(where: str, content: Any, field: str) -> str:
    """The text of a string or of blocks of text."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind != "text":
            kind = shorten(str(kind))
            raise bad_request(f"{where} holds a block of type {kind!r}: only text is read", field)
        if not isinstance(block.get("text"), str):
            raise bad_request(f"{where} holds a block of type 'text' without a text", field)
        texts.append(block["text"])
    return "\n".join(texts)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Chat completions' description of a function."""
    if tool.get("type", "custom") not in ("custom", None):
        kind = shorten(str(tool["type"]))
        raise bad_request(f"tool {index} has the type {kind!r}: only custom is supported", "tools")
    kept = {"name", "description", "strict"}
    function = {key: value for key, value in tool.items() if key in kept}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if "disable_parallel_tool_use" in choice:
        fields["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise bad_request(
                'a tool_choice of type tool must be {"type": "tool", "name": ...}, not'
                f" {shorten(repr(choice))}",
                "tool_choice",
            )
        named = {"type": "function", "function": {"name": choice.get("name")}}
        return {**fields, "tool_choice": named}
    if kind not in _TOOL_CHOICES:
        raise bad_request(
            f"tool_choice has the type {shorten(str(kind))!r}: it must be auto, any, tool or none",
            "tool_choice",
        )
    return {**fields, "tool_choice": _TOOL_CHOICES[kind]}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": given.get("schema"), "strict": True},
    }


def _wrong(index: int, what: str) -> Exception:
    return bad_request(f"message {index} {what}", "messages")
