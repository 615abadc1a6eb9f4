"""Fixtures of these tests; makes what supports them importable (tests are no package)."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))

import slow_compiler
import toy_runner

from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits
from megavm.scheduler.run import runner as runner_module
from megavm.scheduler.run.buckets import weight_specs
from megavm.vm.cuda.emulated import EmulatedMachine, reason_unavailable
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.memory import TORCH_DTYPE
from megavm.vm.tensors import BF16


@pytest.fixture(params=["queued", "overlap", "in_turn"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the engine plans a step while the one before it runs.

    "queued": toy runners run steps behind each other, as GPUs do.
    """
    if request.param == "queued":
        init = toy_runner.ToyRunner.__init__
        monkeypatch.setattr(
            toy_runner.ToyRunner, "__init__", functools.partialmethod(init, queues=True)
        )
    return bool(request.param != "in_turn")


@pytest.fixture
def compiler_threads_end() -> Iterator[None]:
    """No thread that compiles programs is left behind a test."""
    yield
    gc.collect()
    slow_compiler.wait_until(slow_compiler.ended)


@pytest.fixture(scope="module")
def gpu_ranks(request: pytest.FixtureRequest) -> Callable[[int], CudaMachine]:
    """gpu_ranks(ranks): GPUs, which ranks share if there are fewer, or emulated ones."""
    if torch.cuda.is_available():
        make: Callable[[int], CudaMachine] = request.getfixturevalue("cuda_ranks")
        return make
    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return lambda ranks: EmulatedMachine(timeout=20.0, ranks=ranks)


@pytest.fixture(scope="module")
def gpu(gpu_ranks: Callable[[int], CudaMachine]) -> CudaMachine:
    """A GPU, or an emulated one."""
    return gpu_ranks(1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> runner_module.Runner:
    """A runner with a GPU that loads programs and runs none."""
    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    machine, config = EmulatedMachine(), LlamaConfig(96, 128, 128, 1, 2, 1, 64)
    monkeypatch.setattr(machine, "_compile", lambda header: header)
    monkeypatch.setattr(machine, "_load", lambda compiled: [None])
    monkeypatch.setattr(runner_module, "StepMemory", DeviceStepMemory)
    limits = Limits(2, 64, 8, 2, 8, 16)
    memory = machine.memory()
    for spec in weight_specs(config, limits, BF16):
        memory.bind(spec, torch.zeros(spec.shape, dtype=TORCH_DTYPE[spec.dtype]))
    return runner_module.Runner(
        config, memory, limits, BF16, machine, lambda rows: default_options("cuda", 3, rows)
    )
