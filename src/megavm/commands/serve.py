"""`megavm serve`: an HTTP server for OpenAI's and Anthropic's clients."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING, Final

from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    UsageError,
    add_chat_template,
    add_machine,
    add_model,
    integer,
    length,
    number,
)

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.scheduler.run.runner import Progress

_EXAMPLES: Final = """\
examples:
  megavm serve                              the small model that comes with megavm
  megavm serve path/to/model --host 0.0.0.0 --port 8000 --api-key SECRET
  curl http://127.0.0.1:8000/v1/completions -H "content-type: application/json" \\
      -d '{"prompt": "Once upon a time", "max_tokens": 40}'

SIGTERM and Ctrl-C let running requests end; a second one ends them at once.
A key is better given in the environment, MEGAVM_API_KEY, than where others can read it.
"""


def declare(megavm: Parser) -> None:
    """Declare `megavm serve`."""
    summary = "answer OpenAI's and Anthropic's clients over HTTP"
    serve = megavm.command("serve", "[MODEL]", summary, run, _EXAMPLES)
    serve.needs_stdout = False
    add_model(serve)
    address = serve.add_argument_group("address and clients")
    serve.option(address, "--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    serve.option(
        address,
        "--port",
        metavar="N",
        type=integer,
        default=8000,
        help="port, 0: a free one (8000)",
    )
    serve.option(
        address,
        "--served-model-name",
        metavar="NAME",
        action="append",
        help="what clients call the model (MODEL; may be repeated)",
    )
    serve.option(
        address,
        "--api-key",
        metavar="KEY",
        action="append",
        help="a key that clients must show (may be repeated)",
    )
    serve.option(
        address,
        "--allowed-origin",
        metavar="URL",
        action="append",
        help="web pages from there may use the server, *: all (may be repeated)",
    )
    serve.option(
        address,
        "--allowed-host",
        metavar="NAME",
        action="append",
        help="a name of this server, *: any (at a loopback address: localhost; may be repeated)",
    )
    serve.option(
        address, "--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)"
    )
    serve.option(
        address, "--ssl-keyfile", metavar="FILE", help="its private key (in the same file)"
    )
    limits = serve.add_argument_group("limits")
    serve.option(
        limits, "--max-queue", metavar="N", type=integer, help="sequences that may wait (256)"
    )
    serve.option(limits, "--max-n", metavar="N", type=length, help="completions of a prompt (128)")
    serve.option(
        limits, "--max-body-bytes", metavar="N", type=length, help="size of a request (4M)"
    )
    serve.option(
        limits, "--max-connections", metavar="N", type=length, help="open connections (8192)"
    )
    serve.option(
        limits, "--request-timeout", metavar="S", type=number, help="seconds of a request (600)"
    )
    serve.option(
        limits,
        "--header-timeout",
        metavar="S",
        type=number,
        help="seconds until the headers of a request must be complete (60)",
    )
    serve.option(
        limits,
        "--shutdown-timeout",
        metavar="S",
        type=number,
        help="seconds that running requests get when the server ends (30)",
    )
    logs = serve.add_argument_group("logs, batches and conversations")
    serve.option(
        logs,
        "--log-level",
        choices=("debug", "info", "warning", "error", "critical"),
        help="what is logged (info); --quiet logs the address and warnings",
    )
    serve.option(logs, "--log-prompts", action="store_true", help="write prompts to the log")
    serve.option(
        logs, "--no-prefix-caching", action="store_true", help="compute every prompt from its start"
    )
    serve.option(
        logs,
        "--max-num-batched-tokens",
        metavar="N",
        type=length,
        help="tokens of one step; longer prompts are read in chunks (2048 on a GPU, else 512)",
    )
    serve.option(
        logs,
        "--tpot-limit-ms",
        metavar="MS",
        type=number,
        help="time of a step while answers are written: prompts beside them are read in smaller"
        " chunks (no limit)",
    )
    add_chat_template(serve, logs)
    serve.option(
        logs,
        "--tool-call-parser",
        choices=("llama3_json", "hermes", "pythonic"),
        help="format of the model's tool calls (by its chat template)",
    )
    add_machine(serve, *ENGINE_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives, and return the exit code.

    Raises:
        EngineEnded: the machine is lost or has failed too often in a row, or the engine's process
            has ended.
    """
    from megavm.server.logs import NOTICE
    from megavm.server.run import serve
    from megavm.server.settings import Settings

    given = vars(arguments)
    names = (
        "max_body_bytes",
        "max_n",
        "max_queue",
        "max_connections",
        "request_timeout",
        "header_timeout",
        "shutdown_timeout",
    )
    settings = Settings(
        model_names=tuple(arguments.served_model_name or [_name(arguments.model)]),
        api_keys=tuple(arguments.api_key or ()),
        allowed_origins=tuple(arguments.allowed_origin or ()),
        allowed_hosts=tuple(arguments.allowed_host) if arguments.allowed_host else None,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        tool_call_parser=arguments.tool_call_parser,
        log_prompts=bool(arguments.log_prompts),
        **{name: given[name] for name in names if given[name] is not None},
    )
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port must be in [0, 65535], not {arguments.port}")

    level = NOTICE if arguments.quiet else logging.INFO
    if arguments.log_level is not None:
        level = logging.getLevelNamesMapping()[arguments.log_level.upper()]

    def load_model(progress: Progress) -> LLM:
        from megavm.llm import LLM

        engine = (
            "chat_template",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tpot_limit_ms",
            "workers",
            "tensor_parallel_size",
            "fixed_order",
        )
        return LLM(
            arguments.model,
            machine=arguments.machine,
            dtype=arguments.dtype,
            prefix_caching=not arguments.no_prefix_caching,
            progress=progress,
            **{name: given[name] for name in engine if given[name] is not None},
        )

    return serve(load_model, settings, arguments.host, arguments.port, level)


def _name(model: str) -> str:
    """The default name for clients: the last part of a directory's path, else `model` itself."""
    if os.path.isdir(model):
        return os.path.basename(os.path.abspath(model))
    return model
