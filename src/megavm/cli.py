"""The command `megavm`: options, output and exit codes; the work is done by the modules it calls.

Only argparse is imported at module level, so that `megavm --help` answers at once. Results go to
stdout, everything else to stderr. Exit codes: 0 done, 2 bad input or a known fault (one sentence on
stderr), 130 interrupted, 141 the reader of our output went away.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.outputs import Chunk, CompletionOutput, RequestOutput
    from megavm.sampling_params import SamplingParams

EXIT_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

ENVIRONMENT_PREFIX: Final = "MEGAVM_"
DEFAULT_MODEL: Final = "stories"

_DESCRIPTION: Final = (
    "Run Llama models as one program on a virtual machine, on a GPU or on the CPU."
)

_EXAMPLES: Final = """\
examples:
  megavm generate stories "Once upon a time" --echo --stream
  megavm chat                               talk to the small model that comes with megavm
  megavm info meta-llama/Llama-3.2-1B       sizes of a model, from its directory or the hub
  megavm doctor                             what this machine has, and what would run where

MODEL is a Hugging Face model directory, the name of a model that comes with megavm (stories), or
a model id on the Hugging Face hub. Every option can also be set in the environment, for example
MEGAVM_MAX_TOKENS=200 for --max-tokens 200; the option on the command line wins.
Options of a command: megavm COMMAND --help
"""

_GENERATE_EXAMPLES: Final = """\
examples:
  megavm generate stories "Once upon a time" --echo
  megavm generate stories "The little fox" --temperature 0.7 --seed 1 --stream
  echo "One day" | megavm generate stories - --json
  megavm generate path/to/model --prompt-ids 1,15043,29892 --temperature 0 --json
"""

_CHAT_EXAMPLES: Final = """\
examples:
  megavm chat
  megavm chat path/to/model --system "Answer in one sentence." --temperature 0.7
  echo "Tell me a story." | megavm chat

In the conversation: /help lists the commands, \"\"\" begins and ends a text of several lines.
"""

_PROGRAM_EXAMPLES: Final = """\
examples:
  megavm program stories --verify
  megavm program stories --rows 1 --context 2K --disassemble | head
  megavm program path/to/model --rows 128 --sequences 4 --save prefill.program
"""

_INFO_EXAMPLES: Final = """\
examples:
  megavm info stories
  megavm info path/to/model --json
"""


# --- options ------------------------------------------------------------------------------------


class UsageError(ValueError):
    """The command line or an environment variable does not make sense."""


class _Option(NamedTuple):
    action: argparse.Action
    default: Any


class _Parser(argparse.ArgumentParser):
    """An argument parser whose options can also be set by environment variables.

    Options parse to None when they are not given; `settle` then fills in the environment's values
    and the defaults, and is the one place where `MEGAVM_*` variables are read.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **keywords
        )
        self._declared: list[_Option] = []

    def option(
        self,
        group: argparse._ActionsContainer,
        *flags: str,
        default: Any = None,
        **keywords: Any,
    ) -> None:
        """Declare an option in `group`; `default` is what it is without a flag and a variable."""
        action = group.add_argument(*flags, default=None, **keywords)
        self._declared.append(_Option(action, default))

    def settle(self, arguments: argparse.Namespace, environment: Mapping[str, str]) -> None:
        """Fill every option that was not given from the environment, else with its default."""
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

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _ShowVersion(argparse.Action):
    """--version, which reads the installed package's metadata only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import megavm

        print(f"megavm {megavm.__version__}")
        parser.exit(0)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _length(text: str) -> int:
    """A positive integer, possibly with a suffix: 8k is 8000 and 8K is 8192, as in vLLM."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip(), re.ASCII)
    unit = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
    value = int(match[1][:19]) * unit[match[2]] if match else 0
    if not 1 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive length such as 8192 or 8K")
    return value


def _token_ids(text: str) -> list[int]:
    pieces = text.replace(",", " ").split()
    if not pieces or not all(re.fullmatch(r"-?\d{1,19}", piece, re.ASCII) for piece in pieces):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3")
    return [int(piece) for piece in pieces]


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


