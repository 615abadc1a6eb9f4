"""Where a kernel's warps are, by parts of its source, and the code that a layer runs through.

    python benchmarks/code_cuda.py --model 1b --layers 6 --batch 128            # on a GPU, with ncu
    python benchmarks/code_cuda.py --model 1b --layers 6 --batch 128 --samples FILE.csv   # anywhere

`ncu` samples the program counters of all warps during one decode step (section SourceCounters), and
counts how often each instruction runs. The kernel is compiled once more, with line numbers, which
do not change its code, and nvdisasm says from which source files each instruction was inlined. It
belongs to the innermost of instructions/, or else of cuda/.

A part's *code* is its lines of 128 bytes (an instruction cache holds whole lines) that run at least
four times for each layer and worker. That is what the eight warps of consumers run through in each
layer, and loops. It is an estimate: what another warp runs once in a layer is left out, and loops
of the LM head are in it. *No instruction* is the share of its samples in which a warp waited for
that cache.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from llama_cuda import MODELS
from machine_code import MachineCode, disassemble
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, default_logit_rows
from megavm.scheduler.run.buckets import choose_bucket, compile_bucket
from megavm.vm.cuda.compiler import CompilerOptions, compile_kernel
from megavm.vm.specialisation import program_header
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16

LINE: Final = 128  # bytes of a line of the instruction cache
OFTEN: Final = 4  # times for each layer and worker
LAUNCHES: Final = 5  # the last one is measured
WORKERS: Final = TARGETS["cuda"].workers


class Sample(NamedTuple):
    """What ncu counted of an instruction: executions by warps, samples, and samples by reason."""

    text: str
    executed: int
    samples: int
    reasons: Mapping[str, int]


@dataclasses.dataclass
class Part:
    """Instructions of one source file. ``lines``: of the cache, that run often."""

    lines: set[int] = dataclasses.field(default_factory=set)
    samples: int = 0
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)


def read_samples(rows: Iterable[Sequence[str]]) -> dict[int, Sample]:
    """By offset in the kernel, from the rows of ncu's CSV file: a name, a head, instructions."""
    _, head, *data = rows
    column = {name: i for i, name in enumerate(head)}
    prefix = "stall_"
    reasons = {n.removeprefix(prefix): i for n, i in column.items() if n.startswith(prefix)}
    reasons = {name: i for name, i in reasons.items() if "(" not in name}  # (Not Issued)
    first = int(data[0][column["Address"]], 16)

    def number(row: Sequence[str], i: int) -> int:
        return int(row[i] or 0)

    return {
        int(row[column["Address"]], 16) - first: Sample(
            row[column["Source"]].strip(),
            number(row, column["Instructions Executed"]),
            number(row, column["# Samples"]),
            {name: n for name, i in reasons.items() if (n := number(row, i))},
        )
        for row in data
    }


def part_of(places: Sequence[tuple[str, int]]) -> str:
    """The part of an instruction that was inlined from these places."""
    names = [name for path, _ in places if (name := _within(path))]
    of_instruction = (name for name in names if name.startswith("instructions/"))
    return next(of_instruction, names[0] if names else "?")


def _within(path: str) -> str | None:
    """A path of the kernel's sources, from the folder of all sources on."""
    for folder in ("/instructions/", "/cuda/"):
        if folder in path:
            return folder[1:] + path.rpartition(folder)[2]
    return None


