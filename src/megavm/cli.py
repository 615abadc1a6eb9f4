# PYTHON_ARGCOMPLETE_OK (for activate-global-python-argcomplete)
"""The command `megavm`: parses the command line, runs a command, returns its exit code.

Each command is a module of `megavm.commands`: its `declare` adds the command and its options to the
parser, and the parser calls its `run`. These modules import nothing heavy at module level, so that
`megavm --help` answers at once. Results go to stdout, everything else to stderr. Exit codes: 0
success, 2 bad input or a known fault (one sentence on stderr), 130 interrupted, 141 the reader of
stdout closed it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

from megavm.commands import (
    bench,
    chat,
    compile,
    doctor,
    generate,
    info,
    profile,
    program,
    serve,
    trace,
)
from megavm.commands.options import Parser, UsageError
from megavm.commands.terminal import (
    EXIT_BROKEN_PIPE,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    print_error,
    sentence,
)

# In the order of `megavm --help`.
_COMMANDS: Final = (generate, chat, serve, program, compile, profile, trace, bench, info, doctor)

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
Completion in bash and zsh: eval "$(register-python-argcomplete megavm)"
"""


class _ShowVersion(argparse.Action):
    """--version; reads the metadata of the installed package only when the option is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import megavm

        print(f"megavm {megavm.__version__}")
        parser.exit(0)


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(prog="megavm", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    for command in _COMMANDS:
        command.declare(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv[1:]` by default) and return the exit code of the process."""
    try:
        _fill_closed_streams()
        code = _run(arguments)
        _flush()
    except SystemExit as request:  # --help and --version
        code = request.code if isinstance(request.code, int) else 0
    except KeyboardInterrupt:
        if sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr)  # put the shell's prompt on the line below ^C
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Redirect stdout: flushing its buffer must not raise again when the interpreter exits.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except Exception as error:
        if sentence(error) is None:
            raise  # a bug in megavm: show the traceback
        with suppress(BrokenPipeError):
            _flush()
        print_error(error)
        code = EXIT_ERROR
    return code


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _fill_closed_streams() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets their descriptors."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # the terminal's encoding may lack characters
    whole = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell completes a command line
        import argcomplete

        argcomplete.autocomplete(whole)
    parsed, unknown = whole.parse_known_args(arguments)
    parser: Parser = parsed.parser
    if unknown := parser.place(parsed, unknown):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if parsed.run is None:
        parser.print_help()
        return 0
    if parser.needs_stdout and sys.stdout is None:
        raise UsageError("stdout is closed: the result cannot be printed")
    parser.settle(parsed, os.environ)
    code: int = parsed.run(parsed)
    return code
