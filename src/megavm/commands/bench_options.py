"""Options of the commands of `megavm bench`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

from megavm.commands.options import Parser, integer, length, number

_EXAMPLES: Final = """\
examples:
  megavm bench serve --max-concurrency 8 --num-prompts 200
  megavm bench serve --request-rate 20 --duration 60 --goodput ttft:200 tpot:20 --json run.json
  megavm bench serve --endpoint chat --sharegpt conversations.json --warmup 16
  megavm bench serve --base-url http://other:8000 --input-len 64:512 --output-len normal:128:32

Lengths are tokens: 128, 64:256 (uniform) or normal:MEAN:STD. Ctrl-C prints the results so far.
"""


def declare_bench(bench: Parser) -> dict[str, Parser]:
    """The commands of `megavm bench`, by their whole names ("bench serve")."""
    summary = "put load on an OpenAI-compatible server and report latency and throughput"
    actions = bench.add_subparsers(
        dest="action",
        metavar="COMMAND",
        title="commands",
        parser_class=Parser,
        prog="megavm bench",
    )
    serve = actions.add_parser(
        "serve",
        usage="megavm bench serve [OPTION ...]",
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=_EXAMPLES,
    )
    _declare_target(serve)
    _declare_prompts(serve)
    _declare_schedule(serve)
    _declare_report(serve)
    return {"bench serve": serve}


def _declare_target(serve: Parser) -> None:
    group = serve.add_argument_group("the server and what it is sent")

    def add(flag: str, metavar: str, text: str, **rest: Any) -> None:
        serve.option(group, flag, metavar=metavar, help=text, **rest)

    address = "http://127.0.0.1:8000"
    add("--base-url", "URL", f"where the server is ({address})", default=address)
    add("--model", "NAME", "the model's name (the first that the server lists)")
    add("--api-key", "KEY", "sent as Authorization: Bearer KEY")
    serve.option(
        group,
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="what is asked for (completions)",
    )
    serve.option(
        group, "--ignore-eos", action="store_true", help="ask for answers of the full length"
    )
    add("--extra-body", "JSON", "more fields of every request, such as '{\"temperature\": 0}'")
    add("--timeout", "S", "limit of one request, seconds (600)", type=positive, default=600.0)
    add(
        "--ready-timeout",
        "S",
        "wait so long for the server to answer, seconds (60)",
        type=positive,
        default=60.0,
    )


def _declare_prompts(serve: Parser) -> None:
    group = serve.add_argument_group("prompts")

    def add(flag: str, metavar: str, text: str, **rest: Any) -> None:
        serve.option(group, flag, metavar=metavar, help=text, **rest)

    add("--input-len", "LENGTH", "tokens of a prompt (128)", type=lengths)
    add("--output-len", "LENGTH", "tokens of an answer (128, or as in the file)", type=lengths)
    serve.option(
        group,
        "--prompts",
        choices=("tokens", "text"),
        help="random token ids or random words (tokens for completions, text for chat)",
    )
    add(
        "--vocab-size",
        "N",
        "random token ids are below N (1000)",
        type=length,
        default=1000,
    )
    add("--sharegpt", "FILE", "take prompts from a JSON file of conversations")
    add(
        "--max-total-len",
        "N",
        "leave out longer conversations of the file, tokens (2048)",
        type=length,
        default=2048,
    )
    add(
        "--seed", "N", "the same seed gives the same prompts and times (0)", type=integer, default=0
    )


def _declare_schedule(serve: Parser) -> None:
    group = serve.add_argument_group("how much and when")

    def add(flag: str, metavar: str, text: str, **rest: Any) -> None:
        serve.option(group, flag, metavar=metavar, help=text, **rest)

    add("--num-prompts", "N", "requests (100, or without limit for --duration)", type=length)
    add("--duration", "S", "begin no request after S seconds", type=positive)
    add("--warmup", "N", "send N requests before, which do not count (0)", type=integer, default=0)
    add("--request-rate", "R", "requests per second at random times; inf: at once", type=rate)
    add(
        "--burstiness",
        "B",
        "shape of the intervals: 1 is Poisson, less is burstier (1)",
        type=positive,
        default=1.0,
    )
    add(
        "--max-concurrency",
        "N",
        "most requests at once (16, or without limit for --request-rate)",
        type=length,
    )


def _declare_report(serve: Parser) -> None:
    group = serve.add_argument_group("output")
    serve.option(
        group,
        "--goodput",
        metavar="LIMIT",
        nargs="+",
        help="count requests within limits of ttft, tpot, e2el in ms, such as ttft:50 tpot:5",
    )
    serve.option(group, "--json", metavar="FILE", help="write the report as JSON too")
    serve.option(group, "--quiet", action="store_true", help="no progress")


def positive(text: str) -> float:
    """An option's number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def rate(text: str) -> float:
    """An option's rate: a number above 0, or inf."""
    return math.inf if text == "inf" else positive(text)


def lengths(text: str) -> Any:
    """An option's `megavm.loadgen.workload.Lengths`."""
    from megavm.loadgen.workload import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
