"""`megavm profile`: run a model and record what every instruction of every step did when."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

from megavm.commands.model import load, with_model_defaults
from megavm.commands.options import UsageError, given_sampling
from megavm.commands.terminal import Progress, print_json

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.sampling_params import SamplingParams

PROMPT: Final = "Once upon a time"


def run(arguments: argparse.Namespace) -> int:
    """Record, write the trace, say what tracing cost, and return the exit code."""
    given = given_sampling(arguments)
    if sum(x is not None for x in (arguments.prompt, arguments.prompt_ids, arguments.context)) > 1:
        raise UsageError("give one of PROMPT, --prompt-ids and --context")
    from megavm.profiler.trace import SUFFIX

    path = arguments.output or os.path.basename(os.path.normpath(arguments.model)) + SUFFIX
    # A trace of a prompt that is in the cache would have no prefill.
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
    print(
        f"{path}: {facts['steps']:,} steps, {facts['records']:,} records, "
        f"{facts['file_bytes'] / 1e6:.1f} MB"
    )
    if facts["ratio"] is not None:
        print(
            f"a token took {facts['traced_ms']:.3f} ms with tracing and "
            f"{facts['untraced_ms']:.3f} ms without: {facts['ratio']:.3f} times as long"
        )
    return 0


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
    """Run without and with tracing, each once before it counts, and write the trace."""
    from megavm.profiler.environment import measure_bandwidth
    from megavm.profiler.recorder import Recorder

    recorder, discarded = Recorder(keep), Recorder(1)
    progress("measuring the memory")
    device = llm.runner.machine.memory_device
    recorder.machine["bandwidth"] = measure_bandwidth(device)
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
        **recorder.notes,
    }


def _milliseconds(llm: LLM, prompt: str | list[int], params: SamplingParams) -> float | None:
    """Time of one token after the first; None when there was none."""
    output = llm.generate(prompt, params)[0]
    if output.error is not None:
        raise ValueError(output.error)
    rate = output.timings["output_tokens_per_second"]
    return 1e3 / rate if rate else None
