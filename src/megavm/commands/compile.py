"""`megavm compile`: compile a model's GPU kernels ahead of their first use."""

from __future__ import annotations

import argparse
from typing import Any, Final

from megavm.commands.options import Parser, add_machine, add_model
from megavm.commands.terminal import Progress, print_json

_EXAMPLES: Final = """\
examples:
  megavm compile path/to/model              for the GPU of this machine
  megavm compile path/to/model --arch sm_90a

Needs the model's config.json and no weights. Kernels are kept in $MEGAVM_CACHE_DIR, else in
$XDG_CACHE_HOME/megavm, else in ~/.cache/megavm.
"""


def declare(megavm: Parser) -> None:
    """Declare `megavm compile`."""
    summary = "compile a model's GPU kernels ahead of their first use"
    compile_ = megavm.command("compile", "[MODEL]", summary, run, _EXAMPLES)
    add_model(compile_)
    target = compile_.add_argument_group("target and output")
    compile_.option(
        target, "--arch", choices=("sm_90a",), help="compile for this GPU, which need not be there"
    )
    compile_.option(target, "--json", action="store_true", help="print one JSON object")
    add_machine(compile_, "dtype", "workers", "tensor_parallel_size", "fixed_order", "quiet")


def run(arguments: argparse.Namespace) -> int:
    """Compile the kernels, print a summary and return the exit code."""
    from megavm.scheduler.llama.checkpoint import Checkpoint
    from megavm.scheduler.llama.hub import resolve
    from megavm.scheduler.llama.parallel import Parallel
    from megavm.scheduler.run.buckets import choose_dtype
    from megavm.scheduler.run.kernels import compile_kernels
    from megavm.vm.cuda import compiler as cuda_compiler

    architecture, workers = _target(arguments.arch, arguments.workers)
    missing = cuda_compiler.reason_unavailable()
    if missing is not None:
        raise ValueError(f"kernels cannot be compiled here: {missing}")
    progress = Progress(arguments.quiet)
    progress(f"compiling {arguments.model}")
    parallel = Parallel(arguments.tensor_parallel_size or 1)
    try:
        config = Checkpoint.open(resolve(arguments.model)).config
        parallel.check(config)
        facts = [
            {"sampled": sampled, **_facts(kernel.rows, kernel.kernel)}
            for sampled in (False, True)
            for kernel in compile_kernels(
                config,
                choose_dtype(config, arguments.dtype),
                architecture=architecture,
                workers=workers,
                sampled=sampled,
                parallel=parallel,
                fixed_order=bool(arguments.fixed_order),
                report=progress,
            )
        ]
    finally:
        progress.clear()
    if arguments.json:
        print_json({"model": arguments.model, "architecture": architecture, "kernels": facts})
        return 0
    for fact in facts:
        spills = fact["spill_stores"] + fact["spill_loads"]
        print(
            f"steps of {_span(fact['rows'])}"
            + (" with sampling: " if fact["sampled"] else ": ")
            + ("cached" if fact["cached"] else f"compiled in {fact['seconds']:.1f} s")
            + f", {fact['registers']} registers, "
            + (f"{spills} bytes of spills" if spills else "no spills")
            + f", {fact['path'] or 'not cached'}"
        )
    return 0


def _target(architecture: str | None, workers: int | None) -> tuple[str, int]:
    """Architecture and workers to compile for: those given, else those of this machine's GPU.

    Raises ValueError when no GPU is usable and no architecture is given.
    """
    from megavm.vm.cuda import machine as cuda_machine
    from megavm.vm.target import TARGETS

    reason = cuda_machine.reason_unavailable()
    if reason is None:
        import torch

        workers = workers or torch.cuda.get_device_properties(0).multi_processor_count
    elif architecture is None:
        raise ValueError(f"there is no GPU to compile for ({reason}): give --arch sm_90a")
    return architecture or TARGETS["cuda"].architecture, workers or TARGETS["cuda"].workers


def _facts(rows: tuple[int, ...], kernel: Any) -> dict[str, Any]:
    names = ("registers", "spill_stores", "spill_loads", "stack", "seconds", "cached")
    return {
        "rows": list(rows),
        **{name: getattr(kernel, name) for name in names},
        "path": None if kernel.path is None else str(kernel.path),
    }


def _span(rows: list[int]) -> str:
    if len(rows) == 1:
        return f"{rows[0]} row{'s' if rows[0] > 1 else ''}"
    return f"{min(rows)} to {max(rows)} rows"
