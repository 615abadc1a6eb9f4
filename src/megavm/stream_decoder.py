"""Token ids to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from megavm.tokenizer import Tokenizer


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
                if whole and self._ids:
                    # No longer of use: this token's text did not depend on them.
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
