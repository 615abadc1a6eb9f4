"""The command-line parser, the types of options, and options that several commands share.

Imports nothing heavy, so that `megavm --help` is fast.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

ENVIRONMENT_PREFIX: Final = "MEGAVM_"
DEFAULT_MODEL: Final = "stories"
ENGINE_OPTIONS: Final = (
    "machine",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "workers",
    "tensor_parallel_size",
    "fixed_order",
    "quiet",
)


# Executes a command and returns its exit code.
Run = Callable[[argparse.Namespace], int]


class UsageError(ValueError):
    """The command line or an environment variable is invalid."""


class _Option(NamedTuple):
    action: argparse.Action
    default: Any


class Parser(argparse.ArgumentParser):
    """A parser of the command line or of one command; environment variables can set its options.

    Options that are not given parse to None; `settle` then fills in values from the environment and
    defaults. It is the only code that reads `MEGAVM_*` variables of options.

    In the parsed arguments, `parser` is the parser of the command and `run` the function that
    executes it; `run` is None for a parser that only groups commands.

    Attributes:
        needs_stdout: whether the command prints a result.
    """

    needs_stdout = True

    def __init__(self, *, run: Run | None = None, **keywords: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **keywords
        )
        self.set_defaults(parser=self, run=run)
        self.commands: dict[str, Parser] = {}
        self._add_command: Callable[..., Parser] | None = None
        self._declared: list[_Option] = []

    def command(
        self,
        name: str,
        operands: str,
        summary: str,
        run: Run | None = None,
        examples: str | None = None,
    ) -> Parser:
        """Declare the command `name`; without `run` it only groups subcommands."""
        if self._add_command is None:
            self._add_command = self.add_subparsers(
                metavar="COMMAND", title="commands", parser_class=Parser, prog=self.prog
            ).add_parser
        self.commands[name] = self._add_command(
            name,
            usage=" ".join(filter(None, (self.prog, name, operands, "[OPTION ...]"))),
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=examples,
            run=run,
        )
        return self.commands[name]

    def option(
        self,
        group: argparse._ActionsContainer,
        *flags: str,
        default: Any = None,
        **keywords: Any,
    ) -> None:
        """Declare an option in `group`; `default` applies without flag and variable."""
        action = group.add_argument(*flags, default=None, **keywords)
        self._declared.append(_Option(action, default))

    def settle(self, arguments: argparse.Namespace, environment: Mapping[str, str]) -> None:
        """Set every option that was not given, from the environment or else to its default."""
        for option in self._declared:
            name = option.action.dest
            if getattr(arguments, name) is not None:
                continue
            variable = ENVIRONMENT_PREFIX + name.upper()
            text = environment.get(variable)
            value = option.default if text is None else self._convert(option, variable, text)
            setattr(arguments, name, value)

    def _convert(self, option: _Option, variable: str, text: str) -> Any:
        action = option.action
        if action.nargs == 0:
            if text.lower() not in ("0", "1", "true", "false", "yes", "no", ""):
                raise UsageError(f"environment variable {variable}={text!r} must be 0 or 1")
            return text.lower() in ("1", "true", "yes")
        try:
            value = action.type(text) if callable(action.type) else text
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise UsageError(f"environment variable {variable}={text!r}: {error}") from error
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(action.choices)
            raise UsageError(f"environment variable {variable}={text!r} must be one of {choices}")
        return [value] if isinstance(action, argparse._AppendAction) else value

    def place(self, arguments: argparse.Namespace, unknown: list[str]) -> list[str]:
        """Assign operands that follow options; returns the words that remain unknown.

        argparse matches all operands at once: in `generate MODEL --seed 1 PROMPT` it treats the
        optional PROMPT as absent, and then reports it as unknown. So it does with the changes in
        `trace what-if FILE --step 2 CHANGE`.
        """
        if any(word.startswith("-") and word != "-" for word in unknown):
            return unknown  # an unknown option, perhaps with its value
        for action in self._get_positional_actions():
            if unknown and action.nargs == "?" and getattr(arguments, action.dest) is None:
                setattr(arguments, action.dest, unknown.pop(0))
            elif action.nargs == "*":
                setattr(arguments, action.dest, [*getattr(arguments, action.dest), *unknown])
                unknown = []
        return unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def integer(text: str) -> int:
    """Type of an option: an integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def number(text: str) -> float:
    """Type of an option: a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def percentage(text: str) -> float:
    """Type of an option: a percentage from 0 on, as a part: 3% and 3 are 0.03."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)%?", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 3%")
    return float(match[1]) / 100


