"""Loading a model needs its weights once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MEASURE = """
import json, sys
from megavm.llm import LLM

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

before = status("VmRSS"), status("RssAnon")
llm = LLM(sys.argv[1], machine="cpu", dtype=sys.argv[2], max_model_len=64, max_num_seqs=1,
          max_num_batched_tokens=16, num_blocks=8)
programs = llm.runner.programs
print(json.dumps({
    "peak": status("VmHWM") - before[0],
    "anonymous": status("RssAnon") - before[1],
    "weights": sum(t.bytes for t in programs.program(programs.bucket(1, 1, 1)).tensors
                   if t.kind.value == "weight"),
}))
"""


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., tuple[Path, Any]]) -> Path:
    path, _ = make_llama(
        0,
        "bfloat16",
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=64,
    )
    return path


def measure(directory: Path, dtype: str) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURE, str(directory), dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, int] = json.loads(run.stdout)
    return figures


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_converting_weights_peaks_at_the_weights_once_plus_a_tenth(directory: Path) -> None:
    figures = measure(directory, "float32")
    assert figures["weights"] > 300e6
    assert figures["peak"] <= 1.1 * figures["weights"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_copying_weights_of_the_stored_type_peaks_so_too(directory: Path) -> None:
    figures = measure(directory, "bfloat16")
    assert figures["weights"] > 150e6
    assert figures["anonymous"] >= 0.9 * figures["weights"]
    assert figures["peak"] <= 1.05 * figures["weights"] + (24 << 20)
