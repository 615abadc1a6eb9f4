"""Benchmarks run. No other test imports them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "cpu_kernels.py --shapes down gate --rows 1 9 --seconds 0.01 --megabytes 1",
            "down 2048 x 8192",
        ),
        ("program_compile.py --model 1b --step 512x1 --rounds 1", "512x1"),
        ("host_waves.py --waves 2 --batches 8 --event-loops asyncio", "TTFT ms"),
        ("host_pace.py --tokens 120 --batches 8 --paths engine masks masks-first", "collect us"),
        ("step_sizes.py --model 1b --sizes 512 --clients 8", "1b, steps of 512, 8 clients"),
        ("halves_estimate.py --model 1b --rows 512 --ranks 2", "512 rows, 2 ranks, all_gather"),
        ("bucket_estimate.py --model 1b --most 1024", "1b, as they are: 2 buckets,"),
        ("tracing.py --tokens 4 --rounds 1", "2 workers:"),
        (
            "accuracy_rows_cuda.py --model stories --machine cpu --batch 1 4 --longest 60",
            "second runs that differ: none; further away: none",
        ),
        (
            "accuracy_requests.py --model stories --machine cpu --requests 40 --most-prompt 200"
            " --most-output 6 --kv-cache-bytes 100000000",
            "stories: 40 requests in",
        ),
        ("structured_outputs.py --rounds 1 --tokens 4", "engine, ms per token:"),
        (
            "serve_cuda.py --model tiny --machine cpu --concurrency 1 --scale 0.05"
            " --max-model-len 512",
            "of LLM.generate",
        ),
        (
            "offline_cuda.py --model tiny --machine cpu --load 4x8+4 --first 4 --rounds 2",
            "tiny 4x8+4:",
        ),
        (
            "masks_cuda.py --model tiny --machine cpu --batch 2 --tokens 8 --rounds 1",
            "tiny, batch 2, grammar: free",
        ),
        (
            "sampling_cuda.py --model tiny --machine cpu --batch 2 --tokens 4 --rounds 1 --gain 6",
            "tiny, gain 6, batch 2, ms: greedy",
        ),
        (
            "stand_ins_cuda.py --model tiny --machine cpu --most-rows 128 --rounds 1",
            "tiny   128 rows  128:",
        ),
    ],
    ids=[
        "cpu_kernels",
        "program_compile",
        "host_waves",
        "host_pace",
        "step_sizes",
        "halves_estimate",
        "bucket_estimate",
        "tracing",
        "accuracy_rows",
        "accuracy_requests",
        "structured_outputs",
        "serve_cuda",
        "offline_cuda",
        "masks_cuda",
        "sampling_cuda",
        "stand_ins_cuda",
    ],
)
def test_a_benchmark_of_the_cpu_runs(command: str, said: str) -> None:
    script, *options = command.split()
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # What takes long on a busy machine is no failure of the script.
    assert run.returncode == 0 or "take more than" in run.stdout, run.stderr
    assert said in run.stdout


def test_the_bandwidth_of_a_trace_is_that_of_the_fastest_and_of_the_median_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    read_floor = importlib.import_module("read_floor")
    floor = read_floor.ReadFloor.__new__(read_floor.ReadFloor)
    floor.size = 1_000_000
    asked = []

    def times(size: int, rounds: int) -> list[float]:
        asked.append((size, rounds))
        return [4000.0, 2000.0, 2500.0][:rounds]

    monkeypatch.setattr(floor, "_times", times)
    # Half a second of rounds of eight passes.
    assert floor.ceiling() == {"bandwidth": 4e9, "bandwidth_median": 3.2e9}
    assert asked == [(8_000_000, 1), (8_000_000, 125)]


def test_a_trace_of_a_benchmark_has_the_ceilings_of_all_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    llama_cuda = importlib.import_module("llama_cuda")
    machine = object.__new__(llama_cuda.CudaMachine)
    machine.devices = (0, 1, 2)
    monkeypatch.setattr(llama_cuda.CudaMachine, "memory_device", "cuda:0", raising=False)
    floor = SimpleNamespace(ceiling=lambda: {"bandwidth": 4e12, "bandwidth_median": 3e12})
    monkeypatch.setattr(llama_cuda, "ReadFloor", lambda size: floor)
    rates = {"flops_per_second": 7e14, "flops_per_second_median": 6e14}
    monkeypatch.setattr(llama_cuda, "measure_multiplication", lambda device: rates)
    monkeypatch.setattr(llama_cuda, "describe_machine", lambda machine: {"name": "cuda"})
    kept = []

    class Recorder(llama_cuda.Recorder):  # type: ignore[misc,name-defined]
        def trace(self) -> SimpleNamespace:
            return SimpleNamespace(save=lambda path: kept.append(dict(self.machine)))

    monkeypatch.setattr(llama_cuda, "Recorder", Recorder)
    runner = SimpleNamespace(
        machine=machine,
        config=SimpleNamespace(num_layers=1, hidden_size=8),
        record=lambda recorder: None,
        run=lambda step, steps: None,
    )
    llama_cuda.record_steps(runner, None, 1, str(tmp_path / "a.megatrace"))
    (found,) = kept
    assert (found["bandwidth"], found["bandwidth_median"]) == (12e12, 9e12)
    assert (found["flops_per_second"], found["flops_per_second_median"]) == (21e14, 18e14)


def test_batches_stand_out_that_take_longer_than_larger_ones_or_more_for_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    standing_out = importlib.import_module("throughput_cuda").standing_out
    assert list(standing_out({1: 600.0, 16: 900.0, 8: 780.0, 32: 1200.0})) == []
    assert list(standing_out({64: 4241.0, 16: 1589.0, 32: 1455.0})) == [
        "16 rows take 1589 us and 32 take 1455: more rows take less time",
        "32 rows take 1455 us and 64 take 4241: a row takes 66.3 in place of 45.5 us",
    ]


def test_samples_of_a_kernel_are_dealt_out_to_the_parts_of_its_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = importlib.import_module("megavm.vm.cuda.compiler")
    if (reason := compiler.reason_unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path))
    machine_code, code_cuda = map(importlib.import_module, ("machine_code", "code_cuda"))
    if machine_code.disassembler() is None:
        pytest.skip("nvdisasm is not installed")
    entry = importlib.import_module("megavm.vm.cuda.clocks").ENTRY
    options = compiler.CompilerOptions(lineinfo=True)
    code = machine_code.disassemble(compiler.compile_kernel("", options=options, entry=entry).cubin)
    # Ten layers; every instruction has two samples, one of them without an instruction.
    head = ["Address", "Source", "# Samples", "Instructions Executed"]
    rows = [["Kernel Name", "k"], [*head, "stall_no_inst", "stall_wait", "stall_wait (Not Issued)"]]
    base = 0x7F0000000000
    for offset, text, places in code.instructions:
        runs = 10 if places[-1][0].endswith(entry) else 0
        rows.append([hex(base + offset), f"   {text}", "2", str(runs), "1", "1", "1"])
    samples = code_cuda.read_samples(rows)
    found = code_cuda.parts(code, samples, 10)
    assert sum(part.samples for part in found.values()) == 2 * len(code.instructions)
    assert all(name.startswith("cuda/") for name in found)
    text = code_cuda.report(found)
    assert f"about {-(-len(code.instructions) * 16 // 128) * 128 / 1024:.0f} KB of code" in text
    assert "50%; wait 50%" in text

    other = {**samples, 0: samples[0]._replace(text="FADD R0, R0, R1")}
    with pytest.raises(ValueError, match="of another kernel: at 0x0 it has FADD"):
        code_cuda.parts(code, other, 10)
