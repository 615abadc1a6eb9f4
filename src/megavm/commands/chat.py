"""`megavm chat`: a conversation on the terminal, or over a pipe where each line is a message."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from megavm.commands.model import load, with_model_defaults
from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    UsageError,
    add_chat_template,
    add_machine,
    add_model,
    add_sampling,
    given_sampling,
    integer,
    number,
    token_ids,
)
from megavm.commands.terminal import STREAM_FAILED, Statistics, print_error, write

if TYPE_CHECKING:
    from megavm.llm import LLM

_EXAMPLES: Final = """\
examples:
  megavm chat
  megavm chat path/to/model --system "Answer in one sentence." --temperature 0.7
  echo "Tell me a story." | megavm chat

In the conversation: /help lists the commands, \"\"\" begins and ends a text of several lines.
"""

_HELP: Final = """\
/bye                         end the conversation
/clear                       forget what was said
/set parameter NAME VALUE    change a sampling parameter, such as temperature 0.7
/set system TEXT             tell the model how to behave, from the next message on
/show                        print the sampling parameters
/help                        print this
\"\"\"                          begin and end a message of several lines"""

_PARAMETERS: Final[dict[str, Callable[[str], Any]]] = {
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "repetition_penalty": number,
    "presence_penalty": number,
    "frequency_penalty": number,
    "seed": integer,
    "stop": str,
    "stop_token_ids": token_ids,
    "max_tokens": integer,
    "min_tokens": integer,
}


def declare(megavm: Parser) -> None:
    """Declare `megavm chat`."""
    chat = megavm.command("chat", "[MODEL]", "talk to a model", run, _EXAMPLES)
    add_model(chat)
    chat.option(chat, "--system", metavar="TEXT", help="what the model is told before you speak")
    add_chat_template(chat, chat)
    add_sampling(chat, max_tokens=None)
    add_machine(chat, *ENGINE_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Talk until /bye or the end of the input, and return the exit code."""
    if sys.stdin is None:
        raise UsageError("stdin is closed: there are no messages to read")
    given = given_sampling(arguments)
    llm = load(arguments, chat_template=arguments.chat_template)
    llm.tokenizer.require_chat()
    return Chat(llm, given, arguments.system, arguments.quiet).run()


class Chat:
    """A conversation on the terminal, or over a pipe where each line is a message."""

    def __init__(self, llm: LLM, given: dict[str, Any], system: str | None, quiet: bool) -> None:
        self._llm = llm
        self._given = given
        self._params = with_model_defaults(llm, given)
        self._system = system
        self._quiet = quiet or sys.stderr is None
        self._messages: list[dict[str, str]] = []
        self._interactive = self._is_interactive()

    def run(self) -> int:
        """Answer until /bye or the end of the input.

        Raises:
            ValueError: a bad message or command, if the input is not interactive.
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
                print_error(error)
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
            print(_HELP)
        elif line == "/clear":
            self._messages.clear()
        elif line == "/show":
            for name in _PARAMETERS:
                print(f"{name:20} {getattr(self._params, name)}")
        elif words[:2] == ["/set", "system"] and len(words) > 2:
            self._system = line.split(maxsplit=2)[2]
        elif words[:2] == ["/set", "parameter"] and len(words) == 4:
            self._set_parameter(words[2], words[3])
        else:
            raise UsageError(f"{line!r} is not a command: /help lists them")

    def _set_parameter(self, name: str, text: str) -> None:
        kind = _PARAMETERS.get(name)
        if kind is None:
            raise UsageError(f"no parameter {name!r}: there are {', '.join(_PARAMETERS)}")
        try:
            value = kind(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{name}: {error}") from error
        given = {**self._given, name: value}
        self._params = with_model_defaults(self._llm, given)
        self._given = given

    def _answer(self, message: str) -> None:
        """Stream the answer to `message`; a failure leaves the conversation as it was."""
        messages = [*self._messages, {"role": "user", "content": message}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        if self._messages:
            self._check_room([*system, *messages])
        pieces: list[str] = []
        statistics = Statistics()
        chunks = statistics.watch(self._llm.stream_chat([*system, *messages], self._params))
        failed, tokens = False, 0
        reason: str | None = None
        try:
            for chunk in chunks:
                failed = failed or chunk.finish_reason == "error"
                if chunk.index == 0:
                    tokens, reason = tokens + (chunk.token_id is not None), chunk.finish_reason
                    pieces.append(chunk.text)
                    write(chunk.text)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            chunks.close()
        print()
        sys.stdout.flush()
        if failed:
            raise ValueError(STREAM_FAILED)
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        if not self._quiet:
            print(statistics, file=sys.stderr)
            most = self._params.max_tokens
            if reason == "length" and (most is None or tokens < most):
                print(
                    "[the answer was cut: the context is full; /clear begins a new conversation]",
                    file=sys.stderr,
                )

    def _check_room(self, messages: list[dict[str, str]]) -> None:
        """Raise ValueError when a conversation has become too long for the context."""
        tokenizer, most = self._llm.tokenizer, self._llm.engine.limits.max_prompt_len
        text = tokenizer.chat_prompt(messages)
        length = len(tokenizer.encode(text, add_special_tokens=False))
        if length > most:
            raise ValueError(
                f"the conversation has {length} tokens with this message, and the context has room"
                f" for {most}: /clear begins a new one"
            )
