"""Text to token ids and back: a model's tokenizer."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megavm.chat_template import (
    TEMPLATE_FILE,
    TEMPLATE_JSON_FILE,
    ChatTemplate,
    Message,
    read_template,
    read_text,
)
from megavm.longest_token import LongestToken
from megavm.scheduler.llama.json_files import read_json

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
LONG_TEXT: Final = 4096  # characters or tokens; longer texts are processed without the GIL


class Tokenizer:
    """The tokenizer of one model directory.

    Without tokenizer.json in the directory, `available` is false: the model still runs on token
    ids, and only functions that need text raise. Decoding does not clean up spaces before
    punctuation. Safe to share between threads.

    Attributes:
        directory: the model directory.
        special_tokens: name to text, such as {"bos_token": "<s>"}; passed to chat templates.
        bos_token_id, eos_token_id: ids of these two tokens, or None.
        template_file: the file that it is from, if that takes the place of the model's; else None.
    """

    def __init__(
        self, directory: str | Path, chat_template: str | os.PathLike[str] | None = None
    ) -> None:
        """Read the tokenizer files of `directory`.

        `chat_template` is a file with a Jinja template that takes the place of the model's.

        Raises:
            ValueError: a file exists but is invalid, or `chat_template` is empty or cannot be read.
        """
        self.directory = Path(directory)
        config = self._read_optional(TOKENIZER_CONFIG_FILE)
        self.special_tokens = _named_tokens(
            self._read_optional(SPECIAL_TOKENS_FILE)
        ) | _named_tokens(config)
        self.template_file = None if chat_template is None else os.fspath(chat_template)
        if chat_template is None:
            config_file = self.directory / TOKENIZER_CONFIG_FILE
            source = read_template(self.directory, config_file, config)
            name = f"the chat template of {self.directory}"
            self._template = None if source is None else ChatTemplate(source, name)
        else:
            path = Path(chat_template)
            self._template = ChatTemplate(read_text(path), f"the chat template {path.name}")
            self._template.compile()
            if not self._template.source.strip():
                raise ValueError(f"{self._template.name} is empty")
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
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, or None."""
        return None if self._template is None else self._template.source

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
            # Only the library's batch functions release the GIL. The fast one (since 0.20) does not
            # make the places of tokens, which take long to free, with the GIL.
            batch = getattr(backend, "encode_batch_fast", backend.encode_batch)
            encoding = batch([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `encode` gives at least, at once; 0 if that is not known."""
        longest = self._longest_token
        return 0 if longest is None else longest.fewest_tokens(text)

    @functools.cached_property
    def _longest_token(self) -> LongestToken | None:
        return None if self._backend is None else LongestToken.of(self._backend)

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
            ValueError: there is no chat template, or it is not valid.
        """
        return self._require_template().renders_tools

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
        return self._require_template().render(
            messages,
            self.special_tokens,
            add_generation_prompt,
            tools,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )

    def require_chat(self) -> None:
        """Check that the model can chat.

        Raises:
            ValueError: there is no tokenizer or no chat template.
        """
        self._require_backend()
        self._require_template()

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise ValueError(
                f"the model in {self.directory} has no chat template: neither {TEMPLATE_FILE},"
                f" {TEMPLATE_JSON_FILE} nor a chat_template in {TOKENIZER_CONFIG_FILE}"
            )
        return self._template

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
