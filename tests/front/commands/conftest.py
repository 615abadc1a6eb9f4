"""Runs command lines in this process, on a fake `LLM`; makes what supports the tests importable."""

from __future__ import annotations

import io
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from command_line import Result, Run
from fake_llm import FakeLLM

from megavm import cli


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands load `FakeLLM`; no `MEGAVM_*` variable is set."""
    module = types.ModuleType("megavm.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megavm.llm", module)
    for variable in [name for name in os.environ if name.startswith("MEGAVM_")]:
        monkeypatch.delenv(variable)
    FakeLLM.made = []
    FakeLLM.failure = None
    FakeLLM.broken_off = None
    FakeLLM.generation = {"eos_token_id": ()}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("generate", "m", stdin="...") -> what the command printed and its exit code."""

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else (stdin or b"")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()  # drop what the test itself printed
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A directory with a small random model and no tokenizer."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path
