"""`megavm doctor`: print what `megavm.doctor` finds."""

from __future__ import annotations

import argparse

from megavm import doctor
from megavm.commands.terminal import print_json


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    report = doctor.examine()
    if arguments.json:
        print_json(report)
    else:
        print(doctor.format_report(report))
    return 0