def _add_sampling(parser: _Parser, *, max_tokens: int | None) -> None:
    limit = "to the end of the context" if max_tokens is None else str(max_tokens)
    group = parser.add_argument_group(
        "sampling options", "Without an option: the model's generation_config.json, else off."
    )

    def add(flag: str, metavar: str, kind: Callable[[str], Any], text: str, **rest: Any) -> None:
        parser.option(group, flag, metavar=metavar, type=kind, help=text, **rest)

    add("--max-tokens", "N", _integer, f"stop after N tokens ({limit})", default=max_tokens)
    add("--temperature", "T", _number, "0 takes the most likely token, 1 follows the model (1)")
    add("--top-p", "P", _number, "keep the likeliest tokens up to this probability together")
    add("--top-k", "K", _integer, "keep the K likeliest tokens")
    add("--min-p", "P", _number, "keep tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", "R", _number, "above 1: avoid tokens that were there already")
    add("--presence-penalty", "X", _number, "above 0: avoid tokens of the output, -2 to 2")
    add("--frequency-penalty", "X", _number, "the same, for every time a token was used")
    add("--seed", "N", _integer, "the same seed gives the same text")
    add("--stop", "TEXT", str, "stop before this text (may be repeated)", action="append")
    add("--stop-token-ids", "IDS", _token_ids, "stop at one of these token ids, such as 2,13")
    add("--min-tokens", "N", _integer, "do not stop before N tokens")
    parser.option(
        group, "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )


_ENGINE_OPTIONS: Final = (
    "machine",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "workers",
    "quiet",
)


def _add_common(parser: _Parser, *names: str) -> None:
    """Add those of the options that several commands share which `names` lists."""
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
            "type": _length,
            "help": "longest context, prompt included, such as 4096, 8k or 32K (the model's)",
        },
        "max_num_seqs": {"metavar": "N", "type": _length, "help": "most sequences in one batch"},
        "workers": {
            "metavar": "N",
            "type": _length,
            "help": "workers of the machine (one for each core or SM)",
        },
        "quiet": {"action": "store_true", "help": "no progress and no statistics"},
    }
    for name in names:
        parser.option(group, "--" + name.replace("_", "-"), **declarations[name])


def _build_parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="megavm", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Parser
    )
    parsers: dict[str, _Parser] = {}

    def command(name: str, operands: str, summary: str, examples: str | None = None) -> _Parser:
        description = summary[0].upper() + summary[1:] + "."
        parsers[name] = commands.add_parser(
            name,
            usage=f"megavm {name} {operands} [OPTION ...]".replace("  ", " "),
            help=summary,
            description=description,
            epilog=examples,
        )
        return parsers[name]

    generate = command("generate", "MODEL [PROMPT]", "continue a text", _GENERATE_EXAMPLES)
    generate.add_argument("model", metavar="MODEL", help="directory, shipped name or hub id")
    generate.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads it from stdin"
    )
    output = generate.add_argument_group("input and output")
    generate.option(
        output,
        "--prompt-ids",
        metavar="IDS",
        type=_token_ids,
        help="the prompt as token ids, such as 1,2,3",
    )
    generate.option(output, "-n", metavar="N", type=_integer, default=1, help="completions (1)")
    generate.option(
        output, "--echo", action="store_true", help="print the prompt before its continuation"
    )
    generate.option(output, "--stream", action="store_true", help="print tokens as they come")
    generate.option(
        output,
        "--json",
        action="store_true",
        help="print one JSON object with text, token_ids, finish_reason and timings",
    )
    generate.option(
        output,
        "--logprobs",
        metavar="K",
        type=_integer,
        help="with --json: log probabilities of each token and its K likeliest alternatives",
    )
    _add_sampling(generate, max_tokens=128)
    _add_common(generate, *_ENGINE_OPTIONS)

    chat = command("chat", "[MODEL]", "talk to a model", _CHAT_EXAMPLES)
    _add_model_with_default(chat)
    chat.option(chat, "--system", metavar="TEXT", help="what the model is told before you speak")
    _add_sampling(chat, max_tokens=None)
    _add_common(chat, *_ENGINE_OPTIONS)

    program = command(
        "program", "[MODEL]", "show the program that a model is compiled to", _PROGRAM_EXAMPLES
    )
    _add_model_with_default(program)
    shape = program.add_argument_group("the step to compile")
    program.option(
        shape, "--rows", metavar="N", type=_length, help="tokens in the step (one per sequence)"
    )
    program.option(
        shape, "--sequences", metavar="N", type=_length, help="sequences in the step (1)"
    )
    program.option(
        shape, "--context", metavar="N", type=_length, help="longest context of a sequence (1024)"
    )
    how = program.add_argument_group("how it is compiled")
    program.option(
        how,
        "--assignment",
        choices=("balanced", "round_robin", "dynamic"),
        default="balanced",
        help="how instructions get to workers: by bytes, in turn, or from one shared queue",
    )
    program.option(
        how,
        "--exchange",
        choices=("barrier", "tagged"),
        default="barrier",
        help="how workers wait for each other's small results: by counters, or by the data",
    )
    result = program.add_argument_group("output")
    program.option(
        result, "--disassemble", action="store_true", help="print every instruction of every queue"
    )
    program.option(
        result, "--verify", action="store_true", help="prove that it has no race and no deadlock"
    )
    program.option(result, "--save", metavar="FILE", help="write the program to FILE")
    _add_common(program, "machine", "dtype", "workers", "quiet")

    info = command("info", "[MODEL]", "show the sizes of a model", _INFO_EXAMPLES)
    _add_model_with_default(info)
    info.option(info, "--json", action="store_true", help="print one JSON object")
    _add_common(info, "dtype")

    doctor = command("doctor", "", "show what this machine has and what would run where")
    doctor.option(doctor, "--json", action="store_true", help="print one JSON object")
    return parser, parsers


