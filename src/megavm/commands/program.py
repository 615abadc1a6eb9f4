"""`megavm program`: the program that a model is compiled to, in numbers or word for word."""

from __future__ import annotations

import argparse

from megavm.commands.terminal import Progress


def run(arguments: argparse.Namespace) -> int:
    """Compile, print what was asked for and return the exit code."""
    from megavm.scheduler.run.inspect import describe_program

    progress = Progress(arguments.quiet)
    progress(f"compiling {arguments.model}")
    try:
        text = describe_program(
            arguments.model,
            machine=arguments.machine,
            dtype=arguments.dtype,
            rows=arguments.rows,
            sequences=arguments.sequences,
            context=arguments.context,
            workers=arguments.workers,
            assignment=arguments.assignment,
            exchange=arguments.exchange,
            disassemble=arguments.disassemble,
            verify=arguments.verify,
            save=arguments.save,
        )
    finally:
        progress.clear()
    print(text)
    return 0
