"""Grammars of structured outputs, compiled and followed by llguidance.

A grammar is compiled once and kept; its sequences follow copies. Compiling and following are
bounded: a grammar that needs more work than the limits is refused, or ends its sequence with an
error.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from megavm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import llguidance

    from megavm.scheduler.engine.step import Ints
    from megavm.tokenizer import Tokenizer

MAX_CACHED: Final = 256  # grammars that are kept
# Up to eight spaces, or one line break and indentation, in place of any amount of whitespace: a
# small model may otherwise write nothing else until max_tokens.
WHITESPACE: Final = r"([\x20]{1,8}|\x0D?\x0A[\x20\x09]{0,64})"
# Work for the automata of a grammar, in the library's units: half a second at most.
LEXER_FUEL: Final = 200_000
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # characters with a meaning in a regex
_QUOTE: Final = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # lines of a grammar, behind a reason
_MAX_SENTENCE: Final = 300  # characters of the library's reasons


class LlguidanceMatcher:
    """See restriction.Matcher."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, mask: Ints) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class CompiledGrammar:
    """See restriction.Grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to share between threads.

    `vocab_size`: tokens of the model. `eos_token_ids`: tokens that may follow a complete output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()  # held while a grammar is compiled
        self._tokens: llguidance.LLTokenizer | None = None
        self._unusable = ""  # why the library cannot use the tokenizer
        self._known: OrderedDict[StructuredOutputsParams, CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        """Read the tokenizer, which takes a second for 128,000 tokens and blocks all threads.

        Raises:
            ValueError: the model has no tokenizer, or the library cannot use it.
        """
        with self._lock:
            self._library_tokenizer()

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The grammar of the parameters.

        Raises:
            ValueError: the library refuses it; the message is a sentence that begins with the name
                of the form, such as "json". Or the model's tokenizer cannot be used.
        """
        with self._lock:
            known = self._known.get(params)
            if known is None:
                known = self._known[params] = self._compile(params)
                if len(self._known) > MAX_CACHED:
                    self._known.popitem(last=False)
            self._known.move_to_end(params)
            return known

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        import llguidance

        try:
            text = _grammar_text(params)
        except ValueError as error:
            raise ValueError(f"{params.form} is refused: {_first_line(str(error))}") from error
        limits = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
        tokens = self._library_tokenizer()
        matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=limits)
        # The first mask makes the automata, which copies share: it may take most of the time.
        if not matcher.is_error():
            matcher.compute_bitmask()
        # All outputs begin with the forced bytes: if these exceed a limit, no output is possible.
        # A token that does not fit the grammar is no error here, only a limit is.
        beginning = matcher.deep_copy()
        beginning.try_consume_tokens(tokens.tokenize_bytes(beginning.compute_ff_bytes()))
        if beginning.is_error():
            raise ValueError(f"{params.form} is refused: {_first_line(beginning.get_error())}")
        return CompiledGrammar(matcher)

    def _library_tokenizer(self) -> llguidance.LLTokenizer:
        import llguidance

        if self._unusable:
            raise ValueError(self._unusable)
        if self._tokens is None:
            text, eos = self._tokenizer.to_json(), self._eos_token_ids or None
            try:
                self._tokens = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
            except Exception as error:  # whatever the library raises for a tokenizer
                reason = _first_line(str(error))
                self._unusable = f"structured outputs cannot use this model's tokenizer: {reason}"
                raise ValueError(self._unusable) from error
        return self._tokens


def _grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in the library's format. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    match params.form:
        case "regex":
            return LLMatcher.grammar_from_regex(str(params.regex))
        case "choice":
            texts = (_SPECIAL.sub(r"\\\g<0>", text) for text in params.choice or ())
            return LLMatcher.grammar_from_regex("|".join(texts))
        case "grammar":
            text = str(params.grammar)
            return grammar_from("gbnf" if "::=" in text else "lark", text)
        case "structural_tag":
            return _structural_tag_text(json.loads(str(params.structural_tag)))
        case _:
            schema = {"type": "object"} if params.json_object else json.loads(str(params.json))
            if schema is False:
                raise ValueError("nothing satisfies the schema false")
            if schema is True:
                schema = {}
            if params.disable_additional_properties:
                schema = _closed(schema)
            return LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults=_json_options(params)
            )


def _json_options(params: StructuredOutputsParams) -> Any:
    pattern = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    # The pattern "" is no whitespace.
    flexible = bool(pattern) and not params.disable_any_whitespace
    options: dict[str, Any] = {
        # oneOf that is not known to be exclusive is taken for anyOf.
        "coerce_one_of": True,
        "whitespace_flexible": flexible,
    }
    if flexible:
        options["whitespace_pattern"] = pattern
    return options


def _closed(schema: Any) -> Any:
    """The schema with additionalProperties false wherever an object's schema does not say."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _structural_tag_text(content: Any) -> str:
    from llguidance import StructTag

    triggers, structures = content.get("triggers"), content.get("structures")
    if not _are_texts(triggers) or not isinstance(structures, list) or not structures:
        raise ValueError('it must be {"triggers": [texts], "structures": [{begin, schema, end}]}')
    tags = []
    for number, item in enumerate(structures):
        item = item if isinstance(item, dict) else {}
        begin, end = item.get("begin"), item.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"structure {number} needs the texts begin and end")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"begin of structure {number} starts with none of the triggers")
        schema = item.get("schema", {})
        if not isinstance(schema, dict):
            raise ValueError(f"schema of structure {number} is not an object")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags)


def _are_texts(value: object) -> bool:
    return isinstance(value, Iterable) and all(isinstance(text, str) and text for text in value)


def _first_line(text: str) -> str:
    """A library's message in one line that a client can read, without lines of the grammar."""
    line = " ".join(_QUOTE.sub("", text).replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_SENTENCE else line[: _MAX_SENTENCE - 3] + "..."
