"""`megavm trace`: reports, comparisons, other formats and the viewer of recorded traces."""

from __future__ import annotations

import argparse

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

    output = _output(arguments)
    trace = Trace.load(arguments.file)
    if arguments.format == "perfetto":
        from megavm.profiler.perfetto import save_perfetto

        save_perfetto(trace, output)
    else:
        from megavm.profiler.chrome import save_chrome

        save_chrome(trace, output)


def _view(arguments: argparse.Namespace) -> None:
    from megavm.profiler.viewer import serve

    serve(
        arguments.file,
        arguments.host,
        arguments.port,
        not arguments.no_open,
        compare=arguments.other,
    )


def _html(arguments: argparse.Namespace) -> None:
    output = _output(arguments)
    from megavm.profiler.viewer import save_html

    save_html(arguments.file, output, compare=arguments.other)


def _output(arguments: argparse.Namespace) -> str:
    if arguments.output is None:
        raise UsageError("say where to write: -o FILE")
    path: str = arguments.output
    return path
