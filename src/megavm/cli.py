"""The command `megavm`: its commands and their options, its exit codes, and how it ends.

`megavm.commands` holds a module for each command. Only argparse is imported at module level, so
that `megavm --help` answers at once. Results go to stdout, everything else to stderr. Exit codes: 0
done, 2 bad input or a known fault (one sentence on stderr), 130 interrupted, 141 the reader of our
output went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

from megavm.commands.bench_options import declare_bench
from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    add_machine,
    add_model,
    add_sampling,
    integer,
    length,
    token_ids,
)
from megavm.commands.serve_options import SERVE_EXAMPLES, declare_serve
from megavm.commands.terminal import (
    EXIT_BROKEN_PIPE,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    print_error,
    sentence,
)
from megavm.commands.trace_options import PROFILE_EXAMPLES, declare_profile, declare_trace

_DESCRIPTION: Final = (
    "Run Llama models as one program on a virtual machine, on a GPU or on the CPU."
)

_EXAMPLES: Final = """\
examples:
  megavm generate stories "Once upon a time" --echo --stream
  megavm chat                               talk to the small model that comes with megavm
  megavm serve stories                      an HTTP server for OpenAI's clients
  megavm info meta-llama/Llama-3.2-1B       sizes of a model, from its directory or the hub
  megavm profile stories -o run.megatrace   record where the time goes; then megavm trace report
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
  megavm program path/to/model --machine cuda --sequences 8 --context 4K
  megavm program path/to/model --rows 128 --sequences 4 --save prefill.program
"""

_COMPILE_EXAMPLES: Final = """\
examples:
  megavm compile path/to/model              for the GPU of this machine
  megavm compile path/to/model --arch sm_90a

Needs the model's config.json and no weights. Kernels are kept in $MEGAVM_CACHE_DIR, else in
$XDG_CACHE_HOME/megavm, else in ~/.cache/megavm.
"""

_INFO_EXAMPLES: Final = """\
examples:
  megavm info stories
  megavm info path/to/model --json
"""


class _ShowVersion(argparse.Action):
    """--version, which reads the installed package's metadata only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import megavm

        print(f"megavm {megavm.__version__}")
        parser.exit(0)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and the parser of each command by its name.

    A command of a command has both names: "trace report".
    """
    parser = Parser(prog="megavm", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Parser
    )
    parsers: dict[str, Parser] = {}

    def command(name: str, operands: str, summary: str, examples: str | None = None) -> Parser:
        parsers[name] = commands.add_parser(
            name,
            usage=f"megavm {name} {operands} [OPTION ...]".replace("  ", " "),
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=examples,
        )
        return parsers[name]

    _declare_generate(command("generate", "MODEL [PROMPT]", "continue a text", _GENERATE_EXAMPLES))
    _declare_chat(command("chat", "[MODEL]", "talk to a model", _CHAT_EXAMPLES))
    summary = "answer OpenAI's clients over HTTP"
    declare_serve(command("serve", "[MODEL]", summary, SERVE_EXAMPLES))
    summary = "show the program that a model is compiled to"
    _declare_program(command("program", "[MODEL]", summary, _PROGRAM_EXAMPLES))
    summary = "compile a model's GPU kernels ahead of their first use"
    _declare_compile(command("compile", "[MODEL]", summary, _COMPILE_EXAMPLES))
    summary = "record what every instruction does when, while a model runs"
    declare_profile(command("profile", "MODEL [PROMPT]", summary, PROFILE_EXAMPLES))
    trace = command("trace", "COMMAND", "look at a recorded trace")
    parsers.update(declare_trace(trace))
    parsers.update(declare_bench(command("bench", "COMMAND", "measure a server under load")))
    _declare_info(command("info", "[MODEL]", "show the sizes of a model", _INFO_EXAMPLES))
    _declare_doctor(command("doctor", "", "show what this machine has and what would run where"))
    return parser, parsers


def _declare_generate(generate: Parser) -> None:
    generate.add_argument("model", metavar="MODEL", help="directory, shipped name or hub id")
    generate.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads it from stdin"
    )
    output = generate.add_argument_group("input and output")
    generate.option(
        output,
        "--prompt-ids",
        metavar="IDS",
        type=token_ids,
        help="the prompt as token ids, such as 1,2,3",
    )
    generate.option(output, "-n", metavar="N", type=integer, default=1, help="completions (1)")
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
        type=integer,
        help="with --json: log probabilities of each token and its K likeliest alternatives",
    )
    add_sampling(generate, max_tokens=128)
    add_machine(generate, *ENGINE_OPTIONS)


def _declare_chat(chat: Parser) -> None:
    add_model(chat)
    chat.option(chat, "--system", metavar="TEXT", help="what the model is told before you speak")
    add_sampling(chat, max_tokens=None)
    add_machine(chat, *ENGINE_OPTIONS)


def _declare_program(program: Parser) -> None:
    add_model(program)
    shape = program.add_argument_group("the step to compile")
    program.option(
        shape, "--rows", metavar="N", type=length, help="tokens in the step (one per sequence)"
    )
    program.option(shape, "--sequences", metavar="N", type=length, help="sequences in the step (1)")
    program.option(
        shape, "--context", metavar="N", type=length, help="longest context of a sequence (1024)"
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
        choices=("barrier", "heads", "tagged"),
        help="how workers wait for each other's small results: by counters, by the data, or by the "
        "data for what attention reads in decode steps (as the machine runs it)",
    )
    result = program.add_argument_group("output")
    program.option(
        result, "--disassemble", action="store_true", help="print every instruction of every queue"
    )
    program.option(
        result, "--verify", action="store_true", help="prove that it has no race and no deadlock"
    )
    program.option(result, "--save", metavar="FILE", help="write the program to FILE")
    add_machine(program, "machine", "dtype", "workers", "quiet")


def _declare_compile(parser: Parser) -> None:
    add_model(parser)
    target = parser.add_argument_group("target and output")
    parser.option(
        target, "--arch", choices=("sm_90a",), help="compile for this GPU, which need not be there"
    )
    parser.option(target, "--json", action="store_true", help="print one JSON object")
    add_machine(parser, "dtype", "workers", "quiet")


def _declare_info(info: Parser) -> None:
    add_model(info)
    info.option(info, "--json", action="store_true", help="print one JSON object")
    add_machine(info, "dtype")


def _declare_doctor(doctor: Parser) -> None:
    doctor.option(doctor, "--json", action="store_true", help="print one JSON object")


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
        if sentence(error) is None:
            raise  # a bug of ours: its traceback is what helps
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        print_error(error)
        code = EXIT_ERROR
    return code


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may lack characters of the text
    parser, parsers = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    name = " ".join(filter(None, (parsed.command, getattr(parsed, "action", None))))
    if unknown := parsers.get(name, parser).place(parsed, unknown):
        parsers.get(name, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if name in ("", "bench", "trace"):
        parsers.get(name, parser).print_help()
        return 0
    parsers[name].settle(parsed, os.environ)
    code: int = importlib.import_module(f"megavm.commands.{parsed.command}").run(parsed)
    return code
