"""A model's chat template: a program in Jinja that makes the text of a prompt from messages."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megavm.scheduler.llama.json_files import read_json

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_JSON_FILE: Final = "chat_template.json"

# Arguments of a chat template that `ChatTemplate.render` sets itself, and two that are
# transformers' own: a caller's chat_template_kwargs must not replace them.
RESERVED_TEMPLATE_KWARGS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)
_CONTINUE_HERE: Final = "<<|continue here|>> "  # marks the end of the message to continue

Message = Mapping[str, Any]


class ChatTemplate:
    """A chat template. It is compiled when it is first used.

    Attributes:
        source: the Jinja program.
        name: what messages call it, such as "the chat template of DIRECTORY".
    """

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.name = name
        self._compiled: jinja2.Template | None = None

    def compile(self) -> jinja2.Template:
        """The compiled template.

        Raises:
            ValueError: it is not valid.
        """
        import jinja2

        if self._compiled is None:
            try:
                self._compiled = _environment().from_string(self.source)
            except jinja2.TemplateSyntaxError as error:
                where = f"line {error.lineno}: {error.message}"
                raise ValueError(f"{self.name} is not valid: {where}") from error
            except RecursionError as error:
                raise ValueError(f"{self.name} is nested too deeply") from error
            except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
                # Jinja makes a program in Python, which may have errors of its own.
                raise ValueError(
                    f"{self.name} is not valid: {type(error).__name__}: {error}"
                ) from error
        return self._compiled

    @functools.cached_property
    def renders_tools(self) -> bool:
        """Whether the template uses descriptions of tools.

        Raises:
            ValueError: it is not valid.
        """
        from jinja2 import meta

        self.compile()
        return "tools" in meta.find_undeclared_variables(_environment().parse(self.source))

    def render(
        self,
        messages: Sequence[Message],
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat; see `Tokenizer.chat_prompt`.

        `special_tokens`: name to text, such as {"bos_token": "<s>"}. `variables`: further ones of
        the template, its chat_template_kwargs.

        Raises:
            ValueError: a message or a tool is malformed, options exclude each other, or the
            template is not valid or refuses.
        """
        import jinja2

        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: the prompt"
                " ends within the last message, or after the head of a new one"
            )
        check_template_kwargs(variables)
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if "developer" not in self.source:  # OpenAI's clients call it so
            for message in plain:
                if message["role"] == "developer":
                    message["role"] = "system"
        if not plain:
            raise ValueError("messages must hold at least one message")
        if continue_final_message:
            plain[-1]["content"] = _marked(plain)
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping):
                raise ValueError(f"tool {index} must be a dict, not {type(tool).__name__}")
        template = self.compile()
        try:
            text = template.render(
                {
                    **special_tokens,
                    **(variables or {}),
                    "messages": plain,
                    "add_generation_prompt": (
                        not continue_final_message
                        if add_generation_prompt is None
                        else add_generation_prompt
                    ),
                    "tools": tools or None,
                    "documents": None,
                }
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.name} failed: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template is a program by the model's author; these are its run-time errors.
            raise ValueError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{self.name} recurses forever") from error
        return self._until_mark(text) if continue_final_message else text

    def _until_mark(self, text: str) -> str:
        """The text before the mark of `_marked`; without spaces if the template strips them."""
        place = text.rfind(_CONTINUE_HERE.strip())
        if place < 0:
            raise ValueError(
                f"{self.name} leaves out the content of the last message, so it cannot be continued"
            )
        kept = text.startswith(_CONTINUE_HERE, place)
        return text[:place] if kept else text[:place].rstrip()


def read_template(directory: Path, config_file: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a directory: from its own file, else from `config`, read from another.

    Raises ValueError when the file that has it is invalid.
    """
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return read_text(path)
    path = directory / TEMPLATE_JSON_FILE
    template = read_json(path).get("chat_template") if path.is_file() else None
    if template is None:
        path, template = config_file, config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
        if template is None:
            raise ValueError(f"chat_template in {path} has no entry named default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template in {path} is a {type(template).__name__}, not a string")
    return template


def read_text(path: Path) -> str:
    """The text of a template file. Raises ValueError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read {path}: {reason}") from error


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """A copy of one chat message: its content as one string, arguments of its calls as dicts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} must be a dict with a string under role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        parts = []
        for part in content:
            if isinstance(part, Mapping):
                kind, text = part.get("type", "text"), part.get("text")
            else:
                kind, text = "text" if isinstance(part, str) else type(part).__name__, part
            if kind != "text":
                raise ValueError(
                    f"message {index} holds a part of type {kind!r}: only text is read"
                )
            if not isinstance(text, str):
                raise ValueError(f"message {index} holds a part of type {kind!r} without a text")
            parts.append(text)
        content = "\n".join(parts)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of message {index} must be text or a list of text parts")
    plain = {**message, "content": content}
    # Templates ask whether the key is there, not what it holds.
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = _plain_calls(index, calls)
    return plain


def _marked(messages: Sequence[Mapping[str, Any]]) -> str:
    """The content of the last message, with the mark where its continuation begins.

    The mark ends with a space, which a template that strips contents removes. So transformers
    tells these templates from others in its `continue_final_message`.
    """
    content = messages[-1]["content"]
    if not isinstance(content, str):
        raise ValueError(
            f"message {len(messages) - 1} has no text that continue_final_message could continue"
        )
    return content + _CONTINUE_HERE


def _plain_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    """Copies of the tool calls of message `index`, with their arguments as dicts.

    Arguments that are not the JSON of an object become {}, as in vLLM: the model wrote them, and
    refusing them would end the conversation.
    """
    if not isinstance(calls, list | tuple):
        raise ValueError(f"tool_calls of message {index} must be a list")
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"a tool call of message {index} must be a dict with a function that has a name"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            arguments = {}
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def check_template_kwargs(given: Mapping[str, Any] | None) -> None:
    """Raise ValueError for chat_template_kwargs that `ChatTemplate.render` sets itself."""
    reserved = sorted(RESERVED_TEMPLATE_KWARGS & (given or {}).keys())
    if reserved:
        raise ValueError(
            f"chat_template_kwargs must not hold {', '.join(reserved)}: each has a parameter of its"
            " own"
        )


def _environment() -> jinja2.Environment:
    """The Jinja environment that chat templates expect: a sandbox with a few helpers."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} marks the assistant's text for training; here it renders its body."""

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    GenerationBlock.tags = {"generation"}

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Replaces Jinja's own filter, which escapes HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
