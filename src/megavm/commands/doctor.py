"""`megavm doctor`: print the report of `megavm.doctor`."""

from __future__ import annotations

import argparse

from megavm.commands.options import Parser
from megavm.commands.terminal import print_json


def declare(megavm: Parser) -> None:
    """Declare `megavm doctor`."""
    summary = "show what this machine has and what would run where"
    doctor = megavm.command("doctor", "", summary, run)
    doctor.option(doctor, "--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    from megavm import doctor

    report = doctor.examine()
    if arguments.json:
        print_json(report)
    else:
        print(doctor.format_report(report))
    return 0
