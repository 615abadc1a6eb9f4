"""`megavm bench`: what a server achieves under load."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megavm.commands.options import UsageError
from megavm.commands.terminal import EXIT_ERROR, EXIT_INTERRUPTED, Progress, print_error

if TYPE_CHECKING:
    from megavm.loadgen.client import Target
    from megavm.loadgen.run import Load, Result
    from megavm.loadgen.workload import Prompt

_NUM_PROMPTS: Final = 100
_MAX_CONCURRENCY: Final = 16
_WARMUP_CONCURRENCY: Final = 8


def run(arguments: argparse.Namespace) -> int:
    """Put load on the server, print the report and return the exit code."""
    try:
        import aiohttp  # noqa: F401 (the one package beyond megavm's own)
    except ModuleNotFoundError as error:
        raise UsageError(
            "megavm bench needs the package aiohttp: pip install 'megavm[bench]'"
        ) from error
    from megavm.loadgen.report import format_table, parse_goodput, summarise, warnings

    limits = arguments.goodput or []
    goodput = parse_goodput(limits.split() if isinstance(limits, str) else limits)
    target, load, prompts = _target(arguments), _load(arguments), _prompts(arguments)
    if arguments.json is not None and not Path(arguments.json).absolute().parent.is_dir():
        raise UsageError(f"--json {arguments.json!r} is in a directory that does not exist")
    target, result = asyncio.run(_bench(arguments, target, load, prompts))
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


async def _bench(
    arguments: argparse.Namespace, target: Target, load: Load, prompts: Iterator[Prompt]
) -> tuple[Target, Result]:
    """Wait for the server, warm it up and load it; the target with its model filled in."""
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
    """How many prompts are sent; None: until the time is over."""
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
    """Raise the limit of open files to what this user may have: a connection is one."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
