"""A model that writes what a test says: the tokens of chosen texts take the place of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from engine_runs import OneByOne

from megavm.instructions.sample import Integer
from megavm.scheduler.engine import engine
from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.scheduler.engine.sequence import Delta
from megavm.scheduler.engine.sequence import Sequence as EngineSequence
from megavm.scheduler.engine.step import Floats, Ints
from megavm.scheduler.llama.hub import resolve
from megavm.tokenizer import Tokenizer


def model_with(
    directory: Path, chat_template: str, tokens: Sequence[tuple[str, bool]] = ()
) -> Path:
    """The shipped model with a chat template and with more tokens: (text, whether it is special).

    The model itself does not know these tokens; only scripts write them.
    """
    for file in Path(resolve("stories")).iterdir():
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text(chat_template)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    first = Tokenizer(directory).vocab_size
    content["added_tokens"] += [
        {
            "id": first + i,
            "content": text,
            "special": special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, (text, special) in enumerate(tokens)
    ]
    path.write_text(json.dumps(content))
    return directory


@contextlib.contextmanager
def writing(tokenizer: Tokenizer, *texts: str) -> Iterator[None]:
    """Let sequence i of each request write text i (the last one for all further), and end."""
    assert tokenizer.eos_token_id is not None
    scripts = [[*tokenizer.encode(text, False), tokenizer.eos_token_id] for text in texts]
    append, parameters = EngineSequence.append, EngineSequence.parameters

    def scripted(
        self: EngineSequence,
        token: int,
        stopped: bool,
        logprobs: TokenLogprobs | None,
        complete: bool = False,
    ) -> Delta:
        script = scripts[min(self.index, len(scripts) - 1)]
        token = script[min(len(self.output), len(script) - 1)]
        if logprobs is not None:
            logprobs = replace(logprobs, token_id=token)
        return append(self, token, token in self.stop_ids, logprobs, complete)

    def endless(self: EngineSequence) -> tuple[Floats, Ints]:
        """The machine goes on after stop tokens: those that it chooses are not in the script."""
        real, integer = parameters(self)
        integer[Integer.NUM_STOP] = 0
        integer[Integer.STOP :] = -1
        return real, integer

    with (
        mock.patch.object(EngineSequence, "append", scripted),
        mock.patch.object(engine, "_APPENDER", OneByOne()),
        mock.patch.object(EngineSequence, "parameters", endless),
    ):
        yield
