"""Options of `megavm profile` and of the commands of `megavm trace`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from megavm.commands.options import (
    ENGINE_OPTIONS,
    Parser,
    add_machine,
    add_sampling,
    integer,
    length,
    token_ids,
)

PROFILE_EXAMPLES: Final = """\
examples:
  megavm profile stories -o run.megatrace
  megavm profile path/to/model "Once upon a time" --max-tokens 200 --keep 50 -o run.megatrace
  megavm profile path/to/model --context 1000 --max-tokens 64 --temperature 0 -o run.megatrace

Then: megavm trace report run.megatrace, megavm trace view run.megatrace
"""

_EXAMPLES: Final = """\
examples:
  megavm trace report run.megatrace         where the time went
  megavm trace report run.megatrace --step 12 --json
  megavm trace diff before.megatrace after.megatrace
  megavm trace view run.megatrace           the timeline, in a browser
  megavm trace view before.megatrace after.megatrace
  megavm trace html run.megatrace -o run.html
  megavm trace export run.megatrace --format perfetto -o run.pftrace

Options of a command: megavm trace COMMAND --help
"""

Declare = Callable[[str, str, str, str | None], Parser]


def declare_profile(profile: Parser) -> None:
    """The options of `megavm profile`."""
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


def declare_trace(trace: Parser) -> dict[str, Parser]:
    """The commands of `megavm trace`, by their whole names ("trace report")."""
    trace.epilog = _EXAMPLES
    actions = trace.add_subparsers(
        dest="action",
        metavar="COMMAND",
        title="commands",
        parser_class=Parser,
        prog="megavm trace",
    )
    parsers: dict[str, Parser] = {}

    def action(name: str, operands: str, summary: str) -> Parser:
        parsers[f"trace {name}"] = parser = actions.add_parser(
            name,
            usage=f"megavm trace {name} {operands} [OPTION ...]",
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
        )
        return parser

    report = action("report", "FILE", "tables of where the time went")
    report.add_argument("file", metavar="FILE", help="a trace")
    report.option(report, "--step", metavar="N", type=integer, help="one step only, by its number")
    report.option(report, "--json", action="store_true", help="print one JSON object")

    diff = action("diff", "A B", "compare two traces, by label and by kind of instruction")
    diff.add_argument("file", metavar="A", help="a trace")
    diff.add_argument("other", metavar="B", help="another trace")
    diff.option(diff, "--json", action="store_true", help="print one JSON object")

    export = action("export", "FILE --format FORMAT -o OUT", "write a trace for another viewer")
    export.add_argument("file", metavar="FILE", help="a trace")
    export.option(
        export,
        "--format",
        choices=("perfetto", "chrome"),
        default="perfetto",
        help="perfetto: its protobuf format; chrome: trace events as JSON (perfetto)",
    )
    export.option(export, "-o", "--output", metavar="OUT", help="the file to write")

    view = action("view", "A [B]", "show a trace in a browser, or two below each other")
    view.add_argument("file", metavar="A", help="a trace")
    view.add_argument("other", metavar="B", nargs="?", help="another trace to compare with")
    view.option(view, "--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    view.option(view, "--port", metavar="N", type=integer, default=0, help="port (a free one)")
    view.option(view, "--no-open", action="store_true", help="open no browser")

    html = action(
        "html", "A [B] -o PAGE", "save a trace, or two, as a page that needs nothing else"
    )
    html.add_argument("file", metavar="A", help="a trace")
    html.add_argument("other", metavar="B", nargs="?", help="another trace to compare with")
    html.option(html, "-o", "--output", metavar="PAGE", help="the file to write")
    return parsers
