"""The bodies of requests: strict parsing, and the sampling parameters in them."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json
from starlette.requests import Request

from megavm.sampling_params import MAX_LOGPROBS, SamplingParams
from megavm.server.errors import bad_request, invalid_fields, shorten, unknown_model
from megavm.server.response_format import FORMAT_FIELDS, read_format
from megavm.server.tools.request import ToolChoice, read_tool_choice
from megavm.server.unsupported import (
    HARMLESS,
    OUR_NAMES,
    UNSUPPORTED,
    UNSUPPORTED_OF_PROMPTS,
    asks_for_nothing,
    whole,
)

MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 256
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default for completions
_SEEDS: Final = 1 << 63
_RESTRICTING: Final = ("allowed_token_ids", "bad_words")  # the tokens, beside the form
_PARAMETERS: Final = frozenset(field.name for field in fields(SamplingParams))

Int = Annotated[int, BeforeValidator(whole)]


def _list(items: dict[str, Any], **rest: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": items, **rest})


# Long lists are checked where they are used; pydantic would check them item by item.
TokenIds = Annotated[Any, _list({"type": "integer"})]
Messages = Annotated[Any, _list({"type": "object", "required": ["role"]}, minItems=1)]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text, token ids, or a list of texts or of lists of token ids.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                },
            ],
        }
    ),
]
TemplateKwargs = Annotated[
    dict[str, Any] | None, Field(description="further variables of the chat template")
]
Stop = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": f"At most {MAX_STOPS} strings that end a completion.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS},
                {"type": "null"},
            ],
        }
    ),
]
Choice = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "Whether the answer must hold calls, or of which function.",
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "required": ["function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {"type": "object", "required": ["name"]},
                    },
                },
                {"type": "null"},
            ],
        }
    ),
]


class Body(BaseModel):
    """The body of a request. Unknown fields are accepted; null means absent."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED
    reasons: ClassVar[Mapping[str, str]] = {}  # what to do without such a field
    model_config = ConfigDict(extra="allow", strict=True)

    def check_supported(self) -> None:
        """Raise ApiError for a field that would change the answer and is not supported."""
        for name, value in (self.model_extra or {}).items():
            nothing = self.unsupported.get(name)
            if nothing is not None and not asks_for_nothing(name, value, nothing):
                use = f", use {OUR_NAMES[name]}" if name in OUR_NAMES else ""
                use = self.reasons.get(name, use)
                raise bad_request(f"{name} is not supported by this server{use}", name)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = Field(
        default=None, description="one event with the usage, at the end"
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="with include_usage: the usage so far in every event"
    )


