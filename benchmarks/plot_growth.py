"""A picture of how the time of a step grows with batch, prompt and context, from recorded results.

    python benchmarks/plot_growth.py docs/pictures/growth.svg

Reads benchmarks/results/throughput_cuda_*.json and llama_cuda_1b.json, so it needs no GPU. Draws
the floor of the same run beside each time: reading the weights, keys and values, or multiplying,
whichever takes longer (throughput_cuda.py). Needs matplotlib, which megavm itself does not.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MODELS = {"1b": "#1f77b4", "8b": "#d62728"}
CONTEXT_COLOURS = {1: "#1f77b4", 8: "#17becf"}


def results_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return found


def draw_batches(axes: Any) -> None:
    for model, colour in MODELS.items():
        rows = [r for r in results_of(f"throughput_cuda_{model}") if r["kind"] == "decode"]
        batches = [r["what"] for r in rows]
        axes.plot(batches, [r["us"] / 1e3 for r in rows], "o-", color=colour, label=model.upper())
        floor = [r["floor_us"] / 1e3 for r in rows]
        axes.plot(batches, floor, ":", color=colour, label=f"{model.upper()}, floor")
    axes.set_xlabel("sequences that decode, context 256")


def draw_prompts(axes: Any) -> None:
    for model, colour in MODELS.items():
        rows = [r for r in results_of(f"throughput_cuda_{model}") if r["kind"] == "prefill"]
        one = [r for r in rows if r["what"].startswith("1x")]
        tokens = [int(r["what"][2:]) for r in one]
        axes.plot(tokens, [r["us"] / 1e3 for r in one], "o-", color=colour, label=model.upper())
        floor = [r["floor_us"] / 1e3 for r in one]
        axes.plot(tokens, floor, ":", color=colour, label=f"{model.upper()}, floor")
    axes.set_xlabel("tokens of a prompt")


def draw_contexts(axes: Any) -> None:
    rows = results_of("llama_cuda_1b")
    for batch, colour in CONTEXT_COLOURS.items():
        mine = sorted((r for r in rows if r["batch"] == batch), key=lambda r: r["context"])
        contexts = [r["context"] for r in mine]
        times = [r["us_per_step"] / 1e3 for r in mine]
        axes.plot(contexts, times, "o-", color=colour, label=f"1B, batch {batch}")
        floor = [r["floor_us"] / 1e3 for r in mine]
        axes.plot(contexts, floor, ":", color=colour, label=f"batch {batch}, floor")
    axes.set_xlabel("tokens of context")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="picture to write; the ending says what kind")
    path: Path = parser.parse_args().path
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        parser.error("drawing needs matplotlib: pip install matplotlib")
    matplotlib.rcParams["svg.hashsalt"] = "megavm"  # the same picture gives the same file
    ticker = importlib.import_module("matplotlib.ticker")
    figure, every = importlib.import_module("matplotlib.pyplot").subplots(1, 3, figsize=(12, 3.6))
    for draw, axes in zip((draw_batches, draw_prompts, draw_contexts), every, strict=True):
        draw(axes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize="small")
    every[0].set_ylabel("milliseconds per step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
