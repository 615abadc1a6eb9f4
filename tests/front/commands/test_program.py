"""`megavm program`: options that reach the compiler, and steps that a model cannot run."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from command_line import Run


def test_program_passes_its_options_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def describe_program(model: str, **keywords: Any) -> str:
        asked.update(keywords, model=model)
        return "a program"

    module = types.ModuleType("megavm.scheduler.run.inspect")
    module.describe_program = describe_program  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megavm.scheduler.run.inspect", module)
    options = (
        "--rows 4 --sequences 2 --context 1K --sampled --workers 3 --verify --disassemble --save x"
    )
    options += " --tensor-parallel-size 2 --fixed-order"
    assert run("program", "m", *options.split()).out == "a program\n"
    assert asked == {
        "model": "m",
        "machine": "auto",
        "dtype": "auto",
        "rows": 4,
        "sequences": 2,
        "context": 1024,
        "sampled": True,
        "workers": 3,
        "tensor_parallel_size": 2,
        "fixed_order": True,
        "assignment": "balanced",
        "exchange": None,
        "disassemble": True,
        "verify": True,
        "save": "x",
    }


def test_a_program_for_a_longer_context_than_the_model_has_is_refused(
    run: Run, model_directory: Path
) -> None:
    # The model has 2048 positions.
    assert "context is 4096" in run("program", str(model_directory), "--context", "4K").error