class GenerationRequest(Body):
    """Fields of completions and chat completions; `source` names the field to continue."""

    source: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    best_of: Int | None = Field(
        default=None, description="generate this many completions, answer with the n most likely"
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: Stop = None
    stop_token_ids: TokenIds = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = Field(
        default=None, description="answer with token ids beside texts"
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description='{"type": "text"}, "json_object" or "json_schema", as in OpenAI'
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="one of json, regex, choice, grammar, json_object, structural_tag, as in vLLM",
    )
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    logit_bias: dict[str, float] | None = Field(
        default=None, description="token id to a number in [-100, 100], added to its logit"
    )
    allowed_token_ids: TokenIds = Field(
        default=None, description="the only tokens that may be chosen"
    )
    bad_words: list[str] | None = Field(
        default=None, description="texts that must not occur in the completion"
    )

    @property
    def include_usage(self) -> bool:
        """Whether a stream must end with an event that holds its usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream must hold the usage so far; as in vLLM, this takes both
        options."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    @property
    def chooses_best(self) -> bool:
        """Whether more completions are generated than the client gets."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @abstractmethod
    def wanted_max_tokens(self) -> int | None:
        """Largest number of tokens of a completion; None means up to the end of the context."""

    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Number of alternatives to report per token; None means no log-probabilities."""

    def sampling_params(
        self, defaults: Callable[..., SamplingParams], max_n: int
    ) -> SamplingParams:
        """The parameters of the request; `defaults(**given)` adds the model's defaults.

        Raises:
            ApiError: a value is out of range or not supported; `param` names its field.
        """
        self._check()
        names = _PARAMETERS & self.model_fields_set & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None and not -_SEEDS <= self.seed < _SEEDS:
            raise bad_request("seed must be in [-2**63, 2**63)", "seed")
        given["structured_outputs"] = read_format(self)
        given["max_tokens"], given["logprobs"] = self.wanted_max_tokens(), self.wanted_logprobs()
        if self.chooses_best:
            given["n"] = self.best_of
            given["logprobs"] = given["logprobs"] or 0  # completions are chosen by them
        if given["max_tokens"] == 0:  # one token is generated but not shown
            given["max_tokens"] = 1
        try:
            params = defaults(**given)
        except ValueError as error:
            raise bad_request(str(error), self.blamed(str(error))) from error
        if params.n > max_n:
            field = "best_of" if self.chooses_best else "n"
            raise bad_request(f"{field} must be at most {max_n}, not {params.n}", field)
        return params

    def _check(self) -> None:
        self.check_supported()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise bad_request(
                f"best_of must be at least n, which is {self.n or 1}, not {self.best_of}", "best_of"
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream to be true", "stream_options")
        if self.stream:
            for name, asked in (
                ("best_of", self.chooses_best),
                ("prompt_logprobs", self.prompt_logprobs is not None),
            ):
                if asked:
                    raise bad_request(f"{name} is not available in a stream", name)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if isinstance(stops, list):
            if len(stops) > MAX_STOPS:
                raise bad_request(
                    f"stop must hold at most {MAX_STOPS} strings, not {len(stops)}", "stop"
                )
            longest = max((len(text) for text in stops if isinstance(text, str)), default=0)
            if longest > MAX_STOP_LENGTH:
                raise bad_request(
                    f"a stop string must have at most {MAX_STOP_LENGTH} characters, not {longest}",
                    "stop",
                )

    def named(self, message: str) -> str | None:
        """The field that an error message names with its first word, or None."""
        match = re.match(r"\w+", message)
        return match[0] if match is not None and match[0] in type(self).model_fields else None

    def blamed(self, message: str) -> str | None:
        """The field that an error message about the parameters is about, or None.

        Its first word names the field. Other messages are about the form of the output, and so are
        those about structured_outputs where another field gives the form.
        """
        named = self.named(message)
        if named is not None and (named not in FORMAT_FIELDS or getattr(self, named) is not None):
            return named
        others = [name for name in _RESTRICTING if name in message]
        given = (name for name in (*FORMAT_FIELDS, *others) if getattr(self, name) is not None)
        return next(given, None)

    def ignored_fields(self) -> list[str]:
        """Names of the unknown fields, at most 16."""
        known = HARMLESS | UNSUPPORTED.keys()
        return [shorten(name) for name in self.model_extra or {} if name not in known][:16]


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    source = "prompt"

    prompt: Prompt
    echo: bool | None = None
    logprobs: Int | None = None
    add_special_tokens: bool | None = None

    def wanted_max_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    source = "messages"

    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="whether an answer may hold several calls (default: yes)"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    add_special_tokens: bool | None = None

    def read_tool_choice(self) -> ToolChoice | None:
        """The functions that the answer may call; None if it may call none.

        Raises:
            ApiError: a tool or the choice is malformed; `param` names it.
        """
        return read_tool_choice(self.tools, self.tool_choice, self.parallel_tool_calls)

    def wanted_max_tokens(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        if not self.logprobs:
            return None
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise bad_request(
                f"top_logprobs must be in [0, {MAX_LOGPROBS}], not {self.top_logprobs}",
                "top_logprobs",
            )
        return self.top_logprobs or 0

    def blamed(self, message: str) -> str | None:
        blamed = super().blamed(message) or ("tools" if self.tools else None)
        if blamed == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return blamed


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt or messages."""

    unsupported = {**UNSUPPORTED_OF_PROMPTS, "truncate_prompt_tokens": ()}
    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds = Field()


class ProfileRequest(Body):
    """The body of POST /v1/profile."""

    steps: Int = Field(default=100, ge=1, le=10_000, description="steps to record")
    timeout: float = Field(default=60.0, gt=0, le=600, description="seconds to wait for them")


AnyBody = TypeVar("AnyBody", bound=Body)
AnyGeneration = TypeVar("AnyGeneration", bound=GenerationRequest)


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Parse the body of a request into the model `kind`.

    Raises:
        ApiError: the body is not a JSON object, or a field has a wrong type.
    """
    # Requires application/json: browsers let a page of another origin post plain text without a
    # CORS preflight, but not this type.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise bad_request(
            f"the content-type must be application/json, not {shorten(media_type) or 'absent'}"
        )
    return parse_body(await request.body(), kind)


def parse_body(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """Parse a body into the model `kind`. Raises ApiError as `read_body` does."""
    try:
        content: Any = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {shorten(str(error))}") from error
    if not isinstance(content, Mapping):
        raise bad_request(f"the body must be a JSON object, not {type(content).__name__}")
    return _validated(content, kind)


def _validated(content: Mapping[str, Any], kind: type[AnyBody]) -> AnyBody:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise invalid_fields(error) from error


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """A chat request that another request stands for. Raises ApiError as `read_body` does."""
    return _validated(fields, ChatRequest)


def read_prompts(prompt: Any, most: int) -> list[str | list[int]]:
    """The prompts of a completion: texts, and lists whose items are not checked yet.

    Raises:
        ApiError: there is no prompt, there are more than `most`, or one has a wrong type.
    """
    if prompt == []:
        raise bad_request("prompt is empty", "prompt")
    many = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    prompts = prompt if many else [prompt]
    if len(prompts) > most:
        raise bad_request(f"prompt holds {len(prompts)} prompts, {most} are possible", "prompt")
    for one in prompts:
        if not isinstance(one, str | list):
            raise bad_request(
                "prompt must be a text, token ids, or a list of texts or of lists of token ids,"
                f" not {type(one).__name__}",
                "prompt",
            )
    return list(prompts)


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a conversation; rendering the chat template checks each message.

    Raises:
        ApiError: `messages` is not a list, or is empty.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list of at least one message", "messages")
    return messages


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    """Raise ApiError when a request names a model that is not served."""
    if name is not None and name not in names:
        raise unknown_model(name)
