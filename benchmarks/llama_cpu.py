"""Decode and prefill on the CPU machine against Hugging Face transformers, in one run.

    python benchmarks/llama_cpu.py [--layers 4] [--tokens 20] [--rounds 5] [--save]

The model is random, with Llama-3.2-1B's layer shapes and vocabulary, fewer layers and bfloat16
weights. Transformers runs the same weights in bfloat16 and in float32 with as many threads as
megavm has workers; its forward pass is called in a plain loop with a growing KV cache. megavm runs
`LLM.generate`, including all of its overhead. Rounds of all contenders alternate; medians are
compared.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from environment import save
from megavm import LLM, SamplingParams

PROMPT_DECODE = 16
PROMPTS_PREFILL = (128, 2000)
KINDS = ("decode", *(f"prefill_{length}" for length in PROMPTS_PREFILL))  # prefill_LENGTH: tokens


def make_model(layers: int, directory: Path) -> None:
    """A random Llama with the shapes of Llama-3.2-1B, saved as bfloat16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


class Transformers:
    """The baseline: one forward pass per token, greedy, with a growing cache."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    @torch.inference_mode()
    def decode(self, prompt: list[int], tokens: int) -> float:
        """Seconds per token after the first."""
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        begin = time.perf_counter()
        for _ in range(tokens):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
        return (time.perf_counter() - begin) / tokens

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the logits of the last prompt token."""
        begin = time.perf_counter()
        self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin


class Megavm:
    """megavm through its Python API."""

    def __init__(self, directory: Path, dtype: Literal["bfloat16", "float32"]) -> None:
        self.llm = LLM(
            str(directory), machine="cpu", dtype=dtype, max_model_len=2048, max_num_seqs=1
        )

    def _seconds(self, prompt: list[int], tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        self.llm.generate(prompt, params)
        return time.perf_counter() - begin

    def decode(self, prompt: list[int], tokens: int) -> float:
        """Seconds per token after the first."""
        first = self._seconds(prompt, 1)
        return (self._seconds(prompt, tokens + 1) - first) / tokens

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token."""
        return self._seconds(prompt, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/llama_cpu.json"
    )
    arguments = parser.parse_args()
    rng = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        """A new prompt each time, so that the prefix cache never hits."""
        ids: list[int] = torch.randint(0, 128256, (length,), generator=rng).tolist()
        return ids

    with tempfile.TemporaryDirectory() as directory:
        make_model(arguments.layers, Path(directory))
        contenders: dict[str, Any] = {
            "megavm bfloat16": Megavm(Path(directory), "bfloat16"),
            "megavm float32": Megavm(Path(directory), "float32"),
            "transformers bfloat16": Transformers(Path(directory), torch.bfloat16),
            "transformers float32": Transformers(Path(directory), torch.float32),
        }
        times: dict[str, dict[str, list[float]]] = {
            n: {kind: [] for kind in KINDS} for n in contenders
        }
        for contender in contenders.values():  # warm up: compile programs, page weights in
            contender.decode(prompt(PROMPT_DECODE), 2)
            for length in PROMPTS_PREFILL:
                contender.prefill(prompt(length))
        for _ in range(arguments.rounds):
            for name, contender in contenders.items():
                gc.collect()
                decode = contender.decode(prompt(PROMPT_DECODE), arguments.tokens)
                times[name]["decode"].append(decode)
                for length in PROMPTS_PREFILL:
                    seconds = contender.prefill(prompt(length))
                    times[name][f"prefill_{length}"].append(seconds)
    print(f"{'':24}" + "".join(f"{kind:>16}" for kind in KINDS) + "  (ms)")
    medians = {
        name: {kind: statistics.median(v) * 1e3 for kind, v in kinds.items()}
        for name, kinds in times.items()
    }
    for name, kinds in medians.items():
        print(f"{name:24}" + "".join(f"{kinds[kind]:16.1f}" for kind in KINDS))
    ratios = {
        dtype: {
            kind: medians[f"transformers {dtype}"][kind] / medians[f"megavm {dtype}"][kind]
            for kind in KINDS
        }
        for dtype in ("bfloat16", "float32")
    }
    for dtype, kinds in ratios.items():
        found = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in kinds.items())
        print(f"megavm against transformers in {dtype}: {found} as fast")
    if arguments.save:
        print(
            save(
                "llama_cpu",
                {
                    "layers": arguments.layers,
                    "threads": torch.get_num_threads(),
                    "medians_ms": medians,
                    "times_s": times,
                    "speedup": ratios,
                },
            )
        )


if __name__ == "__main__":
    main()
