"""Step memory: what the host writes arrives, and what launches choose comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from megavm.scheduler.engine.step import Step
from megavm.scheduler.engine.step_memory import DeviceStepMemory, StepMemory
from megavm.scheduler.llama.graph import Limits, step_tensors
from megavm.vm.cuda.copies import HostCopies, Words
from megavm.vm.cuda.driver import CudaError
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import Executable, MachineFault
from megavm.vm.memory import Memory
from megavm.vm.tensors import F32, TensorKind, TensorSpec

LIMITS = Limits(
    max_num_seqs=3,
    max_model_len=20,
    max_num_batched_tokens=8,
    max_logit_rows=3,
    num_blocks=9,
    block_size=4,
)


class Launched:
    """An executable that does its work when it is launched, and counts."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self.work = work
        self.calls: list[str] = []

    def launch(self, steps: int = 1) -> None:
        self.calls.append("launch")
        self.work(steps)

    def mark(self) -> Callable[[], None]:
        self.calls.append("mark")
        return self.finish

    def finish(self) -> None:
        self.calls.append("finish")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # as an executable waits for what follows its launches

    def run(self, steps: int = 1) -> None:
        self.launch(steps)
        self.finish()


def make(kind: type[StepMemory], device: str = "cpu") -> tuple[Memory, StepMemory]:
    memory = Memory(device)
    memory.allocate([TensorSpec("logits", (3, 5), F32, TensorKind.ACTIVATION)])
    return memory, kind(memory, step_tensors(LIMITS, 70))


def executable(work: Callable[[int], None]) -> tuple[Launched, Executable]:
    made = Launched(work)
    return made, cast(Executable, made)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


@pytest.fixture(params=["host", "device", "cuda"])
def made(request: pytest.FixtureRequest) -> tuple[Memory, StepMemory]:
    if request.param == "cuda":
        machine: CudaMachine = request.getfixturevalue("cuda_machine")
        return make(DeviceStepMemory, machine.memory_device)
    return make(StepMemory if request.param == "host" else DeviceStepMemory)


def test_what_the_host_writes_is_there_when_the_program_runs(
    made: tuple[Memory, StepMemory],
) -> None:
    memory, step = made
    seen: dict[str, torch.Tensor] = {}

    def work(steps: int) -> None:
        seen.update({name: memory[name].cpu().clone() for name in memory})

    step.arrays["row_position"][:3] = [4, 5, 6]
    step.arrays["sampling_real"][1] = 0.5
    step.write_blocks(2, 1, ints(7))
    step.write_tokens(2, ints(11, 12, 13))
    step.run(executable(work)[1], Step(ints(2), ints(2), ints(0), 3), 1)
    assert seen["step.row_position"].tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    assert seen["step.sampling_real"][1].unique().tolist() == [0.5]
    assert seen["step.block_table"][2].tolist() == [0, 7, 0, 0, 0]
    assert seen["step.tokens"][2, :4].tolist() == [11, 12, 13, 0]
    assert step.arrays["tokens"][2, :3].tolist() == [11, 12, 13]


def test_tokens_of_several_slots_are_there_too(made: tuple[Memory, StepMemory]) -> None:
    """More of them than a step has logit rows; one slot is written twice."""
    memory, step = made
    width = LIMITS.max_model_len + 1
    seen: list[list[list[int]]] = []

    def work(steps: int) -> None:
        seen.append(memory["step.tokens"].cpu().tolist())

    expected = np.zeros((LIMITS.max_num_seqs, width), np.int32)
    for launch in range(3):
        for slot, tokens in (
            (0, np.arange(1, width) + 100 * launch),
            (2, ints(7, 8, launch)),
            (1, ints(5 + launch)),
            (2, ints(9, launch)),
        ):
            step.write_tokens(slot, tokens.astype(np.int32))
            expected[slot, : len(tokens)] = tokens
        step.run(executable(work)[1], Step(ints(2), ints(0), ints(), 3), 1)
        assert seen[-1] == expected.tolist()


def test_only_the_words_that_the_host_has_written_move(made: tuple[Memory, StepMemory]) -> None:
    """A launch changes others, which stay as they are."""
    memory, step = made
    seen: list[list[int]] = []

    def work(steps: int) -> None:
        table = memory.storage("step.block_table")
        seen.append(table[1].tolist())
        table[1, 4] += 1

    rows, (_, program) = Step(ints(1), ints(0), ints(), 1), executable(work)
    step.write_blocks(1, 0, ints(3, 4, 5))
    step.run(program, rows, 1)
    step.write_blocks(1, 1, ints(6))
    step.write_blocks(1, 0, ints(7))  # fewer from the same column on
    step.write_blocks(1, 3, ints(8))
    step.run(program, rows, 1)
    step.run(program, rows, 1)
    assert seen == [[3, 4, 5, 0, 0], [7, 6, 5, 8, 1], [7, 6, 5, 8, 2]]
    assert step.arrays["block_table"][1, :4].tolist() == [7, 6, 5, 8]


