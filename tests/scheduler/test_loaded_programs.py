"""Programs are loaded ahead of their use, beside launches, if the machine can."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from slow_compiler import SECONDS, Slow, ended, step, wait_until

from megavm.scheduler.engine.step import MasksNeeded, Step, power_of_two
from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run import model_programs
from megavm.scheduler.run import runner as runner_module
from megavm.scheduler.run.buckets import compile_bucket
from megavm.scheduler.run.load_gate import MOST_SECONDS
from megavm.vm.cuda import exchange as exchange_module
from megavm.vm.cuda import machine as machine_module
from megavm.vm.cuda.driver import CudaError
from megavm.vm.cuda.emulated import EmulatedMachine
from megavm.vm.machine import Executable
from megavm.vm.program import Program

pytestmark = pytest.mark.usefixtures("compiler_threads_end")


def test_loading_a_program_that_was_prepared_finds_everything(
    on_gpu: runner_module.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = on_gpu
    bucket = runner.programs.bucket(2, 2, 1, decode=True)
    program = runner.programs.compiler(ahead=True)(bucket)
    runner.programs.compiled.add(bucket, program)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("done again")

    for module, name in (
        (machine_module, "program_layouts"),
        (machine_module, "program_specialisation"),
        (exchange_module, "make_exchanges"),
    ):
        monkeypatch.setattr(module, name, refuse)
    assert runner.programs.program(bucket) is program


def test_no_launch_waits_for_programs_of_longer_contexts(
    on_gpu: runner_module.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in is loaded beside launches, and so is the program that takes its place."""
    runner, original, held = on_gpu, compile_bucket, Slow()
    short, middle, every = (Bucket(1, 1, context) for context in (16, 32, 64))
    by_context = {bucket.context: bucket for bucket in (short, middle, every)}

    def bucket(rows: int, logit_rows: int, context: int, **_: bool) -> Bucket:
        return by_context[max(16, power_of_two(context))]

    def compile_slowly(*arguments: Any) -> Program:
        held.held = (arguments[3],) if arguments[3] == middle else ()
        held(arguments[3])
        return original(*arguments)

    def decode(position: int) -> Step:
        row = np.zeros(1, np.int32)
        return Step(row, row + np.int32(position), row, position + 1, distinct=True)

    monkeypatch.setattr(runner.programs, "bucket", bucket)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    monkeypatch.setattr(model_programs, "compile_bucket", compile_slowly)
    loaders: list[str] = []
    load = runner.machine.load

    def note(*arguments: Any, **named: Any) -> Executable:
        loaders.append(threading.current_thread().name)
        return load(*arguments, **named)

    monkeypatch.setattr(runner.machine, "load", note)
    runner.programs.program(short)
    runner.programs.compile_ahead(first=[every])
    wait_until(lambda: (every, False) in runner.programs.loaded)
    assert runner.can_queue(decode(20))
    assert runner.programs.choose(decode(20), 1) == every
    assert held.began.wait(SECONDS), "its own program is compiled meanwhile"
    assert runner.can_queue(decode(20))

    def takes_its_place() -> bool:
        assert runner.can_queue(decode(20)), "its own program is ready before it is loaded"
        return runner.programs.choose(decode(20), 1) == middle

    held.go_on.set()
    wait_until(takes_its_place)
    assert runner.can_queue(decode(20))
    assert loaders == [threading.current_thread().name, "megavm-programs", "megavm-programs"]


def test_what_is_compiled_ahead_is_loaded_ahead(
    on_gpu: runner_module.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also programs of prompts and those that sample: no launch waits for a program's tables."""
    runner = on_gpu
    first, prompt = runner.programs.bucket(1, 1, 1), runner.programs.bucket(8, 1, 1)
    sampled = runner.programs.stand_in(sampled=True)
    runner.programs.program(first)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [prompt])
    runner.programs.compile_ahead()
    runner.programs.prepare([sampled], last=True)
    wait_until(lambda: ended() and sampled in set(runner.programs.compiled))
    assert {(bucket, False) for bucket in (first, prompt, sampled)} == set(runner.programs.loaded)


