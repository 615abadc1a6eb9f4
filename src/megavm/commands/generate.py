"""`megavm generate`: continue one text; print text, a stream of text or a JSON object."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from megavm.commands.model import load, with_model_defaults
from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    UsageError,
    add_machine,
    add_sampling,
    given_sampling,
    integer,
    token_ids,
)
from megavm.commands.terminal import (
    EXIT_ERROR,
    STREAM_FAILED,
    Progress,
    Statistics,
    join_ids,
    print_error,
    print_json,
    write,
)

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.outputs import CompletionOutput, RequestOutput
    from megavm.sampling_params import SamplingParams

_EXAMPLES: Final = """\
examples:
  megavm generate stories "Once upon a time" --echo
  megavm generate stories "The little fox" --temperature 0.7 --seed 1 --stream
  echo "One day" | megavm generate stories - --json
  megavm generate path/to/model --prompt-ids 1,15043,29892 --temperature 0 --json
"""


def declare(megavm: Parser) -> None:
    """Declare `megavm generate`."""
    generate = megavm.command("generate", "MODEL [PROMPT]", "continue a text", run, _EXAMPLES)
    generate.add_argument("model", metavar="MODEL", help="directory, shipped name or hub id")
    generate.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the text to continue; - reads it from stdin"
    )
    output = generate.add_argument_group("input and output")
    generate.option(
        output,
        "--prompt-ids",
        metavar="IDS",
        type=token_ids,
        help="the prompt as token ids, such as 1,2,3",
    )
    generate.option(output, "-n", metavar="N", type=integer, default=1, help="completions (1)")
    generate.option(
        output, "--echo", action="store_true", help="print the prompt before its continuation"
    )
    generate.option(output, "--stream", action="store_true", help="print tokens as they come")
    generate.option(
        output,
        "--json",
        action="store_true",
        help="print one JSON object with text, token_ids, finish_reason and timings",
    )
    generate.option(
        output,
        "--logprobs",
        metavar="K",
        type=integer,
        help="with --json: log probabilities of each token and its K likeliest alternatives",
    )
    add_sampling(generate, max_tokens=128)
    add_machine(generate, *ENGINE_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Continue the prompt and return the exit code."""
    if arguments.json and arguments.stream:
        raise UsageError("--json prints one object at the end: give either --json or --stream")
    if arguments.json and arguments.echo:
        raise UsageError("--json has the prompt already: give either --json or --echo")
    if arguments.logprobs is not None and not arguments.json:
        raise UsageError("--logprobs is part of the JSON output: add --json")
    given = given_sampling(arguments)
    prompt = _read_prompt(arguments)
    started = time.perf_counter()
    llm = load(arguments)
    load_seconds = time.perf_counter() - started
    params = with_model_defaults(llm, given)
    if arguments.stream:
        return _generate_stream(arguments, llm, prompt, params)
    progress = Progress(arguments.quiet)
    progress("generating")
    try:
        output = llm.generate(prompt, params)[0]
    finally:
        progress.clear()
    if arguments.json:
        print_json(_output_as_json(arguments.model, output, load_seconds))
        return _report_failure(output.error)
    for completion in output.outputs:
        if params.n > 1:
            print(f"--- completion {completion.index + 1} of {params.n} ---")
        text = completion.text if llm.tokenizer.available else join_ids(completion.token_ids)
        print(_echoed(arguments, llm, prompt) + text)
    return _report_failure(output.error)


def _read_prompt(arguments: argparse.Namespace) -> str | list[int]:
    """The prompt from the argument, from --prompt-ids or from stdin."""
    if arguments.prompt_ids is not None:
        if arguments.prompt is not None:
            raise UsageError("give either PROMPT or --prompt-ids, not both")
        ids: list[int] = arguments.prompt_ids
        return ids
    prompt: str | None = arguments.prompt
    if prompt is None or (prompt == "-" and sys.stdin is None):
        raise UsageError("give a PROMPT, - to read it from stdin, or --prompt-ids")
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompt on stdin is not valid UTF-8: {error}") from error
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise UsageError("the prompt is empty")
    return prompt


def _generate_stream(
    arguments: argparse.Namespace, llm: LLM, prompt: str | list[int], params: SamplingParams
) -> int:
    """Stream the first completion to stdout, then print the others."""
    later: dict[int, list[str]] = {index: [] for index in range(1, params.n)}
    failure: str | None = None
    statistics = Statistics()
    echo = _echoed(arguments, llm, prompt)
    if params.n > 1:
        print(f"--- completion 1 of {params.n} ---")
    write(echo)
    for chunk in statistics.watch(llm.stream(prompt, params)):
        text = chunk.text
        if not llm.tokenizer.available and chunk.token_id is not None:
            text = f"{chunk.token_id} "
        if chunk.index == 0:
            write(text)
        else:
            later[chunk.index].append(text)
        if chunk.finish_reason == "error":
            failure = STREAM_FAILED
    print()
    for index, pieces in later.items():
        print(f"--- completion {index + 1} of {params.n} ---")
        print(echo + "".join(pieces))
    if Progress(arguments.quiet).enabled:
        print(statistics, file=sys.stderr)
    return _report_failure(failure)


def _report_failure(sentence: str | None) -> int:
    """Print the error of a generation, if any, and return the exit code."""
    if sentence is None:
        return 0
    sys.stdout.flush()
    print_error(ValueError(sentence))
    return EXIT_ERROR


def _echoed(arguments: argparse.Namespace, llm: LLM, prompt: str | list[int]) -> str:
    if not arguments.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return llm.tokenizer.decode(prompt) if llm.tokenizer.available else join_ids(prompt) + " "


def _output_as_json(model: str, output: RequestOutput, load_seconds: float) -> dict[str, Any]:
    """The JSON object of one request; with several completions, `outputs` has all of them."""

    def completion_as_json(completion: CompletionOutput) -> dict[str, Any]:
        result: dict[str, Any] = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            result["logprobs"] = completion.logprobs
        if completion.error is not None:
            result["error"] = completion.error
        return result

    result: dict[str, Any] = {
        "model": model,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **completion_as_json(output.outputs[0]),
        "timings": {"load_seconds": load_seconds, **output.timings},
    }
    if len(output.outputs) > 1:
        result["outputs"] = [
            {"index": completion.index, **completion_as_json(completion)}
            for completion in output.outputs
        ]
    return result