def test_changed_rows_of_masks_and_biases_are_there_when_they_are_published(
    made: tuple[Memory, StepMemory],
) -> None:
    memory, step = made
    seen: dict[str, torch.Tensor] = {}

    def work(steps: int) -> None:
        seen.update({name: memory[name].cpu().clone() for name in memory})

    rows = Step(ints(2), ints(2), ints(0), 3)
    for value in (5, 6):
        step.arrays["allowed"][1] = [value, -value, 1 << 30]
        step.arrays["bias"][2] = value / 2
        step.publish("allowed", 1)
        step.publish("bias", 2)
        step.publish("bias", 2)
        step.run(executable(work)[1], rows, 1)
        assert seen["step.allowed"].tolist() == [[0] * 3, [value, -value, 1 << 30], [0] * 3]
        assert seen["step.bias"].unique().tolist() == [0, value / 2]
        assert seen["step.bias"][2].unique().tolist() == [value / 2]


@pytest.mark.parametrize("steps", [1, 7])
def test_chosen_tokens_come_back_for_logit_rows(
    made: tuple[Memory, StepMemory], steps: int
) -> None:
    memory, step = made

    def work(steps: int) -> None:
        tokens = memory.storage("step.tokens")
        for slot, position in ((0, 4), (2, 9)):
            for i in range(steps):
                tokens[slot, position + 1 + i] = 100 * slot + i + 1

    rows = Step(ints(0, 1, 1, 2), ints(4, 0, 1, 9), ints(0, 3), 10)
    launched, program = executable(work)
    step.run(program, rows, steps)
    assert [call for call in launched.calls if call != "mark"] == ["launch", "finish"]
    tokens = step.arrays["tokens"]
    assert tokens[0, 5 : 5 + steps].tolist() == [i + 1 for i in range(steps)]
    assert tokens[2, 10 : 10 + steps].tolist() == [200 + i + 1 for i in range(steps)]
    assert int((tokens != 0).sum()) == 2 * steps


@pytest.mark.parametrize("steps", [1, 7])
def test_chosen_tokens_come_back_for_one_sequence(
    made: tuple[Memory, StepMemory], steps: int
) -> None:
    memory, step = made

    def work(steps: int) -> None:
        tokens = memory.storage("step.tokens")
        tokens[1, 5 : 5 + steps] = torch.arange(1, steps + 1, dtype=torch.int32)

    step.run(executable(work)[1], Step(ints(1, 1), ints(3, 4), ints(1), 5), steps)
    tokens = step.arrays["tokens"]
    assert tokens[1, 5 : 5 + steps].tolist() == list(range(1, steps + 1))
    assert int((tokens != 0).sum()) == steps


def test_places_beyond_the_table_are_left_out(made: tuple[Memory, StepMemory]) -> None:
    _, step = made
    step.run(executable(lambda steps: None)[1], Step(ints(2), ints(18), ints(0), 19), 7)
    assert not step.arrays["tokens"].any()


def test_steps_without_logit_rows_bring_nothing(made: tuple[Memory, StepMemory]) -> None:
    _, step = made
    step.run(executable(lambda steps: None)[1], Step(ints(0), ints(0), ints(), 1), 1)
    assert not step.arrays["tokens"].any()


def test_logits_are_those_of_the_last_step(made: tuple[Memory, StepMemory]) -> None:
    memory, step = made
    memory.write("logits", torch.arange(15.0).reshape(3, 5))
    assert step.logits[1].tolist() == [5, 6, 7, 8, 9]
    assert step.logits[:2].shape == (2, 5)
    assert step.logits[1].dtype == np.float32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_may_be_started_before_the_one_in_progress_is_read(
    request: pytest.FixtureRequest, device: str
) -> None:
    if device == "cuda":
        device = request.getfixturevalue("cuda_machine").memory_device
    memory, made = make(DeviceStepMemory, device)
    assert isinstance(made, DeviceStepMemory)
    seen: list[list[int]] = []

    def work(steps: int) -> None:
        tokens = memory.storage("step.tokens")
        slots = memory["step.row_sequence"].cpu()[:2].tolist()
        positions = memory["step.row_position"].cpu()[:2].tolist()
        seen.append(tokens[0, :4].tolist())
        for slot, position in zip(slots, positions, strict=True):
            tokens[slot, position + 1] = 100 * slot + position

    _, program = executable(work)
    finishes = []
    for position in range(2, 5):
        made.arrays["row_sequence"][:2] = [0, 2]
        made.arrays["row_position"][:2] = position
        if position == 3:  # slot 0 belongs to another sequence from now on
            made.write_tokens(0, ints(11, 12, 13, 14))
        step = Step(ints(0, 2), ints(position, position), ints(0, 1), position + 1)
        finishes.append(made.start(program, step, 1))
        if position == 3:
            gone = np.array([True, False, False])
            finishes.pop(0)(gone)
            assert made.arrays["tokens"][0, :5].tolist() == [11, 12, 13, 14, 0]
            assert made.arrays["tokens"][2, :5].tolist() == [0, 0, 0, 202, 0]
        if position == 4:
            finishes.pop(0)(None)
    finishes.pop(0)(None)
    assert seen == [[0, 0, 0, 0], [11, 12, 13, 14], [11, 12, 13, 14]]
    assert made.arrays["tokens"][0, :6].tolist() == [11, 12, 13, 14, 3, 4]
    assert made.arrays["tokens"][2, :6].tolist() == [0, 0, 0, 202, 203, 204]


