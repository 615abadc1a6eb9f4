"""`megavm program`: statistics and disassembly of the program that a model compiles to."""

from __future__ import annotations

import argparse
from typing import Final

from megavm.commands.options import Parser, add_machine, add_model, length
from megavm.commands.terminal import Progress

_EXAMPLES: Final = """\
examples:
  megavm program stories --verify
  megavm program stories --rows 1 --context 2K --disassemble | head
  megavm program path/to/model --machine cuda --sequences 8 --context 4K --sampled
  megavm program path/to/model --rows 128 --sequences 4 --save prefill.program
"""


def declare(megavm: Parser) -> None:
    """Declare `megavm program`."""
    summary = "show the program that a model is compiled to"
    program = megavm.command("program", "[MODEL]", summary, run, _EXAMPLES)
    add_model(program)
    shape = program.add_argument_group("the step to compile")
    program.option(
        shape, "--rows", metavar="N", type=length, help="tokens in the step (one per sequence)"
    )
    program.option(shape, "--sequences", metavar="N", type=length, help="sequences in the step (1)")
    program.option(
        shape, "--context", metavar="N", type=length, help="longest context of a sequence (1024)"
    )
    program.option(
        shape,
        "--sampled",
        action="store_true",
        help="with sampling; else tokens are chosen greedily",
    )
    how = program.add_argument_group("how it is compiled")
    program.option(
        how,
        "--assignment",
        choices=("balanced", "round_robin", "dynamic"),
        default="balanced",
        help="how instructions get to workers: by bytes, in turn, or from one shared queue",
    )
    program.option(
        how,
        "--exchange",
        choices=("barrier", "preferred", "tagged"),
        help="how workers wait for each other's small results: by counters, by the data, or by "
        "what is faster for the instructions that read them (as the machine runs it)",
    )
    result = program.add_argument_group("output")
    program.option(
        result, "--disassemble", action="store_true", help="print every instruction of every queue"
    )
    program.option(
        result, "--verify", action="store_true", help="prove that it has no race and no deadlock"
    )
    program.option(result, "--save", metavar="FILE", help="write the program to FILE")
    add_machine(
        program, "machine", "dtype", "workers", "tensor_parallel_size", "fixed_order", "quiet"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile, print the requested output and return the exit code."""
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
            sampled=arguments.sampled,
            workers=arguments.workers,
            tensor_parallel_size=arguments.tensor_parallel_size or 1,
            fixed_order=bool(arguments.fixed_order),
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
