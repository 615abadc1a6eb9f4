"""`megavm serve`: an HTTP server that OpenAI's clients can use."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from megavm.commands.options import UsageError
from megavm.commands.terminal import EXIT_ERROR, print_error

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.scheduler.run.runner import Progress


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes, and return the exit code.

    Ends the process at once when the machine is lost.

    Raises:
        EngineEnded: the machine fails again and again.
    """
    from megavm.server.engine_loop import EngineEnded
    from megavm.server.run import serve
    from megavm.server.settings import Settings

    given = vars(arguments)
    names = ("max_body_bytes", "max_n", "max_queue", "request_timeout", "shutdown_timeout")
    settings = Settings(
        model_names=tuple(arguments.served_model_name or [_name(arguments.model)]),
        api_keys=tuple(arguments.api_key or ()),
        allowed_origins=tuple(arguments.allowed_origin or ()),
        log_prompts=bool(arguments.log_prompts),
        **{name: given[name] for name in names if given[name] is not None},
    )
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port must be in [0, 65535], not {arguments.port}")

    def load_model(progress: Progress) -> LLM:
        from megavm.llm import LLM

        engine = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "workers")
        return LLM(
            arguments.model,
            machine=arguments.machine,
            dtype=arguments.dtype,
            prefix_caching=not arguments.no_prefix_caching,
            progress=progress,
            **{name: given[name] for name in engine if given[name] is not None},
        )

    try:
        return serve(load_model, settings, arguments.host, arguments.port, bool(arguments.quiet))
    except EngineEnded as error:
        if not error.lost:
            raise
        # To give back what a lost context holds may fail, or wait forever.
        print_error(error)
        sys.stderr.flush()
        os._exit(EXIT_ERROR)


def _name(model: str) -> str:
    """What clients call a model: the last part of a directory's path, else as it is given."""
    if os.path.isdir(model):
        return os.path.basename(os.path.abspath(model))
    return model
