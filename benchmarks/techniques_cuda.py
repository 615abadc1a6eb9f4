"""The effect of each technique: decode times with one change at a time.

    python benchmarks/techniques_cuda.py [--model 1b] [--context 250] [--rounds 50] [--save]
    python benchmarks/techniques_cuda.py --names barriers none --trace FOLDER [--repeats 2]

A variant changes a constant or a line in a copy of the kernel sources, a compile option, or the way
to launch. It is measured between two measurements of the unchanged machine at the same context, and
must choose the same tokens. With --trace nothing is measured: FOLDER gets a trace of every variant
and, before each technique, of the unchanged machine; what_if_cuda.py compares them with
predictions. With --repeats all of this is recorded several times in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from environment import save
from llama_cuda import MODELS, make_runner, measure, prepare, record_steps
from megavm.scheduler.run.runner import Runner
from megavm.vm.cuda.compiler import ROOT, CompileError
from megavm.vm.cuda.executable import CudaExecutable
from megavm.vm.cuda.launch import EXCHANGE, HINT
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program

CONFIG, LOADER = "cuda/config.cuh", "cuda/loader.cuh"
CHECKED = 32  # tokens that must be equal (except for ties that rounding decides)
LONG = 4096  # a context long enough for splits of attention to matter

Edits = Mapping[str, tuple[tuple[str, str], ...]]  # file -> (regex, replacement), ...


@dataclass(frozen=True)
class Variant:
    """One change. ``context`` and ``steps`` (per launch) of 0 mean those of the command line."""

    technique: str
    name: str
    edits: Edits = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    hints: bool = True
    trace: bool = False
    context: int = 0
    steps: int = 0


def constant(name: str, value: int | str) -> Edits:
    """Change the value of a constant in cuda/config.cuh."""
    pattern = rf"(?m)^constexpr uint32_t {name} = [^;]+;"
    return {CONFIG: ((pattern, f"constexpr uint32_t {name} = {value};"),)}


def pages(count: int) -> Edits:
    """Use a ring of at most ``count`` pages."""
    return constant("kPages", f"min_of({count}, program::kPages)")


def in_flight(count: int, waiting: int) -> Edits:
    """Limit the loader's pages in flight to ``count``, and to ``waiting`` while consumers wait."""
    edits = constant("kWindow", count)[CONFIG] + constant("kWaitWindow", waiting)[CONFIG]
    return {CONFIG: edits}


def waiting(*semaphores: str) -> Edits:
    """Let the loader wait for these semaphores before it loads an instruction's first page."""
    waits = "".join(f"\n    stage.{name}().wait(stage.phase);" for name in semaphores)
    start = r"void begin_page\(uint32_t bytes[^)]*\) \{"
    return {LOADER: ((start, rf"\g<0>{waits}"),)}


BARRIER = {"exchange": "barrier"}
VARIANTS = [
    # Streaming weights.
    *(Variant("ring of pages", f"{n} pages", pages(n)) for n in (4, 6, 8, 10)),
    *(Variant("copies in flight", f"{n}", in_flight(n, n)) for n in (2, 3, 5, 8)),
    *(Variant("copies in flight", f"5, waiting {n}", in_flight(5, n)) for n in (1, 3)),
    *(Variant("pages in registers", f"{n}", constant("kPreload", n)) for n in (2, 6, 8)),
    *(Variant("instructions in flight", f"{n}", constant("kStages", n)) for n in (2, 4)),
    Variant("weights before waits", "off", waiting("ready", "hinted")),
    Variant("weights before waits", "off, with barriers", waiting("ready"), BARRIER),
    # Exchange of activations.
    Variant("exchange", "barriers", options=BARRIER),
    Variant("hints", "off", hints=False),
    *(Variant("hints", f"1 writer of {n} late", constant("kHintSlack", n)) for n in (4, 1 << 20)),
    # Tiling and assignment.
    Variant("tiles of columns", "multiples of 16", options={"column_unit": 16}),
    Variant("tiles of columns", "2 per worker", options={"waves": 2}),
    Variant("assignment", "round robin", options={"assignment": "round_robin"}),
    Variant("assignment", "dynamic", options={"assignment": "dynamic"}),
    Variant("norm by its neighbours", "off", options={"fuse_norm": False}),
    Variant("splits of attention", "of 512", options={"min_chunk": 512}, context=LONG),
    Variant("splits of attention", "of 1024", options={"min_chunk": 1024}, context=LONG),
    Variant("splits of attention", "none", options={"min_chunk": 1 << 20}, context=LONG),
    # Launches and tracing.
    *(Variant("tokens per launch", f"{n}", steps=n) for n in (1, 2, 4, 8, 32)),
    Variant("trace", "on", trace=True),
]


