"""`megavm compile` says what the compiler made, and for what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megavm import cli
from megavm.scheduler.run import kernels
from megavm.vm.cuda import compiler as cuda_compiler
from megavm.vm.cuda import machine as cuda_machine
from megavm.vm.cuda.compiler import Kernel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with a configuration and nothing else; the compiler answers at once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def compile_kernel(header: str, architecture: str, **_: Any) -> Kernel:
        one = "kMaxRows = 1u" in header
        return Kernel(
            cubin=b"",
            architecture=architecture,
            log="",
            registers=168,
            spill_stores=0 if one else 8,
            spill_loads=0 if one else 4,
            stack=0,
            seconds=2.5,
            cached=one,
            path=tmp_path / "cache" / "name.kernel" if one else None,
        )

    monkeypatch.setattr(kernels, "compile_kernel", compile_kernel)
    monkeypatch.setattr(kernels, "compile_ahead", lambda headers, architecture: headers[1:])
    monkeypatch.setattr(cuda_compiler, "reason_unavailable", lambda: None)
    monkeypatch.setattr(cuda_machine, "reason_unavailable", lambda device=0: "no GPU today")
    return str(tmp_path)


def test_seconds_registers_spills_and_path_are_printed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", model, "--arch", "sm_90a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == f"steps of 1 row: cached, 168 registers, no spills, {model}/cache/name.kernel"
    )
    assert (
        "steps of 2 to 8 rows: compiled in 2.5 s, 168 registers, 12 bytes of spills, not cached"
        in lines
    )
    sampling = [line for line in lines if " with sampling: " in line]
    assert len(sampling) * 2 == len(lines)
    assert sampling[0].startswith("steps of 1 row with sampling: ")


def test_json_has_the_same_facts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", model, "--arch", "sm_90a", "--json", "--workers", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["architecture"]) == (model, "sm_90a")
    first = report["kernels"][0]
    assert [k["sampled"] for k in report["kernels"]].count(True) * 2 == len(report["kernels"])
    assert (first["rows"], first["registers"], first["cached"]) == ([1], 168, True)


def test_without_a_gpu_the_architecture_must_be_given(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", model]) == 2
    assert "there is no GPU to compile for (no GPU today): give --arch" in capsys.readouterr().err


def test_without_a_compiler_it_says_what_is_missing(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compiler, "reason_unavailable", lambda: "no cuda-core")
    assert cli.main(["compile", model, "--arch", "sm_90a"]) == 2
    assert "kernels cannot be compiled here: no cuda-core" in capsys.readouterr().err


def test_an_error_of_the_compiler_is_told(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise cuda_compiler.CompileError("cuda/x.cuh(3): error: no")

    monkeypatch.setattr(kernels, "compile_kernel", fail)
    assert cli.main(["compile", model, "--arch", "sm_90a"]) == 2
    assert "cuda/x.cuh(3): error: no" in capsys.readouterr().err


def test_kernels_of_several_ranks_are_others(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2}
    Path(model, "config.json").write_text(json.dumps(config))
    seen: list[str] = []
    compile_kernel = vars(kernels)["compile_kernel"]

    def noting(header: str, architecture: str, **options: Any) -> Kernel:
        seen.append(header)
        made: Kernel = compile_kernel(header, architecture, **options)
        return made

    monkeypatch.setattr(kernels, "compile_kernel", noting)
    arguments = ["compile", model, "--arch", "sm_90a", "--quiet"]
    assert cli.main([*arguments, "--tensor-parallel-size", "2"]) == 0
    assert seen
    assert all("kRanks = 2u" in header and '"sys"' in header for header in seen)
    seen.clear()
    assert cli.main(arguments) == 0
    assert not any("kRanks" in header for header in seen)
    capsys.readouterr()
    assert cli.main([*arguments, "--tensor-parallel-size", "3"]) == 2
    assert "3: it must divide the model's 2 KV heads" in capsys.readouterr().err
