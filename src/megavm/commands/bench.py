"""`megavm bench`: measure a server under load."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from megavm.commands.options import Parser, UsageError, integer, length, number
from megavm.commands.terminal import EXIT_ERROR, EXIT_INTERRUPTED, Progress, print_error

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from megavm.loadgen.client import Target
    from megavm.loadgen.run import Load, Result
    from megavm.loadgen.workload import Prompt

_EXAMPLES: Final = """\
examples:
  megavm bench serve --max-concurrency 8 --num-prompts 200
  megavm bench serve --request-rate 20 --duration 60 --goodput ttft:200 tpot:20 --json run.json
  megavm bench serve --endpoint chat --sharegpt conversations.json --warmup 16
  megavm bench serve --base-url http://other:8000 --input-len 64:512 --output-len normal:128:32

Lengths are tokens: 128, 64:256 (uniform) or normal:MEAN:STD. Ctrl-C prints the results so far.
"""

_NUM_PROMPTS: Final = 100
_MAX_CONCURRENCY: Final = 16
_WARMUP_CONCURRENCY: Final = 8


def declare(megavm: Parser) -> None:
    """Declare the commands of `megavm bench`."""
    bench = megavm.command("bench", "COMMAND", "measure a server under load")
    summary = "put load on an OpenAI-compatible server and report latency and throughput"
    serve = bench.command("serve", "", summary, run, _EXAMPLES)
    _declare_target(serve)
    _declare_prompts(serve)
    _declare_schedule(serve)
    _declare_report(serve)


def _declare_target(serve: Parser) -> None:
    add = functools.partial(
        serve.option, serve.add_argument_group("the server and what it is sent")
    )
    address = "http://127.0.0.1:8000"
    add("--base-url", metavar="URL", default=address, help=f"where the server is ({address})")
    add("--model", metavar="NAME", help="the model's name (the first that the server lists)")
    add("--api-key", metavar="KEY", help="sent as Authorization: Bearer KEY")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="what is asked for (completions)",
    )
    add("--ignore-eos", action="store_true", help="ask for answers of the full length")
    add(
        "--extra-body",
        metavar="JSON",
        help="more fields of every request, such as '{\"temperature\": 0}'",
    )
    add(
        "--timeout",
        metavar="S",
        type=_positive,
        default=600.0,
        help="limit of one request, seconds (600)",
    )
    add(
        "--ready-timeout",
        metavar="S",
        type=_positive,
        default=60.0,
        help="wait so long for the server to answer, seconds (60)",
    )


def _declare_prompts(serve: Parser) -> None:
    add = functools.partial(serve.option, serve.add_argument_group("prompts"))
    add("--input-len", metavar="LENGTH", type=_lengths, help="tokens of a prompt (128)")
    add(
        "--output-len",
        metavar="LENGTH",
        type=_lengths,
        help="tokens of an answer (128, or as in the file)",
    )
    add(
        "--prompts",
        choices=("tokens", "text"),
        help="random token ids or random words (tokens for completions, text for chat)",
    )
    add(
        "--vocab-size",
        metavar="N",
        type=length,
        default=1000,
        help="random token ids are below N (1000)",
    )
    add("--sharegpt", metavar="FILE", help="take prompts from a JSON file of conversations")
    add(
        "--max-total-len",
        metavar="N",
        type=length,
        default=2048,
        help="leave out longer conversations of the file, tokens (2048)",
    )
    add(
        "--seed",
        metavar="N",
        type=integer,
        default=0,
        help="the same seed gives the same prompts and times (0)",
    )


def _declare_schedule(serve: Parser) -> None:
    add = functools.partial(serve.option, serve.add_argument_group("how much and when"))
    add(
        "--num-prompts",
        metavar="N",
        type=length,
        help="requests (100, or without limit for --duration)",
    )
    add("--duration", metavar="S", type=_positive, help="begin no request after S seconds")
    add(
        "--warmup",
        metavar="N",
        type=integer,
        default=0,
        help="send N requests before, which do not count (0)",
    )
    add(
        "--request-rate",
        metavar="R",
        type=_rate,
        help="requests per second at random times; inf: at once",
    )
    add(
        "--burstiness",
        metavar="B",
        type=_positive,
        default=1.0,
        help="shape of the intervals: 1 is Poisson, less is burstier (1)",
    )
    add(
        "--max-concurrency",
        metavar="N",
        type=length,
        help="most requests at once (16, or without limit for --request-rate)",
    )


def _declare_report(serve: Parser) -> None:
    add = functools.partial(serve.option, serve.add_argument_group("output"))
    add(
        "--goodput",
        metavar="LIMIT",
        nargs="+",
        help="count requests within limits of ttft, tpot, e2el in ms, such as ttft:50 tpot:5",
    )
    add("--json", metavar="FILE", help="write the report as JSON too")
    add("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    """Put load on the server, print the report and return the exit code."""
    try:
        import aiohttp  # noqa: F401 (the one package beyond megavm's own)
    except ModuleNotFoundError as error:
        raise UsageError(
            "megavm bench needs the package aiohttp: pip install 'megavm[bench]'"
        ) from error
    import asyncio
    import json
    from pathlib import Path

    from megavm.loadgen.report import format_table, parse_goodput, summarise, warnings

    limits = arguments.goodput or []
    goodput = parse_goodput(limits.split() if isinstance(limits, str) else limits)
    target, load, prompts = _target(arguments), _load(arguments), _prompts(arguments)
    if arguments.json is not None and not Path(arguments.json).absolute().parent.is_dir():
        raise UsageError(f"--json {arguments.json!r} is in a directory that does not exist")
    with asyncio.Runner(loop_factory=_event_loop_factory()) as runner:
        target, result = runner.run(_bench(arguments, target, load, prompts))
    report = summarise(result, target, load, goodput)
    print(format_table(report), flush=True)
    for sentence in warnings(report):
        print(f"megavm: warning: {sentence}", file=sys.stderr)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if result.interrupted:
        return EXIT_INTERRUPTED
    if not report["completed"]:
        print_error(ValueError("no request was answered"))
        return EXIT_ERROR
    return 0


def _event_loop_factory() -> Callable[[], AbstractEventLoop] | None:
    """Of uvloop, as the server's; None stands for asyncio's, where uvloop is absent."""
    from importlib import import_module

    try:
        factory: Callable[[], AbstractEventLoop] = import_module("uvloop").new_event_loop
    except ModuleNotFoundError:
        return None
    return factory


async def _bench(
    arguments: argparse.Namespace, target: Target, load: Load, prompts: Iterator[Prompt]
) -> tuple[Target, Result]:
    """Wait for the server, warm it up and put load on it.

    Returns the target with its model filled in, and the result.
    """
    from megavm.loadgen.client import open_session
    from megavm.loadgen.run import Load, run, wait_ready

    _allow_many_connections()
    count = _count(arguments)
    progress = Progress(arguments.quiet)
    try:
        async with open_session() as session:
            progress("waiting for the server")
            target = await wait_ready(session, target, next(prompts), arguments.ready_timeout)
            if arguments.warmup:
                progress("warming up")
                at_once = min(load.max_concurrency or _WARMUP_CONCURRENCY, _WARMUP_CONCURRENCY)
                warmup = itertools.islice(prompts, arguments.warmup)
                warmed = await run(session, target, warmup, Load(max_concurrency=at_once))
                if warmed.interrupted:
                    raise KeyboardInterrupt
            measured = prompts if count is None else list(itertools.islice(prompts, count))
            result = await run(
                session,
                target,
                measured,
                load,
                lambda done, sent: progress("running", done, count or sent),
            )
    finally:
        progress.clear()
    return target, result


def _target(arguments: argparse.Namespace) -> Target:
    from megavm.loadgen.client import Target

    base_url = arguments.base_url.rstrip("/").removesuffix("/v1")
    if re.match(r"https?://[^/\s]", base_url) is None:
        raise UsageError(
            f"--base-url {arguments.base_url!r} is not an address such as http://127.0.0.1:8000"
        )
    return Target(
        base_url,
        arguments.model or "",
        endpoint=arguments.endpoint,
        api_key=arguments.api_key,
        ignore_eos=arguments.ignore_eos,
        extra_body=_object(arguments.extra_body),
        timeout=arguments.timeout,
    )


def _object(text: str | None) -> dict[str, Any]:
    """The fields of --extra-body."""
    import json

    value = None
    with suppress(ValueError):
        value = {} if text is None else json.loads(text)
    if not isinstance(value, dict):
        raise UsageError(f"--extra-body {text!r} is not a JSON object")
    return value


def _load(arguments: argparse.Namespace) -> Load:
    from megavm.loadgen.run import Load

    concurrency = arguments.max_concurrency
    if arguments.request_rate is None and concurrency is None:
        concurrency = _MAX_CONCURRENCY
    rate = math.inf if arguments.request_rate is None else arguments.request_rate
    if rate == math.inf and concurrency is None and _count(arguments) is None:
        raise UsageError("--request-rate inf needs --num-prompts or --max-concurrency")
    return Load(rate, arguments.burstiness, concurrency, arguments.duration, arguments.seed)


def _count(arguments: argparse.Namespace) -> int | None:
    """Number of prompts to send; None means until the duration is over."""
    count: int | None = arguments.num_prompts
    return _NUM_PROMPTS if count is None and arguments.duration is None else count


def _prompts(arguments: argparse.Namespace) -> Iterator[Prompt]:
    from megavm.loadgen.workload import Lengths, random_prompts, sharegpt_prompts

    chat = arguments.endpoint == "chat"
    if arguments.warmup < 0:
        raise UsageError(f"--warmup is {arguments.warmup}, and must not be negative")
    if arguments.sharegpt is not None:
        if arguments.input_len is not None or arguments.prompts is not None:
            raise UsageError("--sharegpt has the prompts: give no --input-len and no --prompts")
        return sharegpt_prompts(
            arguments.sharegpt,
            output_lengths=arguments.output_len,
            longest=arguments.max_total_len,
            seed=arguments.seed,
        )
    kind = arguments.prompts or ("text" if chat else "tokens")
    if chat and kind == "tokens":
        raise UsageError("--endpoint chat takes no token ids: give --prompts text")
    return random_prompts(
        arguments.input_len or Lengths.parse("128"),
        arguments.output_len or Lengths.parse("128"),
        text=kind == "text",
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
    )


def _allow_many_connections() -> None:
    """Raise the limit of open files to the hard limit: every connection is an open file."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _positive(text: str) -> float:
    """An option's number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _rate(text: str) -> float:
    """An option's rate: a number above 0, or inf."""
    return math.inf if text == "inf" else _positive(text)


def _lengths(text: str) -> Any:
    """An option's `megavm.loadgen.workload.Lengths`."""
    from megavm.loadgen.workload import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
