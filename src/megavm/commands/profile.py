"""`megavm profile`: run a model and record a trace of every instruction of every step."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from megavm.commands.model import load, with_model_defaults
from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    UsageError,
    add_machine,
    add_sampling,
    given_sampling,
    length,
    token_ids,
)
from megavm.commands.terminal import Progress, print_json

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.sampling_params import SamplingParams

_EXAMPLES: Final = """\
examples:
  megavm profile stories -o run.megatrace
  megavm profile path/to/model "Once upon a time" --max-tokens 200 --keep 50 -o run.megatrace
  megavm profile path/to/model --context 1000 --max-tokens 64 --temperature 0 -o run.megatrace

Then: megavm trace report run.megatrace, megavm trace view run.megatrace
"""

PROMPT: Final = "Once upon a time"


def declare(megavm: Parser) -> None:
    """Declare `megavm profile`."""
    summary = "record what every instruction does when, while a model runs"
    profile = megavm.command("profile", "MODEL [PROMPT]", summary, run, _EXAMPLES)
    profile.add_argument("model", metavar="MODEL", help="directory, shipped name or hub id")
    profile.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue")
    what = profile.add_argument_group("what is run and kept")
    profile.option(
        what,
        "--prompt-ids",
        metavar="IDS",
        type=token_ids,
        help="the prompt as token ids, such as 1,2,3",
    )
    profile.option(
        what, "--context", metavar="N", type=length, help="a prompt of N tokens, whatever they say"
    )
    profile.option(
        what, "--keep", metavar="N", type=length, help="keep the last N steps only (all of them)"
    )
    profile.option(
        what, "-o", "--output", metavar="FILE", help="where the trace goes (MODEL.megatrace)"
    )
    profile.option(what, "--json", action="store_true", help="print one JSON object")
    add_sampling(profile, max_tokens=64)
    add_machine(profile, *ENGINE_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Record and write a trace, print the cost of tracing, and return the exit code."""
    given = given_sampling(arguments)
    if sum(x is not None for x in (arguments.prompt, arguments.prompt_ids, arguments.context)) > 1:
        raise UsageError("give one of PROMPT, --prompt-ids and --context")
    from megavm.profiler.trace import SUFFIX

    path = arguments.output or os.path.basename(os.path.normpath(arguments.model)) + SUFFIX
    # With the prefix cache the trace would have no prefill: the prompt runs several times.
    llm = load(arguments, prefix_caching=False)
    params = with_model_defaults(llm, {**given, "ignore_eos": True})
    progress = Progress(arguments.quiet)
    try:
        facts = _record(llm, _prompt(arguments, llm), params, arguments.keep, path, progress)
    finally:
        progress.clear()
    if arguments.json:
        print_json(facts)
        return 0
    from megavm.profiler.tables import counted

    print(
        f"{path}: {counted(facts['steps'], 'step')}, {counted(facts['records'], 'record')}, "
        f"{facts['file_bytes'] / 1e6:.1f} MB"
    )
    if facts["ratio"] is not None:
        print(
            f"a token took {facts['traced_ms']:.3f} ms with tracing and "
            f"{facts['untraced_ms']:.3f} ms without: {_cost(facts['ratio'])}"
        )
    print(facts["sentence"])
    return 0


def _cost(ratio: float) -> str:
    """What tracing cost, in words. Tracing makes nothing faster."""
    if ratio < 1:
        return "its cost is within the noise of this machine"
    return f"{ratio:.3f} times as long"


def _prompt(arguments: argparse.Namespace, llm: LLM) -> str | list[int]:
    if arguments.prompt_ids is not None:
        ids: list[int] = arguments.prompt_ids
        return ids
    vocabulary = llm.checkpoint.config.vocab_size
    if arguments.context is not None:
        return [i * 7919 % vocabulary for i in range(arguments.context)]
    text: str | None = arguments.prompt
    if text is None and not llm.tokenizer.available:
        return [i % vocabulary for i in range(8)]
    return PROMPT if text is None else text


def _record(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams,
    keep: int | None,
    path: str,
    progress: Progress,
) -> dict[str, Any]:
    """Run with and without tracing, each after a warm-up run, and write the trace."""
    from megavm.profiler.environment import measure_ceilings
    from megavm.profiler.recorder import Recorder
    from megavm.profiler.summary import summary

    recorder, discarded = Recorder(keep), Recorder(1)
    progress("running with tracing")
    llm.record(discarded)
    llm.generate(prompt, params)
    llm.record(None)
    discarded.drain()
    progress("running without tracing")
    llm.generate(prompt, params)
    untraced = _milliseconds(llm, prompt, params)
    progress("recording")
    llm.record(recorder)
    traced = _milliseconds(llm, prompt, params)
    llm.record(None)
    progress("running without tracing")
    again = _milliseconds(llm, prompt, params)
    progress("measuring the machine")
    # Not before the steps: the multiplications lower a GPU's clock for a while.
    recorder.machine |= measure_ceilings(llm.runner.machine)
    ratio = None
    if traced is not None and untraced is not None and again is not None:
        untraced = (untraced + again) / 2
        ratio = traced / untraced
    recorder.notes |= {"traced_ms": traced, "untraced_ms": untraced, "ratio": ratio}
    progress("writing the trace")
    trace = recorder.trace()
    trace.save(path)
    return {
        "file": path,
        "file_bytes": os.path.getsize(path),
        "steps": trace.num_steps,
        "records": trace.num_records,
        "sentence": summary(trace)["sentence"],
        **recorder.notes,
    }


def _milliseconds(llm: LLM, prompt: str | list[int], params: SamplingParams) -> float | None:
    """Time per token after the first, in ms; None without a second token."""
    output = llm.generate(prompt, params)[0]
    if output.error is not None:
        raise ValueError(output.error)
    rate = output.timings["output_tokens_per_second"]
    return 1e3 / rate if rate else None