def changed_sources(edits: Edits, folder: Path, root: Path = ROOT) -> None:
    """Copy the kernel sources to ``folder`` and edit the copies.

    Raises ValueError when a pattern does not occur.
    """
    for path in _sources(root):
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for name, replacements in edits.items():
        text = (folder / name).read_text(encoding="utf-8")
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, text)
            if not count:
                raise ValueError(f"there is no {pattern} in {name}")
        (folder / name).write_text(text, encoding="utf-8")


def _sources(root: Path) -> Iterator[Path]:
    for folder in ("cuda", "instructions"):
        for suffix in ("cu", "cuh", "hpp"):
            yield from (root / folder).rglob(f"*.{suffix}")


class VariantMachine(CudaMachine):
    """A CudaMachine that can turn hints off."""

    def __init__(self, root: Path = ROOT, hints: bool = True, trace: bool = False) -> None:
        super().__init__(trace=trace, root=root)
        self.hints = hints

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> CudaExecutable:
        executable = super().load(program, memory, verify=verify)
        if not self.hints:
            words = executable._ranks[0].exchanges.view(torch.int32).view(-1, EXCHANGE.size // 4)
            words[:, : HINT.size // 4] = -1  # NONE; the hint comes first
        return executable


class Bench:
    """The unchanged machine, and runners with the same weights for variants.

    Variants that compile to the same programs use the unchanged machine's runner: weights in other
    places of the memory take up to 0.7 % more or less time.
    """

    def __init__(self, model: str, layers: int | None, context: int, steps: int) -> None:
        self.config = MODELS[model]
        if layers:
            self.config = dataclasses.replace(self.config, num_layers=layers)
        self.context = context
        self.steps = steps
        self.max_context = max(context, *(v.context for v in VARIANTS))
        self.max_context += 2 * max(CHECKED, steps, *(v.steps for v in VARIANTS))
        self.machine = VariantMachine()
        self.plain = make_runner(self.config, self.machine, self.max_context, 1)

    def tokens(self, runner: Runner, context: int) -> list[int]:
        """Greedy tokens after random tokens with random keys and values."""
        step = prepare(runner, 1, context)
        runner.programs.program(runner.programs.bucket(1, 1, context + CHECKED))
        generator = torch.Generator(runner.memory.device)
        for name in runner.memory:
            if name.endswith("_cache"):
                generator.manual_seed(zlib.crc32(name.encode()))
                runner.memory.storage(name).normal_(generator=generator)
        runner.run(step, CHECKED)
        chosen: list[int] = runner.tokens[0, context + 1 : context + 1 + CHECKED].tolist()
        return chosen

    @contextmanager
    def runner(self, variant: Variant) -> Iterator[Runner]:
        """A runner of the variant; its kernels can be compiled inside of the context alone."""
        with tempfile.TemporaryDirectory(prefix="megavm-") as folder:
            root = ROOT
            if variant.edits:
                root = Path(folder)
                changed_sources(variant.edits, root)
            machine = VariantMachine(root, variant.hints, variant.trace)
            if variant.options:
                yield make_runner(self.config, machine, self.max_context, 1, **variant.options)
                return
            self.plain.programs.use(machine)
            try:
                yield self.plain
            finally:
                self.plain.programs.use(self.machine)

    def record(self, variant: Variant, folder: Path, repeat: int) -> dict[str, Any]:
        """Write traces of a variant and, unless its technique has one, of the unchanged machine."""
        context, steps = variant.context or self.context, variant.steps or self.steps
        base = f"{variant.technique} as it is {context} {repeat}".replace(" ", "-") + ".megatrace"
        if not (folder / base).exists():
            step = prepare(self.plain, 1, context)
            record_steps(self.plain, step, self.steps, str(folder / base))
        file = f"{variant.technique} {variant.name} {repeat}".replace(" ", "-").replace(",", "")
        with self.runner(variant) as runner:
            step = prepare(runner, 1, context)
            record_steps(runner, step, steps, str(folder / f"{file}.megatrace"))
        return {"context": context, "repeat": repeat, "base": base, "trace": f"{file}.megatrace"}

    def compare(self, variant: Variant, rounds: int) -> dict[str, Any]:
        """Measure a variant against the unchanged machine.

        Raises CompileError or ValueError when it cannot be built, MachineFault when it fails to
        run.
        """
        context, steps = variant.context or self.context, variant.steps or self.steps

        def time(subject: Runner, at: int) -> float:
            return float(measure(subject, 1, context, at, rounds)["us_per_step"])

        want, before = self.tokens(self.plain, context), time(self.plain, self.steps)
        with self.runner(variant) as runner:
            got, found = self.tokens(runner, context), time(runner, steps)
        base = (before + time(self.plain, self.steps)) / 2
        return {
            "context": context,
            "steps": steps,
            "us_per_token": found,
            "base_us": base,
            "ratio": found / base,
            "same_tokens": float(np.mean(np.array(want) == np.array(got))),
        }


def row(variant: Variant, found: Mapping[str, Any]) -> str:
    """The row of a variant in the table (Markdown)."""
    start = f"| {variant.technique} | {variant.name} |"
    if "failed" in found:
        return f"{start} {found['failed']} | | | |"
    doubt = "" if found["same_tokens"] == 1 else f" ({found['same_tokens']:.0%} of tokens)"
    return (
        f"{start} {found['context']} | {found['base_us']:.1f} | {found['us_per_token']:.1f} | "
        f"{100 * (found['ratio'] - 1):+.1f} %{doubt} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--context", type=int, default=240)
    parser.add_argument("--steps", type=int, default=8, help="tokens per launch")
    parser.add_argument("--rounds", type=int, default=50)
    names = sorted({v.technique for v in VARIANTS})
    parser.add_argument("--only", nargs="+", choices=names, help="techniques")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="variants: barriers, none ...")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write traces, do not measure")
    parser.add_argument("--repeats", type=int, default=1, help="how often --trace records all")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.model, args.layers, args.context, args.steps)
    results = []
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    else:
        print("| technique | changed to | context | as it is, us | changed, us | time |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
    chosen = [
        variant
        for variant in VARIANTS
        if (not args.only or variant.technique in args.only)
        and (not args.names or variant.name in args.names)
    ]
    for repeat, variant in itertools.product(range(args.repeats if args.trace else 1), chosen):
        found: dict[str, Any]
        try:
            if args.trace:
                found = bench.record(variant, args.trace, repeat)
            else:
                found = bench.compare(variant, args.rounds)
        except (CompileError, MachineFault, ValueError) as error:
            found = {"failed": str(error).splitlines()[0]}
            if bench.machine.lost or "context is lost" in str(error):
                raise
        results.append({"technique": variant.technique, "name": variant.name, **found})
        print(results[-1] if args.trace else row(variant, found), flush=True)
        if args.trace:
            (args.trace / "traces.json").write_text(json.dumps(results, indent=1) + "\n")
    if args.save and not args.trace:
        facts = {"model": args.model, "layers": bench.config.num_layers, "rounds": args.rounds}
        print(f"\nsaved {save('techniques_cuda', {**facts, 'results': results})}")


if __name__ == "__main__":
    main()