class LateCopies(HostCopies):
    """Copies that run as late as a GPU may run them: when somebody waits for them."""

    def __init__(self) -> None:
        self.late: list[Callable[[], None]] = []

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.late.append(lambda: super(LateCopies, self).send(target, source))

    def scatter(self, words: Words, table: torch.Tensor, count: int) -> None:
        self.late.append(lambda: super(LateCopies, self).scatter(words, table, count))

    def mark(self) -> Callable[[], None]:
        return self.run

    def run(self) -> None:
        for copy in self.late:
            copy()
        self.late.clear()


def make_late() -> tuple[Memory, DeviceStepMemory, LateCopies]:
    memory, made = make(DeviceStepMemory)
    assert isinstance(made, DeviceStepMemory)
    copies = LateCopies()
    made._copies = [copies]
    return memory, made, copies


def test_what_the_host_writes_for_the_launch_behind_does_not_reach_the_one_before() -> None:
    """Launch 2 waits behind launch 1, and its copies with it, when launch 3 is prepared."""
    memory, made, copies = make_late()
    _, program = executable(lambda steps: None)
    step = Step(ints(0), ints(0), ints(0), 1)
    first = made.start(program, step, 1)
    copies.run()
    for slot, value in ((0, 11), (1, 12)):
        made.write_tokens(slot, ints(value, value))
        made.write_blocks(slot, 1, ints(value))
        made.arrays["allowed"][slot] = value
        made.publish("allowed", slot)
    second = made.start(program, step, 1)
    first(None)
    made.write_tokens(0, ints(21, 21))
    made.write_tokens(1, ints(22, 22))
    made.write_blocks(1, 1, ints(22))
    made.arrays["allowed"][:] = 23
    copies.run()
    assert memory["step.tokens"][:2, :2].tolist() == [[11, 11], [12, 12]]
    assert memory["step.block_table"][:2, 1].tolist() == [11, 12]
    assert memory["step.allowed"][:2, 0].tolist() == [11, 12]
    second(None)


def test_one_prompt_is_copied_as_it_was_when_its_launch_began() -> None:
    memory, made, copies = make_late()
    _, program = executable(lambda steps: None)
    made.write_tokens(0, ints(11, 12))
    finish = made.start(program, Step(ints(0), ints(0), ints(0), 1), 1)
    made.write_tokens(0, ints(21, 22))
    copies.run()
    assert memory["step.tokens"][0, :2].tolist() == [11, 12]
    finish(None)


def test_an_error_of_the_driver_is_a_fault() -> None:
    _, made = make(DeviceStepMemory)
    assert isinstance(made, DeviceStepMemory)

    class Broken(HostCopies):
        def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
            raise CudaError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemcpyHtoDAsync")

    made._copies = [Broken()]
    with pytest.raises(MachineFault, match="cuMemcpyHtoDAsync failed with CUDA_ERROR_OUT_OF"):
        made.start(executable(lambda steps: None)[1], Step(ints(0), ints(0), ints(0), 1), 1)


def test_launches_that_find_a_gpu_with_nothing_to_run_are_late() -> None:
    _, made = make(DeviceStepMemory)
    assert isinstance(made, DeviceStepMemory)

    class Timed(HostCopies):
        is_running = False

        def is_over(self, event: Any) -> bool:
            return not self.is_running

    copies = Timed()
    made._copies = [copies]
    _, program = executable(lambda steps: None)
    for copies.is_running in (False, True, True, False):
        made.start(program, Step(ints(0), ints(0), ints(0), 1), 1)(None)
    assert made.late_launches == 2


