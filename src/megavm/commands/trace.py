"""`megavm trace`: report, compare, export and view recorded traces."""

from __future__ import annotations

import argparse
import os
from typing import Final

from megavm.commands.options import Parser, UsageError, integer, percentage
from megavm.commands.terminal import print_json

_EXAMPLES: Final = """\
examples:
  megavm trace report run.megatrace         where the time went
  megavm trace report run.megatrace --step 12 --json
  megavm trace what-if run.megatrace        what a step would take if one thing were different
  megavm trace what-if run.megatrace computing:gate_up=0.5 latency=0
  megavm trace diff before.megatrace after.megatrace
  megavm trace diff before.megatrace after.megatrace --fail-above 3%
  megavm trace view run.megatrace           the timeline, in a browser
  megavm trace view before.megatrace after.megatrace
  megavm trace html run.megatrace -o run.html
  megavm trace export run.megatrace --format perfetto -o run.pftrace

Options of a command: megavm trace COMMAND --help
"""


_CHANGES: Final = """\
changes: FACTOR times the recorded time; 0 takes no time, 0.5 half of it
  computing=0.5            of all phases: what workers compute
  computing:gate_up=0.5    of one phase
  storing:gate_up=0.5      of computing, what comes after the sums: storing the results
  loading=0.5              loads in half the time: twice the bandwidth; or of one phase
  bytes:gate_up=0.5        half the bytes to load, such as weights of 8 bits instead of 16
  latency=0                of all exchanges: from a result to those who wait for it
  latency:"o_proj words"=0 of one exchange, by words or by barrier
  wait:"o_proj words"=0    the exchange left out: nobody waits for it
  wait:"attention loads"=0 loads that wait for barriers go ahead of them, if the step has such
  worker:40=0.5            all that one worker computes and loads
  balance:gate_up=0        every worker has the mean share; balance=0 of all phases
  switching=0              from one instruction to the next
  ring=0.5                 loaders can be half as many pages ahead of the consumers
Several changes are made at once. docs/profiling.md says what the prediction knows and does not.
"""


