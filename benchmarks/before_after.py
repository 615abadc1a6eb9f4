"""Compare the decode times of two versions of megavm on one GPU, in alternating turns.

    python benchmarks/before_after.py --before SOURCES SITE --after SOURCES SITE --model 1b --save

SOURCES is a checkout, SITE a folder into which it was installed (pip install --target SITE ...).
Each turn runs benchmarks/llama_cuda.py of a checkout in its own process. The first turn compiles
kernels and does not count; --warm leaves it out. Refuses to measure a version that another
installation hides, as an editable one does: then both would be the same.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from environment import save

LINE = re.compile(r"batch (\d+) context +(\d+): +([\d.]+) us per token")
Times = dict[tuple[int, int], float]  # us per step, by batch and context


def importing(site: str) -> dict[str, str]:
    """The environment of a process that imports megavm from ``site``."""
    return os.environ | {"PYTHONPATH": site}


def check_site(site: str) -> None:
    """Exit when a process with ``site`` on its path imports megavm from elsewhere."""
    command = [sys.executable, "-c", "import megavm; print(megavm.__file__)"]
    run = subprocess.run(command, capture_output=True, text=True, env=importing(site), check=False)
    found = run.stdout.strip()
    if not found or not Path(found).resolve().is_relative_to(Path(site).resolve()):
        raise SystemExit(f"megavm is imported from {found or 'nowhere'}, not from {site}")


def turn(sources: str, site: str, model: str, contexts: list[int], batches: list[int]) -> Times:
    """One run of benchmarks/llama_cuda.py of a checkout. Exits when it fails."""
    command = [sys.executable, str(Path(sources) / "benchmarks/llama_cuda.py"), "--model", model]
    command += ["--context", *map(str, contexts), "--batch", *map(str, batches), "--rounds", "40"]
    run = subprocess.run(command, capture_output=True, text=True, env=importing(site), check=False)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    return {(int(b), int(c)): float(us) for b, c, us in LINE.findall(run.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", nargs=2, required=True, metavar=("SOURCES", "SITE"))
    parser.add_argument("--after", nargs=2, required=True, metavar=("SOURCES", "SITE"))
    parser.add_argument("--model", nargs="+", default=["1b"])
    parser.add_argument("--context", type=int, nargs="+", default=[240])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="kernels are compiled already")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    for _, site in (args.before, args.after):
        check_site(site)
    sys.path.insert(0, args.after[1])  # the saved environment names this version
    results = []
    for model in args.model:
        found: dict[str, list[Times]] = defaultdict(list)
        for number in range(int(args.warm), args.turns + 1):
            for name in ("before", "after"):
                sources, site = getattr(args, name)
                times = turn(sources, site, model, args.context, args.batch)
                if number > 0:
                    found[name].append(times)
        for batch, context in found["before"][0]:
            row: dict[str, object] = {"model": model, "batch": batch, "context": context}
            medians = {}
            for name, turns in found.items():
                row[f"{name}_us"] = [times[batch, context] for times in turns]
                medians[name] = statistics.median(times[batch, context] for times in turns)
            change = 100 * (medians["after"] / medians["before"] - 1)
            row["change_percent"] = round(change, 2)
            results.append(row)
            print(
                f"{model} batch {batch} context {context}: {medians['before']:.1f} us before, "
                f"{medians['after']:.1f} us after, {change:+.2f} %",
                flush=True,
            )
    if args.save:
        print(f"saved {save('before_after', {'results': results})}")


if __name__ == "__main__":
    main()