def test_programs_are_loaded_between_launches_that_await_masks(
    on_gpu: runner_module.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gate = on_gpu, on_gpu.programs.gate
    one, two = (runner.programs.bucket(rows, rows, 1, decode=True) for rows in (1, 2))
    runner.programs.program(one)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    load, awaiting, refused = runner.machine.load, step(1), []
    awaiting.awaits_masks = True

    def note(*arguments: Any, **named: Any) -> Executable:
        with pytest.raises(MasksNeeded, match="is being loaded"):
            runner.start(awaiting)
        refused.append(threading.current_thread().name)
        return load(*arguments, **named)

    monkeypatch.setattr(runner.machine, "load", note)
    launch = runner.start(awaiting)
    assert launch is not None
    assert not refused
    runner.programs.compile_ahead(first=[two])
    wait_until(lambda: gate._loads == 1)
    time.sleep(0.05)
    assert (two, False) not in runner.programs.loaded
    with pytest.raises(MasksNeeded, match="is being loaded"):  # so that the program's turn comes
        runner.start(awaiting)
    runner.give_masks()
    wait_until(ended)
    assert (two, False) in runner.programs.loaded
    assert refused == ["megavm-programs"]
    launch = runner.start(awaiting)
    assert launch is not None
    assert not gate._loads


@pytest.mark.parametrize("end", ["cancel", "finish", "another"])
def test_programs_do_not_wait_for_launches_that_have_failed(
    on_gpu: runner_module.Runner, end: str
) -> None:
    runner = on_gpu
    runner.programs.program(runner.programs.bucket(1, 1, 1))
    awaiting = step(1)
    awaiting.awaits_masks = True
    launch = runner.start(awaiting)
    assert launch is not None
    if end == "another":  # an interrupt has lost the first one
        runner.start(step(2))  # whose program must be loaded
    else:
        with contextlib.suppress(Exception):
            getattr(launch, end)()
    began = time.monotonic()
    with runner.programs.gate.load():
        assert time.monotonic() - began < MOST_SECONDS / 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        CudaError("CUDA_ERROR_OUT_OF_MEMORY", "cuModuleLoadData"),
    ],
)
def test_a_gpu_that_is_full_runs_the_programs_that_it_has(
    on_gpu: runner_module.Runner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: RuntimeError,
) -> None:
    """What does not fit is no reason to end requests that others can run."""
    runner = on_gpu
    sizes = [runner.programs.bucket(rows, 1, 1) for rows in (8, 4)]
    every = runner.programs.bucket(8, 2, runner.max_model_len)
    assert every not in sizes
    runner.programs.program(every)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: sizes)
    load = runner.machine.load

    def full(*arguments: Any, **named: Any) -> Executable:
        raise error

    monkeypatch.setattr(runner.machine, "load", full)
    runner.programs.compile_ahead()
    wait_until(lambda: set(sizes) <= set(runner.programs.compiled))
    assert set(runner.programs.loaded) == {(every, False)}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(error) in caplog.text
    for rows in (8, 4):
        assert runner.programs.choose(step(rows), 1) == every
        assert runner.can_queue(step(rows))
    monkeypatch.setattr(runner.machine, "load", load)
    assert runner.programs.program(sizes[0]) is runner.programs.compiled.get(
        sizes[0], runner.programs.compiler()
    )
    assert runner.programs.choose(step(8), 1) == sizes[0]


def test_a_program_that_moves_tensors_is_not_loaded_beside_launches(
    on_gpu: runner_module.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one gives weights their layout: a launch could read them meanwhile."""
    runner, one = on_gpu, on_gpu.programs.bucket(1, 1, 1)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    runner.programs.compile_ahead(first=[one])
    wait_until(lambda: one in set(runner.programs.compiled))
    assert (one, False) not in runner.programs.loaded
    assert runner.memory.relayouts == 0
    runner.programs.program(one)
    assert runner.memory.relayouts > 0
    program = runner.programs.compiled.get(one, runner.programs.compiler())
    assert isinstance(runner.machine, EmulatedMachine)
    assert not runner.machine.moves(program, runner.memory)