def _add_model_with_default(parser: _Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"directory, shipped name or hub id ({DEFAULT_MODEL})",
    )


# --- commands -----------------------------------------------------------------------------------


_BAR_WIDTH = 30


class _Progress:
    """One line on stderr that is overwritten by the next; nothing where nobody watches."""

    def __init__(self, quiet: bool) -> None:
        self.enabled = not quiet and sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, message: str, done: int = 0, total: int = 0) -> None:
        """Show ``message``, and of a phase with a length, a bar; called for every piece of work."""
        if self.enabled:
            if total > 1:
                filled = _BAR_WIDTH * done // total
                message += f" [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done}/{total}"
            width = 80
            with suppress(OSError, ValueError):
                width = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(f"\r\x1b[K{message[: max(width - 1, 20)]}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self.enabled:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _load(arguments: argparse.Namespace) -> LLM:
    """The model, loaded with progress on stderr."""
    progress = _Progress(arguments.quiet)
    progress(f"loading {arguments.model}")
    try:
        from megavm.llm import LLM

        optional = {
            name: getattr(arguments, name)
            for name in ("max_model_len", "max_num_seqs", "workers")
            if getattr(arguments, name) is not None
        }
        return LLM(
            arguments.model,
            machine=arguments.machine,
            dtype=arguments.dtype,
            progress=progress if progress.enabled else None,
            **optional,
        )
    finally:
        progress.clear()


def _given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, checked before a model is loaded."""
    from megavm.sampling_params import SamplingParams

    names = (*_SAMPLING, "n", "logprobs")
    given: dict[str, Any] = {"max_tokens": None}  # without a limit: to the end of the context
    for name in names:
        if getattr(arguments, name, None) is not None:
            given[name] = getattr(arguments, name)
    SamplingParams(**given)
    return given


def _with_model_defaults(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    from megavm.sampling_params import SamplingParams

    return SamplingParams.from_generation_config(llm.checkpoint.generation, **given)


def _read_prompt(arguments: argparse.Namespace) -> str | list[int]:
    """The prompt from the argument, from --prompt-ids or from stdin."""
    if arguments.prompt_ids is not None:
        if arguments.prompt is not None:
            raise UsageError("give either PROMPT or --prompt-ids, not both")
        ids: list[int] = arguments.prompt_ids
        return ids
    prompt: str | None = arguments.prompt
    if prompt is None or (prompt == "-" and sys.stdin is None):
        raise UsageError("give a PROMPT, - to read it from stdin, or --prompt-ids")
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompt on stdin is not valid UTF-8: {error}") from error
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise UsageError("the prompt is empty")
    return prompt


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.json and arguments.stream:
        raise UsageError("--json prints one object at the end: give either --json or --stream")
    if arguments.json and arguments.echo:
        raise UsageError("--json has the prompt already: give either --json or --echo")
    if arguments.logprobs is not None and not arguments.json:
        raise UsageError("--logprobs is part of the JSON output: add --json")
    given = _given_sampling(arguments)
    prompt = _read_prompt(arguments)
    started = time.perf_counter()
    llm = _load(arguments)
    load_seconds = time.perf_counter() - started
    params = _with_model_defaults(llm, given)
    if arguments.stream:
        return _generate_stream(arguments, llm, prompt, params)
    prompts: Any = prompt if isinstance(prompt, str) else [prompt]
    progress = _Progress(arguments.quiet)
    progress("generating")
    try:
        output = llm.generate(prompts, params)[0]
    finally:
        progress.clear()
    if arguments.json:
        _print_json(_output_as_json(arguments.model, output, load_seconds))
        return _report_failure(output.error)
    for completion in output.outputs:
        if params.n > 1:
            print(f"--- completion {completion.index + 1} of {params.n} ---")
        text = completion.text if llm.tokenizer.available else _join_ids(completion.token_ids)
        print(_echoed(arguments, llm, prompt) + text)
    return _report_failure(output.error)


def _report_failure(sentence: str | None) -> int:
    """The exit code of a generation that ended with `sentence` as its error, or well."""
    if sentence is None:
        return 0
    sys.stdout.flush()
    _print_error(ValueError(sentence))
    return EXIT_ERROR


def _generate_stream(
    arguments: argparse.Namespace, llm: LLM, prompt: str | list[int], params: SamplingParams
) -> int:
    """Print the first completion as it comes and the others, complete, after it."""
    later: dict[int, list[str]] = {index: [] for index in range(1, params.n)}
    failure: str | None = None
    statistics = _Statistics()
    echo = _echoed(arguments, llm, prompt)
    if params.n > 1:
        print(f"--- completion 1 of {params.n} ---")
    _write(echo)
    for chunk in statistics.watch(llm.stream(prompt, params)):
        text = chunk.text
        if not llm.tokenizer.available and chunk.token_id is not None:
            text = f"{chunk.token_id} "
        if chunk.index == 0:
            _write(text)
        else:
            later[chunk.index].append(text)
        if chunk.finish_reason == "error":
            failure = _STREAM_FAILED
    print()
    for index, pieces in later.items():
        print(f"--- completion {index + 1} of {params.n} ---")
        print(echo + "".join(pieces))
    if _Progress(arguments.quiet).enabled:
        print(statistics, file=sys.stderr)
    return _report_failure(failure)


def _echoed(arguments: argparse.Namespace, llm: LLM, prompt: str | list[int]) -> str:
    if not arguments.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return llm.tokenizer.decode(prompt) if llm.tokenizer.available else _join_ids(prompt) + " "


def _join_ids(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _output_as_json(model: str, output: RequestOutput, load_seconds: float) -> dict[str, Any]:
    """The JSON object of one request; with several completions, `outputs` has all of them."""

    def completion_as_json(completion: CompletionOutput) -> dict[str, Any]:
        result: dict[str, Any] = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            result["logprobs"] = completion.logprobs
        if completion.error is not None:
            result["error"] = completion.error
        return result

    result: dict[str, Any] = {
        "model": model,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **completion_as_json(output.outputs[0]),
        "timings": {"load_seconds": load_seconds, **output.timings},
    }
    if len(output.outputs) > 1:
        result["outputs"] = [
            {"index": completion.index, **completion_as_json(completion)}
            for completion in output.outputs
        ]
    return result


def _print_json(value: object) -> None:
    import json

    print(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """`value` with nothing in it that JSON lacks: infinities are +-9999, NaN is null."""
    import dataclasses
    import math

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(9999.0, value)
    return value


class _Statistics:
    """Counts and times the chunks of one answer."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first = 0.0
        self.total = 0.0

    def watch(self, chunks: Iterable[Chunk]) -> Generator[Chunk, None, None]:
        started = time.perf_counter()
        try:
            for chunk in chunks:
                if chunk.token_id is not None:
                    self.tokens += 1
                    self.first = self.first or time.perf_counter() - started
                yield chunk
        finally:
            self.total = time.perf_counter() - started

    def __str__(self) -> str:
        rate = self.tokens / self.total if self.total > 0 else 0.0
        return (
            f"[{self.tokens} tokens in {self.total:.2f} s, {rate:.1f} tokens/s,"
            f" first after {self.first:.2f} s]"
        )


_STREAM_FAILED: Final = "the generation ended with an error before it was complete"

_CHAT_HELP: Final = """\
/bye                         end the conversation
/clear                       forget what was said
/set parameter NAME VALUE    change a sampling parameter, such as temperature 0.7
/set system TEXT             tell the model how to behave, from the next message on
/show                        print the sampling parameters
/help                        print this
\"\"\"                          begin and end a message of several lines"""

_CHAT_PARAMETERS: Final[dict[str, Callable[[str], Any]]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": _integer,
    "stop": str,
    "stop_token_ids": _token_ids,
    "max_tokens": _integer,
    "min_tokens": _integer,
}


class _Chat:
    """A conversation on the terminal, or over a pipe where each line is a message."""

    def __init__(self, llm: LLM, given: dict[str, Any], system: str | None, quiet: bool) -> None:
        self._llm = llm
        self._given = given
        self._params = _with_model_defaults(llm, given)
        self._system = system
        self._quiet = quiet
        self._messages: list[dict[str, str]] = []
        self._interactive = self._is_interactive()

    def run(self) -> int:
        """Answer until /bye or the end of the input.

        Raises:
            ValueError: a bad message or command, where nobody is there to correct it.
        """
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 (gives input() its line editing)
            if not self._quiet:
                print("Type a message, /help for the commands, /bye to leave.", file=sys.stderr)
        while (message := self._read_message()) is not None:
            try:
                if message.startswith("/"):
                    if message == "/bye":
                        break
                    self._command(message)
                elif message.strip():
                    self._answer(message)
            except ValueError as error:
                if not self._interactive:
                    raise
                _print_error(error)
        return 0

    @staticmethod
    def _is_interactive() -> bool:
        return sys.stdin.isatty()

    def _read_line(self, prompt: str) -> str | None:
        if not self._interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            print()
            return None

    def _read_message(self) -> str | None:
        line = self._read_line(">>> ")
        if line is None or not line.lstrip().startswith('"""'):
            return line
        lines = [line.lstrip().removeprefix('"""')]
        while not lines[-1].rstrip().endswith('"""'):
            line = self._read_line("... ")
            if line is None:
                return "\n".join(lines)
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix('"""')
        text = "\n".join(lines).strip("\n")
        return f" {text}" if text.startswith("/") else text  # a text, not a command

    def _command(self, line: str) -> None:
        words = line.split(maxsplit=3)
        if line in ("/help", "/?"):
            print(_CHAT_HELP)
        elif line == "/clear":
            self._messages.clear()
        elif line == "/show":
            for name in _CHAT_PARAMETERS:
                print(f"{name:20} {getattr(self._params, name)}")
        elif words[:2] == ["/set", "system"] and len(words) > 2:
            self._system = line.split(maxsplit=2)[2]
        elif words[:2] == ["/set", "parameter"] and len(words) == 4:
            self._set_parameter(words[2], words[3])
        else:
            raise UsageError(f"{line!r} is not a command: /help lists them")

    def _set_parameter(self, name: str, text: str) -> None:
        kind = _CHAT_PARAMETERS.get(name)
        if kind is None:
            raise UsageError(f"no parameter {name!r}: there are {', '.join(_CHAT_PARAMETERS)}")
        try:
            value = kind(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{name}: {error}") from error
        given = {**self._given, name: value}
        self._params = _with_model_defaults(self._llm, given)
        self._given = given

    def _answer(self, message: str) -> None:
        """Stream the answer to `message`; a failure leaves the conversation as it was."""
        messages = [*self._messages, {"role": "user", "content": message}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        statistics = _Statistics()
        chunks = statistics.watch(self._llm.stream_chat([*system, *messages], self._params))
        failed = False
        try:
            for chunk in chunks:
                failed = failed or chunk.finish_reason == "error"
                if chunk.index == 0:
                    pieces.append(chunk.text)
                    _write(chunk.text)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            chunks.close()
        print()
        sys.stdout.flush()
        if failed:
            raise ValueError(_STREAM_FAILED)
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        if not self._quiet:
            print(statistics, file=sys.stderr)


def _chat(arguments: argparse.Namespace) -> int:
    given = _given_sampling(arguments)
    llm = _load(arguments)
    llm.tokenizer.require_chat()
    return _Chat(llm, given, arguments.system, arguments.quiet).run()


def _program(arguments: argparse.Namespace) -> int:
    from megavm.scheduler.inspect import describe_program

    progress = _Progress(arguments.quiet)
    progress(f"compiling {arguments.model}")
    try:
        text = describe_program(
            arguments.model,
            machine=arguments.machine,
            dtype=arguments.dtype,
            rows=arguments.rows,
            sequences=arguments.sequences,
            context=arguments.context,
            workers=arguments.workers,
            assignment=arguments.assignment,
            exchange=arguments.exchange,
            disassemble=arguments.disassemble,
            verify=arguments.verify,
            save=arguments.save,
        )
    finally:
        progress.clear()
    print(text)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    facts = _model_facts(arguments.model, arguments.dtype)
    if arguments.json:
        _print_json(facts)
        return 0
    config, tokenizer = facts["config"], facts["tokenizer"]
    rope = config["rope_scaling"]
    lines = {
        "directory": facts["directory"],
        "parameters": f"{facts['parameters']:,}",
        "weights": f"{_bytes(facts['weight_bytes'])}, stored as {config['dtype']}",
        "KV cache": f"{_bytes(facts['kv_bytes_per_token'])} per token in {facts['dtype']}",
        "layers": config["num_layers"],
        "hidden size": config["hidden_size"],
        "intermediate size": config["intermediate_size"],
        "attention heads": f"{config['num_heads']} of {config['head_dim']},"
        f" {config['num_kv_heads']} for keys and values",
        "vocabulary": f"{config['vocab_size']:,}, embeddings "
        + ("tied" if config["tie_word_embeddings"] else "not tied"),
        "context": f"{config['max_position_embeddings']:,} tokens",
        "rotary embedding": f"theta {config['rope_theta']:g}, {rope['kind']} scaling",
        "biases": ", ".join(key for key in ("attention_bias", "mlp_bias") if config[key]) or "none",
        "ends at token": _join_ids(config["eos_token_ids"]) or "none",
        "tokenizer": f"{tokenizer['vocab_size']:,} tokens" if tokenizer["available"] else "none",
        "chat template": "yes" if tokenizer["chat_template"] else "none",
    }
    for name, value in lines.items():
        print(f"{name:18} {value}")
    return 0


def _model_facts(model: str, dtype: str) -> dict[str, Any]:
    """What a model directory says about itself, its file headers checked; reads no weights."""
    import dataclasses

    from megavm.scheduler.checkpoint import Checkpoint, resolve
    from megavm.tokenizer import Tokenizer

    checkpoint = Checkpoint.open(resolve(model))
    checkpoint.check()
    tokenizer = Tokenizer(checkpoint.directory)
    config = checkpoint.config
    if dtype == "auto":
        dtype = "float32" if config.dtype == "float32" else "bfloat16"
    return {
        "model": model,
        "directory": str(checkpoint.directory),
        "architecture": "LlamaForCausalLM",
        "config": dataclasses.asdict(
            dataclasses.replace(config, eos_token_ids=checkpoint.eos_token_ids)
        ),
        "parameters": config.num_parameters,
        "weight_bytes": checkpoint.stored_bytes(),
        "dtype": dtype,
        "kv_bytes_per_token": config.kv_elements_per_token * (4 if dtype == "float32" else 2),
        "generation": checkpoint.generation,
        "unused_tensors": list(checkpoint.extra_tensors()),
        "tokenizer": {
            "available": tokenizer.available,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.chat_template is not None,
        },
    }


def _bytes(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    return f"{value:.4g} {('bytes', 'KB', 'MB', 'GB', 'TB')[unit]}"


def _doctor(arguments: argparse.Namespace) -> int:
    from megavm import doctor

    report = doctor.examine()
    if arguments.json:
        _print_json(report)
    else:
        print(doctor.format_report(report))
    return 0


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "generate": _generate,
    "chat": _chat,
    "program": _program,
    "info": _info,
    "doctor": _doctor,
}


# --- the process --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return the exit code of the process."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except SystemExit as request:  # --help and --version
        code = request.code if isinstance(request.code, int) else 0
    except KeyboardInterrupt:
        if sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt goes below the ^C
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still in the buffer must not raise again when the interpreter exits.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except Exception as error:
        if _sentence(error) is None:
            raise  # a bug of ours: its traceback is what helps
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        _print_error(error)
        code = EXIT_ERROR
    return code


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may lack characters of the text
    parser, parsers = _build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    parsers[parsed.command].settle(parsed, os.environ)
    return _COMMANDS[parsed.command](parsed)


def _sentence(error: BaseException) -> str | None:
    """What to tell the user about a known fault; None for what should not have happened."""
    if isinstance(error, ImportError):
        if (error.name or "").startswith("megavm"):
            return f"this installation of megavm is incomplete ({error}): install it with pip"
        if isinstance(error, ModuleNotFoundError):
            return f"the Python package {error.name} is not installed"
        return f"a Python package cannot be loaded: {error}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"not enough memory: {error or 'an allocation failed'}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError) or type(error).__module__.startswith("megavm."):
        return str(getattr(error, "cause", error)) or type(error).__name__
    return None


def _print_error(error: BaseException) -> None:
    print("megavm: error:", " ".join((_sentence(error) or "").split()), file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
