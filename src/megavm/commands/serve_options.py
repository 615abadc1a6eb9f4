"""Options of `megavm serve`. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    add_machine,
    add_model,
    integer,
    length,
    number,
)

SERVE_EXAMPLES: Final = """\
examples:
  megavm serve                              the small model that comes with megavm
  megavm serve path/to/model --host 0.0.0.0 --port 8000 --api-key SECRET
  curl http://127.0.0.1:8000/v1/completions -H "content-type: application/json" \\
      -d '{"prompt": "Once upon a time", "max_tokens": 40}'

SIGTERM and Ctrl-C let running requests end; a second one ends them at once.
A key is better given in the environment, MEGAVM_API_KEY, than where others can read it.
"""


def declare_serve(serve: Parser) -> None:
    """The options of `megavm serve`."""
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
    limits = serve.add_argument_group("limits")
    serve.option(
        limits, "--max-queue", metavar="N", type=integer, help="sequences that may wait (256)"
    )
    serve.option(limits, "--max-n", metavar="N", type=length, help="completions of a prompt (128)")
    serve.option(
        limits, "--max-body-bytes", metavar="N", type=length, help="size of a request (4M)"
    )
    serve.option(
        limits, "--request-timeout", metavar="S", type=number, help="seconds of a request (600)"
    )
    serve.option(
        limits,
        "--shutdown-timeout",
        metavar="S",
        type=number,
        help="seconds that running requests get when the server ends (30)",
    )
    logs = serve.add_argument_group("logs and batches")
    serve.option(logs, "--log-prompts", action="store_true", help="write prompts to the log")
    serve.option(
        logs, "--no-prefix-caching", action="store_true", help="compute every prompt from its start"
    )
    serve.option(
        logs,
        "--max-num-batched-tokens",
        metavar="N",
        type=length,
        help="tokens of one step; longer prompts are read in chunks (512)",
    )
    add_machine(serve, *ENGINE_OPTIONS)