class Beside(HostCopies):
    """Copies to a GPU that reach a kernel that runs; notes where they go."""

    beside = True

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.sent: list[tuple[str, int]] = []  # (tensor, first word)

    def send_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for name in ("step.allowed", "step.masks_written"):
            offset = target.data_ptr() - self.memory.storage(name).data_ptr()
            if 0 <= offset < self.memory.spec(name).bytes:
                self.sent.append((name, offset // 4))
        self.send(target, source)


def test_masks_reach_a_launch_that_runs_and_their_number_comes_last() -> None:
    memory, made = make(DeviceStepMemory)
    assert isinstance(made, DeviceStepMemory)
    assert not made.can_await_masks
    copies = Beside(memory)
    made._copies = [copies]
    assert made.can_await_masks
    _, program = executable(lambda steps: None)

    def numbers() -> list[int]:
        names = ("step.masks_written", "step.masks_awaited")
        return [int(memory[name][0]) for name in names]

    def start(awaits: bool) -> Callable[[Any], None]:
        step = Step(ints(0), ints(0), ints(0), 1, sampled=True, awaits_masks=awaits)
        return made.start(program, step, 1)

    start(False)(None)
    assert numbers() == [0, 0]
    finish = start(True)
    assert numbers() == [0, 1]
    made.arrays["allowed"][1] = [5, 6, 7]
    made.publish("allowed", 1)
    made.give_masks()
    assert copies.sent == [("step.allowed", 3), ("step.masks_written", 0)]
    assert memory["step.allowed"][1].tolist() == [5, 6, 7]
    assert numbers() == [1, 1]
    finish(None)
    made.give_masks()  # nothing awaits any
    start(False)(None)
    assert numbers() == [1, 1]
    assert len(copies.sent) == 2
    made._given = made._awaited = 2**31 - 1  # numbers go on without end
    finish = start(True)
    assert numbers()[1] == -(2**31)
    made.give_masks()
    assert numbers() == [-(2**31)] * 2
    finish(None)


def test_a_launch_whose_masks_nobody_writes_is_released() -> None:
    """When it is waited for, or when an interrupt has lost it and the next one starts."""
    memory, made = make(DeviceStepMemory)
    assert isinstance(made, DeviceStepMemory)
    copies = Beside(memory)
    made._copies = [copies]
    _, program = executable(lambda steps: None)
    step = Step(ints(0), ints(0), ints(0), 1, sampled=True, awaits_masks=True)
    made.arrays["allowed"][1] = 5
    finish = made.start(program, step, 1)
    made.publish("allowed", 1)
    finish(None)
    assert copies.sent == [("step.masks_written", 0)]  # without the masks
    made.start(program, step, 1)
    made.start(program, step, 1)
    assert [int(memory[f"step.masks_{name}"][0]) for name in ("written", "awaited")] == [2, 3]


def test_masks_that_could_not_be_sent_can_be_sent_again() -> None:
    memory, made = make(DeviceStepMemory)
    assert isinstance(made, DeviceStepMemory)
    copies = Beside(memory)
    made._copies = [copies]
    made.start(
        executable(lambda steps: None)[1],
        Step(ints(0), ints(0), ints(0), 1, sampled=True, awaits_masks=True),
        1,
    )
    made.arrays["allowed"][1] = 5
    made.publish("allowed", 1)
    with pytest.MonkeyPatch.context() as patch:

        def broken(target: torch.Tensor, source: torch.Tensor) -> None:
            raise CudaError("CUDA_ERROR_UNKNOWN", "cuMemcpyHtoDAsync")

        patch.setattr(copies, "send_beside", broken)
        with pytest.raises(MachineFault, match="CUDA_ERROR_UNKNOWN"):
            made.give_masks()
    assert int(memory["step.masks_written"][0]) == 0
    made.give_masks()
    assert int(memory["step.masks_written"][0]) == 1
    assert memory["step.allowed"][1].tolist() == [5] * 3


def test_masks_come_to_a_gpu_while_its_kernel_runs(cuda_machine: CudaMachine) -> None:
    memory, made = make(DeviceStepMemory, cuda_machine.memory_device)
    assert isinstance(made, DeviceStepMemory)
    assert made.can_await_masks
    beside = torch.cuda.Stream()

    def written() -> list[int]:
        with torch.cuda.stream(beside):
            return (
                memory.storage("step.masks_written").tolist()
                + memory.storage("step.allowed")[1].tolist()
            )

    _, program = executable(lambda steps: torch.cuda._sleep(1_000_000_000))
    step = Step(ints(0), ints(0), ints(0), 1, sampled=True, awaits_masks=True)
    with made.current():
        finish = made.start(program, step, 1)
    assert written() == [0, 0, 0, 0]
    made.arrays["allowed"][1] = [5, 6, 7]
    made.publish("allowed", 1)
    made.give_masks()
    limit = time.monotonic() + 0.2  # the kernel takes half a second
    while written() != [1, 5, 6, 7]:
        assert time.monotonic() < limit
    assert not made._copies[0].is_over(made._last_end)
    finish(None)
