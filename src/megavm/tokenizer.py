"""Text to token ids and back: a model's tokenizer, its chat template, incremental decoding."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megavm.scheduler.llama.json_files import read_json

if TYPE_CHECKING:
    import jinja2
    import tokenizers

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_JSON_FILE: Final = "chat_template.json"
LONG_TEXT: Final = 4096  # characters or tokens; longer texts are processed without the GIL

# Arguments of a chat template that `Tokenizer.chat_prompt` sets itself, and two that are
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


class Tokenizer:
    """The tokenizer of one model directory.

    Without tokenizer.json in the directory, `available` is false: the model still runs on token
    ids, and only functions that need text raise. Decoding does not clean up spaces before
    punctuation. Safe to share between threads.

    Attributes:
        directory: the model directory.
        special_tokens: name to text, such as {"bos_token": "<s>"}; passed to chat templates.
        bos_token_id, eos_token_id: ids of these two tokens, or None.
        chat_template: the Jinja source, or None.
        template_file: the file that it is from, if that takes the place of the model's; else None.
    """

    def __init__(
        self, directory: str | Path, chat_template: str | os.PathLike[str] | None = None
    ) -> None:
        """Read the tokenizer files of `directory`.

        `chat_template` is a file with a Jinja template that takes the place of the model's.

        Raises:
            ValueError: a file exists but is invalid, or `chat_template` cannot be read.
        """
        self.directory = Path(directory)
        config = self._read_optional(TOKENIZER_CONFIG_FILE)
        self.special_tokens = _named_tokens(
            self._read_optional(SPECIAL_TOKENS_FILE)
        ) | _named_tokens(config)
        self._template: jinja2.Template | None = None
        self._renders_tools: bool | None = None
        self.template_file = None if chat_template is None else os.fspath(chat_template)
        if chat_template is None:
            self.chat_template = _read_template(self.directory, config)
            self._template_name = f"the chat template of {self.directory}"
        else:
            self.chat_template = _read_text(Path(chat_template))
            self._template_name = f"the chat template {Path(chat_template).name}"
            self._compile_template(self.chat_template)
        self._backend = self._read_backend()
        self._special_ids: frozenset[int] = frozenset()
        self._token_texts: dict[int, str] = {}
        self._whole_texts: dict[int, str | None] = {}
        # The texts of whole characters that `whole_text` has given, but those of control tokens.
        self.plain_texts: dict[int, str] = {}
        self._byte_level = _is_byte_level(self._backend)
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @property
    def available(self) -> bool:
        """Whether the model has a tokenizer, so that text can be encoded and decoded."""
        return self._backend is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer; the model's vocabulary may be padded beyond it."""
        if self._backend is None:
            return 0
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` including those that begin (and end) a text.

        tokenizer.json defines these tokens; as in transformers, add_bos_token and similar keys of
        tokenizer_config.json have no effect. A chat prompt already contains its special tokens:
        encode it with add_special_tokens=False.

        Raises:
            ValueError: there is no tokenizer, or `text` is not valid Unicode text.
        """
        backend = self._require_backend()
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error}") from error
        if len(text) > LONG_TEXT:
            # Only the library's batch functions release the GIL.
            encoding = backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids beyond the tokenizer's vocabulary (the model's padding) are skipped.

        Raises:
            ValueError: there is no tokenizer, or an id is not in [0, 2**32).
        """
        backend = self._require_backend()
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < 1 << 32:
                raise ValueError(f"token id {token_id!r} is not an integer in [0, {1 << 32})")
        if len(ids) > LONG_TEXT:  # as in encode
            return backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        text: str = backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text that one token adds inside a text; control tokens have their text too.

        A token that is a part of a character gives U+FFFD. `decode` of the token alone may drop its
        leading space, so the token is decoded behind another one.

        Raises:
            ValueError: as for `decode`.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            before = self.encode("a", add_special_tokens=False)
            whole = self.decode([*before, token_id], skip_special_tokens=False)
            text = whole[len(self.decode(before, skip_special_tokens=False)) :]
            self._token_texts[token_id] = text
        return text

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, special tokens included.

        Raises:
            ValueError: there is no tokenizer.
        """
        text: str = self._require_backend().to_str()
        return text

    def whole_text(self, token_id: int) -> str | None:
        """The text that one token adds wherever it stands; None if that depends on its neighbours.

        Byte-level decoders (GPT-2, Llama 3, Qwen) join the bytes of all tokens, so a token of whole
        characters has one text. A token with a part of a character has none, nor has any token of
        another decoder. Control tokens have their text. Texts are remembered: repeated calls cost
        one look-up. Never raises; the text of an unknown token is "".
        """
        try:
            return self._whole_texts[token_id]
        except (KeyError, TypeError):
            pass
        if not self.knows(token_id):
            return ""
        return self._remember(
            token_id, self.decode([token_id], False) if self._byte_level else None
        )

    def _remember(self, token_id: int, text: str | None) -> str | None:
        if text is not None and "\ufffd" in text:
            text = None
        self._whole_texts[token_id] = text
        if text is not None and token_id not in self._special_ids:
            self.plain_texts[token_id] = text
        return text

    def remember_texts(self) -> None:
        """Decode every token below `vocab_size`, so that no stream has to: 0.4 s for 128,256."""
        if self._backend is None or not self._byte_level:
            return
        ids = [i for i in range(self.vocab_size) if i not in self._whole_texts and self.knows(i)]
        texts = self._backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
        for token_id, text in zip(ids, texts, strict=True):
            self._remember(token_id, text)

    def knows(self, token_id: int) -> bool:
        """Whether the tokenizer has a token with this id; never raises."""
        return (
            self._backend is not None
            and isinstance(token_id, int)
            and 0 <= token_id < 1 << 32
            and self._backend.id_to_token(token_id) is not None
        )

    def special_id(self, text: str) -> int | None:
        """The id of the control token with this text; None if there is none."""
        token_id = None if self._backend is None else self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template shows the model descriptions of tools.

        Raises:
            ValueError: as for `require_chat`, or the template is not valid.
        """
        from jinja2 import meta

        if self._renders_tools is None:
            template = self._require_template()
            self._compile_template(template)
            syntax = _template_environment().parse(template)
            self._renders_tools = "tools" in meta.find_undeclared_variables(syntax)
        return self._renders_tools

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of all control tokens."""
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        """Whether this id is a control token, which `decode` leaves out by default."""
        return token_id in self._special_ids

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render `messages` with the model's chat template.

        A message is {"role": ..., "content": ...}; its content may be a list of parts
        {"type": "text", "text": ...}, which are joined by newlines. The arguments of its
        tool_calls may be JSON, as OpenAI's clients send them, or a dict. `add_generation_prompt`
        opens the assistant's turn at the end, by default unless `continue_final_message` is set:
        then the prompt ends within the last message, at the end of its content. `tools`: OpenAI's
        descriptions of functions. `chat_template_kwargs`: further variables of the template.

        Raises:
            ValueError: the model has no chat template, a message or a tool is malformed, options
            exclude each other, or the template refuses.
        """
        import jinja2

        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: the prompt"
                " ends within the last message, or after the head of a new one"
            )
        check_template_kwargs(chat_template_kwargs)
        template = self._require_template()
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise ValueError("messages must hold at least one message")
        if continue_final_message:
            plain[-1]["content"] = _marked(plain)
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping):
                raise ValueError(f"tool {index} must be a dict, not {type(tool).__name__}")
        try:
            text = self._compile_template(template).render(
                {
                    **self.special_tokens,
                    **(chat_template_kwargs or {}),
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
            raise ValueError(f"{self._template_name} failed: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template is a program by the model's author; these are its run-time errors.
            raise ValueError(
                f"{self._template_name} failed: {type(error).__name__}: {error}"
            ) from error
        except RecursionError as error:
            raise ValueError(f"{self._template_name} recurses forever") from error
        return self._until_mark(text) if continue_final_message else text

    def _until_mark(self, text: str) -> str:
        """The text before the mark of `_marked`; without spaces if the template strips them."""
        place = text.rfind(_CONTINUE_HERE.strip())
        if place < 0:
            raise ValueError(
                f"{self._template_name} leaves out the content of the last message, so it cannot be"
                " continued"
            )
        kept = text.startswith(_CONTINUE_HERE, place)
        return text[:place] if kept else text[:place].rstrip()

    def _compile_template(self, template: str) -> jinja2.Template:
        import jinja2

        if self._template is None:
            try:
                self._template = _template_environment().from_string(template)
            except jinja2.TemplateSyntaxError as error:
                where = f"line {error.lineno}: {error.message}"
                raise ValueError(f"{self._template_name} is not valid: {where}") from error
        return self._template

    def require_chat(self) -> None:
        """Check that the model can chat.

        Raises:
            ValueError: there is no tokenizer or no chat template.
        """
        self._require_backend()
        self._require_template()

    def _require_template(self) -> str:
        if self.chat_template is None:
            raise ValueError(
                f"the model in {self.directory} has no chat template: neither {TEMPLATE_FILE},"
                f" {TEMPLATE_JSON_FILE} nor a chat_template in {TOKENIZER_CONFIG_FILE}"
            )
        return self.chat_template

    def _require_backend(self) -> tokenizers.Tokenizer:
        if self._backend is None:
            hint = ""
            if (self.directory / "tokenizer.model").is_file():
                hint = " (tokenizer.model alone is not enough: convert it)"
            raise ValueError(
                f"no {TOKENIZER_FILE} in {self.directory}{hint}: this model takes and gives token"
                " ids only"
            )
        return self._backend

    def _read_optional(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        return read_json(path) if path.is_file() else {}

    def _read_backend(self) -> tokenizers.Tokenizer | None:
        path = self.directory / TOKENIZER_FILE
        if not path.is_file():
            return None
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            message = " ".join(str(error).split())
            raise ValueError(f"{path} is not a valid tokenizer: {message}") from error
        # Some files contain these settings of a training run.
        backend.no_truncation()
        backend.no_padding()
        # Mark special tokens: each must be encoded as one token, and decode can leave it out.
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(text, special=True, normalized=False)
                for text in dict.fromkeys(self.special_tokens.values())
                if backend.token_to_id(text) is not None
            ]
        )
        return backend

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if self._backend is None or text is None else self._backend.token_to_id(text)


class StreamDecoder:
    """Decodes the token ids of one sequence incrementally.

    Bytes of an incomplete character are held back. All pieces together equal `Tokenizer.decode` of
    all ids, provided that the decoding of a text does not depend on later ids. Never raises: an
    unknown id adds nothing, nor does any id if there is no tokenizer.

    `plain` has the texts of whole characters while nothing is held back (engine.text.Decoder).

    `prompt_ids` are the ids before the first one. With them, a tokenizer that drops the space at
    the beginning of a text keeps the space between the prompt and its continuation. With
    `skip_special_tokens`, control tokens add nothing, except those of `kept_ids`.
    """

    # A character has at most 4 bytes, so this many tokens without new text contain invalid bytes.
    _MAX_PENDING: Final = 8
    _CONTEXT: Final = 5

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        kept_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            special = tokenizer.special_ids
            self._skipped = special.difference(kept_ids) if kept_ids else special
        # The text of _ids[:_context] has been returned; later ids are pending.
        self._ids = self._last_ids(prompt_ids)
        self._context = len(self._ids)
        self._context_text = self._decode(self._ids)
        self._choose_plain()

    def _last_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        """The ids at the end of the prompt on which the texts of following ones may depend."""
        recent = prompt_ids[-self._CONTEXT :]
        last = next((i for i in reversed(recent) if self._has_text(i)), None)
        if last is None or self._tokenizer.whole_text(last) is not None:
            return []
        return [i for i in recent if self._has_text(i)]

    def _choose_plain(self) -> None:
        # Ids that are held give a text another beginning.
        self.plain: dict[int, str] = {} if self._ids else self._tokenizer.plain_texts

    @property
    def _complete(self) -> bool:
        """Whether nothing is held back and the text so far ends with a whole character."""
        return len(self._ids) == self._context and not self._context_text.endswith("\ufffd")

    def step(self, token_id: int) -> str:
        """The text that `token_id` adds; "" while a character is incomplete."""
        try:
            return self.plain[token_id]
        except (KeyError, TypeError):
            pass
        text = self._step(token_id)
        self._choose_plain()
        return text

    def _step(self, token_id: int) -> str:
        if not self._ids or self._complete:
            whole = self._tokenizer.whole_text(token_id)
            if whole and token_id in self._skipped:
                return ""
            if whole is not None:
                if self._ids:  # no longer of use: this token's text did not depend on them
                    self._ids, self._context, self._context_text = [], 0, ""
                return whole
        if not self._has_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) > len(self._context_text) and not text.endswith("\ufffd"):
            return self._emit(text, len(self._ids))
        pending = len(self._ids) - self._context
        return self._emit_invalid(text) if pending >= self._MAX_PENDING else ""

    def flush(self) -> str:
        """The text still held back; call it at the end. Incomplete characters become U+FFFD."""
        return self._emit(self._decode(self._ids), len(self._ids))

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.knows(token_id) and token_id not in self._skipped

    def _emit(self, text: str, end: int) -> str:
        """Return the new part of `text`, the decoding of _ids[:end]; those ids become context."""
        new = text[len(self._context_text) :]
        if new:
            self._ids, self._context = self._ids[self._context :], end - self._context
            self._context_text = self._decode(self._ids[: self._context])
        return new

    def _emit_invalid(self, text: str) -> str:
        """Return a long run of invalid bytes, except a last character that may still complete."""
        count = len(self._ids)
        for end in range(count - 1, count - 5, -1):
            head = self._decode(self._ids[:end])
            if len(head) > len(self._context_text) and text == head + self._decode(self._ids[end:]):
                return self._emit(head, end)
        if count - self._context < 4 * self._MAX_PENDING:
            return ""
        new = self._emit(text, count)
        del self._ids[self._context :]
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def _is_byte_level(backend: tokenizers.Tokenizer | None) -> bool:
    """Whether the decoder only joins the bytes of the tokens."""
    if backend is None:
        return False
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Entries such as "bos_token": "<s>" or "bos_token": {"content": "<s>", ...}: name to text."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str) and text:
            tokens[name] = text
    return tokens


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a directory: from its own file, else from tokenizer_config.json."""
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return _read_text(path)
    path = directory / TEMPLATE_JSON_FILE
    if path.is_file():
        template = read_json(path).get("chat_template")
    else:
        path, template = directory / TOKENIZER_CONFIG_FILE, config.get("chat_template")
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


def _read_text(path: Path) -> str:
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
            text = part.get("text") if isinstance(part, Mapping) else part
            if not isinstance(text, str) or (
                isinstance(part, Mapping) and part.get("type", "text") != "text"
            ):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(
                    f"message {index} holds a part of type {kind!r}: only text is read"
                )
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
    """Raise ValueError for chat_template_kwargs that `Tokenizer.chat_prompt` sets itself."""
    reserved = sorted(RESERVED_TEMPLATE_KWARGS & (given or {}).keys())
    if reserved:
        raise ValueError(
            f"chat_template_kwargs must not hold {', '.join(reserved)}: each has a parameter of its"
            " own"
        )


def _template_environment() -> jinja2.Environment:
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