def declare(megavm: Parser) -> None:
    """Declare the commands of `megavm trace`."""
    trace = megavm.command("trace", "COMMAND", "look at a recorded trace", examples=_EXAMPLES)

    report = trace.command("report", "FILE", "tables of where the time went", _report)
    report.add_argument("file", metavar="FILE", help="a trace")
    report.option(report, "--step", metavar="N", type=integer, help="one step only, by its number")
    report.option(report, "--json", action="store_true", help="print one JSON object")

    what_if = trace.command(
        "what-if", "FILE [CHANGE ...]", "what a step would take with something changed", _what_if,
        _CHANGES,
    )  # fmt: skip
    what_if.add_argument("file", metavar="FILE", help="a trace")
    what_if.add_argument(
        "changes",
        metavar="CHANGE",
        nargs="*",
        help="WHAT=FACTOR or WHAT:OF=FACTOR; without one, every single change is tried",
    )
    what_if.option(what_if, "--step", metavar="N", type=integer, help="the step (a median one)")
    what_if.option(what_if, "--json", action="store_true", help="print one JSON object")

    diff = trace.command(
        "diff", "A B", "compare two traces, by label and by kind of instruction", _diff
    )
    diff.add_argument("file", metavar="A", help="a trace")
    diff.add_argument("other", metavar="B", help="another trace")
    diff.option(diff, "--json", action="store_true", help="print one JSON object")
    diff.option(
        diff,
        "--fail-above",
        metavar="PERCENT",
        type=percentage,
        help="exit with 1 if B is slower than A by more than this, such as 3%%, beyond the noise",
    )

    export = trace.command(
        "export", "FILE --format FORMAT -o OUT", "write a trace for another viewer", _export
    )
    export.add_argument("file", metavar="FILE", help="a trace")
    export.option(
        export,
        "--format",
        choices=("perfetto", "chrome"),
        default="perfetto",
        help="perfetto: its protobuf format; chrome: trace events as JSON (perfetto)",
    )
    export.option(export, "-o", "--output", metavar="OUT", help="the file to write")

    view = trace.command(
        "view", "A [B]", "show a trace in a browser, or two below each other", _view
    )
    view.add_argument("file", metavar="A", help="a trace")
    view.add_argument("other", metavar="B", nargs="?", help="another trace to compare with")
    view.option(view, "--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    view.option(view, "--port", metavar="N", type=integer, default=0, help="port (a free one)")
    view.option(view, "--no-open", action="store_true", help="open no browser")

    html = trace.command(
        "html", "A [B] -o PAGE", "save a trace, or two, as a page that needs nothing else", _html
    )
    html.add_argument("file", metavar="A", help="a trace")
    html.add_argument("other", metavar="B", nargs="?", help="another trace to compare with")
    html.option(html, "-o", "--output", metavar="PAGE", help="the file to write")


def _report(arguments: argparse.Namespace) -> int:
    from megavm.profiler.report import format_report, report
    from megavm.profiler.trace import Trace

    facts = report(Trace.load(arguments.file), arguments.step)
    print_json(facts) if arguments.json else print(format_report(facts))
    return 0


def _what_if(arguments: argparse.Namespace) -> int:
    from megavm.profiler.analysis import Selection, common_steps, median_step
    from megavm.profiler.tables import as_text
    from megavm.profiler.trace import Trace
    from megavm.profiler.what_if import (
        format_prediction,
        format_what_if,
        parse_change,
        predict,
        what_if,
    )

    changes = [parse_change(text) for text in arguments.changes]
    trace = Trace.load(arguments.file)
    step = median_step(trace, common_steps(Selection.of(trace, arguments.step)))
    facts = predict(trace, step, changes) if changes else what_if(trace, step)
    if arguments.json:
        print_json(facts)
    else:
        print(as_text(format_prediction(facts) if changes else format_what_if(facts)))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from megavm.profiler.diff import diff, format_diff, judge
    from megavm.profiler.trace import Trace

    facts = diff(Trace.load(arguments.file), Trace.load(arguments.other))
    failed = False
    if arguments.fail_above is not None:
        failed, sentence = judge(facts, arguments.fail_above)
        facts |= {"failed": failed, "judgement": sentence}
    print_json(facts) if arguments.json else print(format_diff(facts))
    if arguments.fail_above is not None and not arguments.json:
        print(f"\n{'FAILED' if failed else 'passed'}: {sentence}")
    return int(failed)


def _export(arguments: argparse.Namespace) -> int:
    from megavm.profiler.trace import Trace

    output = _output(arguments, arguments.file)
    trace = Trace.load(arguments.file)
    if arguments.format == "perfetto":
        from megavm.profiler.perfetto import save_perfetto

        save_perfetto(trace, output)
    else:
        from megavm.profiler.chrome import save_chrome

        save_chrome(trace, output)
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from megavm.profiler.trace_file import check_format
    from megavm.profiler.viewer import serve

    for path in _inputs(arguments):
        check_format(path)
    serve(
        arguments.file,
        arguments.host,
        arguments.port,
        not arguments.no_open,
        compare=arguments.other,
    )
    return 0


def _html(arguments: argparse.Namespace) -> int:
    inputs = _inputs(arguments)
    output = _output(arguments, *inputs)
    from megavm.profiler.trace_file import check_format
    from megavm.profiler.viewer import save_html

    for path in inputs:
        check_format(path)
    save_html(arguments.file, output, compare=arguments.other)
    return 0


def _inputs(arguments: argparse.Namespace) -> list[str]:
    return [path for path in (arguments.file, arguments.other) if path is not None]


def _output(arguments: argparse.Namespace, *inputs: str) -> str:
    """The output path. Raises UsageError if it is missing or is one of the inputs."""
    if arguments.output is None:
        raise UsageError("say where to write: -o FILE")
    path: str = arguments.output
    for read in inputs:
        if os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read):
            raise UsageError(f"-o {path} would overwrite the trace {read}")
    return path
