"""`megavm trace`: reports, comparisons, other formats and the viewer of recorded traces."""

from __future__ import annotations

import argparse
import os

from megavm.commands.options import UsageError
from megavm.commands.terminal import print_json


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says and return the exit code."""
    commands = {
        "report": _report,
        "diff": _diff,
        "export": _export,
        "view": _view,
        "html": _html,
    }
    commands[arguments.action](arguments)
    return 0


def _report(arguments: argparse.Namespace) -> None:
    from megavm.profiler.report import format_report, report
    from megavm.profiler.trace import Trace

    facts = report(Trace.load(arguments.file), arguments.step)
    print_json(facts) if arguments.json else print(format_report(facts))


def _diff(arguments: argparse.Namespace) -> None:
    from megavm.profiler.diff import diff, format_diff
    from megavm.profiler.trace import Trace

    facts = diff(Trace.load(arguments.file), Trace.load(arguments.other))
    print_json(facts) if arguments.json else print(format_diff(facts))


def _export(arguments: argparse.Namespace) -> None:
    from megavm.profiler.trace import Trace

    output = _output(arguments, arguments.file)
    trace = Trace.load(arguments.file)
    if arguments.format == "perfetto":
        from megavm.profiler.perfetto import save_perfetto

        save_perfetto(trace, output)
    else:
        from megavm.profiler.chrome import save_chrome

        save_chrome(trace, output)


def _view(arguments: argparse.Namespace) -> None:
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


def _html(arguments: argparse.Namespace) -> None:
    inputs = _inputs(arguments)
    output = _output(arguments, *inputs)
    from megavm.profiler.trace_file import check_format
    from megavm.profiler.viewer import save_html

    for path in inputs:
        check_format(path)
    save_html(arguments.file, output, compare=arguments.other)


def _inputs(arguments: argparse.Namespace) -> list[str]:
    return [path for path in (arguments.file, arguments.other) if path is not None]


def _output(arguments: argparse.Namespace, *inputs: str) -> str:
    """Where to write, which is none of the files that are read."""
    if arguments.output is None:
        raise UsageError("say where to write: -o FILE")
    path: str = arguments.output
    for read in inputs:
        if os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read):
            raise UsageError(f"-o {path} would overwrite the trace {read}")
    return path