def length(text: str) -> int:
    """Type of an option: a positive integer, or with a suffix: 8k is 8000, 8K is 8192 (vLLM)."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip(), re.ASCII)
    unit = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
    value = int(match[1][:19]) * unit[match[2]] if match else 0
    if not 1 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number such as 8192 or 8K")
    return value


def token_ids(text: str) -> list[int]:
    """Type of an option: integers separated by commas or spaces; the vocabulary is not checked."""
    pieces = text.replace(",", " ").split()
    if not pieces or not all(re.fullmatch(r"-?\d{1,19}", piece, re.ASCII) for piece in pieces):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3")
    return [int(piece) for piece in pieces]


def add_model(parser: Parser) -> None:
    """Add the optional operand MODEL to a command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"directory, shipped name or hub id ({DEFAULT_MODEL})",
    )


def add_chat_template(parser: Parser, group: argparse._ActionsContainer) -> None:
    """Add --chat-template to a group of a command."""
    parser.option(
        group,
        "--chat-template",
        metavar="FILE",
        help="a Jinja template of conversations in place of the model's",
    )


_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)


def add_sampling(parser: Parser, *, max_tokens: int | None) -> None:
    """Add the sampling options; `max_tokens` is the default of --max-tokens."""
    limit = "to the end of the context" if max_tokens is None else str(max_tokens)
    group = parser.add_argument_group(
        "sampling options", "Without an option: the model's generation_config.json, else off."
    )

    def add(flag: str, metavar: str, kind: Callable[[str], Any], text: str, **rest: Any) -> None:
        parser.option(group, flag, metavar=metavar, type=kind, help=text, **rest)

    add("--max-tokens", "N", integer, f"stop after N tokens ({limit})", default=max_tokens)
    add("--temperature", "T", number, "0 takes the most likely token, 1 follows the model (1)")
    add("--top-p", "P", number, "keep the likeliest tokens up to this probability together")
    add("--top-k", "K", integer, "keep the K likeliest tokens")
    add("--min-p", "P", number, "keep tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", "R", number, "above 1: avoid tokens that were there already")
    add("--presence-penalty", "X", number, "above 0: avoid tokens of the output, -2 to 2")
    add("--frequency-penalty", "X", number, "the same, for every time a token was used")
    add("--seed", "N", integer, "the same seed gives the same text")
    add("--stop", "TEXT", str, "stop before this text (may be repeated)", action="append")
    add("--stop-token-ids", "IDS", token_ids, "stop at one of these token ids, such as 2,13")
    add("--min-tokens", "N", integer, "do not stop before N tokens")
    parser.option(
        group, "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )


def add_machine(parser: Parser, *names: str) -> None:
    """Add the machine options in `names`."""
    group = parser.add_argument_group("machine options")
    declarations: dict[str, dict[str, Any]] = {
        "machine": {
            "choices": ("auto", "cpu", "cuda", "reference"),
            "default": "auto",
            "help": "what executes the program (auto: a GPU if there is one, else the CPU)",
        },
        "dtype": {
            "choices": ("auto", "bfloat16", "float32"),
            "default": "auto",
            "help": "type of the weights in memory (auto: float32 if stored so, else bfloat16)",
        },
        "max_model_len": {
            "metavar": "N",
            "type": length,
            "help": "longest context, prompt included, such as 4096, 8k or 32K (the model's)",
        },
        "max_num_seqs": {
            "metavar": "N",
            "type": length,
            "help": "most sequences in one batch (64 on a GPU, else 16)",
        },
        "workers": {
            "metavar": "N",
            "type": length,
            "help": "workers of the machine (one for each core or SM)",
        },
        "tensor_parallel_size": {
            "metavar": "N",
            "type": length,
            "help": "GPUs that divide the model; on the CPU, groups of threads (1)",
        },
        "fixed_order": {
            "action": "store_true",
            "help": "the same bits with any number of workers and GPUs, in steps of the same rows; "
            "slower",
        },
        "quiet": {"action": "store_true", "help": "no progress and no statistics"},
    }
    for name in names:
        parser.option(group, "--" + name.replace("_", "-"), **declarations[name])


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters given on the command line, checked before a model is loaded.

    Raises ValueError when one is invalid.
    """
    from megavm.sampling_params import SamplingParams

    names = (*_SAMPLING, "n", "logprobs")
    given: dict[str, Any] = {"max_tokens": None}  # without a limit: to the end of the context
    for name in names:
        if getattr(arguments, name, None) is not None:
            given[name] = getattr(arguments, name)
    SamplingParams(**given)
    return given