def parts(code: MachineCode, samples: Mapping[int, Sample], least: int) -> dict[str, Part]:
    """Samples and code by part. An instruction that ran ``least`` times counts as code.

    Raises ValueError when the samples are of another kernel.
    """
    found: dict[str, Part] = defaultdict(Part)
    for instruction in code.instructions:
        sample = samples.get(instruction.offset)
        if sample is None or _name(sample.text) != _name(instruction.text):
            raise ValueError(
                f"the samples are of another kernel: at {instruction.offset:#x} it has "
                f"{sample.text if sample else 'nothing'}, compiled here {instruction.text}"
            )
        part = found[part_of(instruction.places)]
        part.samples += sample.samples
        part.reasons.update(sample.reasons)
        if sample.executed >= least:
            part.lines.add(instruction.offset // LINE)
    return dict(found)


def _name(text: str) -> str:
    """The name of a machine instruction, without predicate and modifiers."""
    words = text.split()
    return words[1 if words[0].startswith("@") else 0].partition(".")[0]


def report(found: Mapping[str, Part]) -> str:
    """A table of the parts, those with most samples first."""
    total = sum(part.samples for part in found.values())
    lines = set().union(*(part.lines for part in found.values()))
    text = [f"a layer runs through about {len(lines) * LINE / 1024:.0f} KB of code"]
    text.append(f"{'part':44} {'code':>8} {'samples':>8}  no instruction, other waits")
    for name, part in sorted(found.items(), key=lambda item: -item[1].samples):
        if part.samples * 200 < total and len(part.lines) < 8:
            continue
        shares = {reason: n / max(part.samples, 1) for reason, n in part.reasons.items()}
        missing = shares.pop("no_inst", 0.0)
        most = sorted(shares.items(), key=lambda item: -item[1])[:3]
        others = ", ".join(f"{reason} {share:.0%}" for reason, share in most)
        size = len(part.lines) * LINE / 1024
        text.append(
            f"{name:44} {size:5.1f} KB {part.samples / total:8.1%}  {missing:.0%}; {others}"
        )
    return "\n".join(text)


def header(config: LlamaConfig, batch: int) -> str:
    """What specialises the kernel of a decode step of so many rows."""
    limits = Limits(batch, 320, batch, default_logit_rows(batch, batch), 5 * batch, 64)
    options = functools.partial(default_options, "cuda", WORKERS)
    bucket = choose_bucket(config, limits, options, batch, batch, 256, decode=True)
    program = compile_bucket(config, limits, BF16, bucket, options)
    return program_header(program, in_order=program.needs_queue_order)


def run(config: LlamaConfig, batch: int) -> None:
    """Some decode steps at context 253, one in each launch."""
    from llama_cuda import make_runner, prepare
    from megavm.vm.cuda.machine import CudaMachine

    runner = make_runner(config, CudaMachine(range(1)), 320, batch, rows=batch)
    step = prepare(runner, batch, 252)
    for _ in range(LAUNCHES):
        runner.run(step)


def sample(words: Sequence[str], file: Path) -> None:
    """Run this script with these words below ncu; the samples of the last launch go to ``file``."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "samples.ncu-rep"
        select = ["-k", "regex:megavm_kernel", "-s", str(LAUNCHES - 1), "-c", "1"]
        command = ["ncu", "--section", "SourceCounters", *select, "-o", str(found)]
        subprocess.run([*command, sys.executable, __file__, *words, "--role", "run"], check=True)
        table = [
            "ncu",
            "--import",
            str(found),
            "--page",
            "source",
            "--csv",
            "--print-source",
            "sass",
        ]
        with file.open("w") as output:
            subprocess.run(table, stdout=output, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=Path, help="what ncu found, as CSV; written if missing")
    parser.add_argument("--role", choices=("run",), help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = dataclasses.replace(MODELS[args.model], num_layers=args.layers)
    if args.role == "run":
        return run(config, args.batch)
    with tempfile.TemporaryDirectory() as folder:
        file = args.samples or Path(folder) / "samples.csv"
        if not file.is_file():
            sample(sys.argv[1:], file)
        with file.open(newline="") as text:
            samples = read_samples(csv.reader(text))
    kernel = compile_kernel(header(config, args.batch), options=CompilerOptions(lineinfo=True))
    print(report(parts(disassemble(kernel.cubin), samples, OFTEN * args.layers * WORKERS)))


if __name__ == "__main__":
    main()
