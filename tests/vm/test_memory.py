"""Memory binds without copying, allocates zeros, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megavm.instructions.noop import Noop
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.layout import ROWS, Layout, units
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32, Part, TensorKind, TensorSpec

WEIGHT = TensorSpec("w", (2, 3), F32, TensorKind.WEIGHT)


def test_a_bound_tensor_is_not_copied() -> None:
    memory, value = Memory(), torch.ones(2, 3)
    memory.bind(WEIGHT, value)
    assert memory["w"].data_ptr() == value.data_ptr()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3, 2), r"w has shape \(3, 2\), expected \(2, 3\)"),
        (torch.ones(2, 3).bfloat16(), "w holds torch.bfloat16, expected torch.float32"),
        (torch.ones(3, 2).T, "w must be contiguous"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Memory().bind(WEIGHT, value)


def test_a_name_is_bound_once() -> None:
    memory = Memory()
    memory.bind(WEIGHT, torch.ones(2, 3))
    with pytest.raises(ValueError, match="w is in this memory already"):
        memory.bind(WEIGHT, torch.ones(2, 3))


def test_allocating_again_keeps_the_contents_and_refuses_another_shape() -> None:
    memory = Memory()
    spec = TensorSpec("y", (2, 2), F32, TensorKind.ACTIVATION)
    memory.allocate([spec])
    memory["y"].fill_(7)
    memory.allocate([spec])
    assert bool((memory["y"] == 7).all())
    with pytest.raises(ValueError, match="y is in memory as"):
        memory.allocate([TensorSpec("y", (3, 2), F32, TensorKind.ACTIVATION)])


def test_a_tagged_tensor_is_words_of_value_and_epoch() -> None:
    memory = Memory()
    spec = TensorSpec("t", (2, 4), BF16, TensorKind.ACTIVATION, tagged=True)
    memory.allocate([spec])
    storage = memory.storage("t")
    assert storage.shape == (2, 2, 2)
    storage[1, 0, 0] = torch.tensor([1.5, -2.0]).bfloat16().view(torch.int32)
    assert memory["t"].tolist() == [[0, 0, 0, 0], [1.5, -2.0, 0, 0]]


def test_a_tagged_tensor_may_be_a_single_word() -> None:
    memory = Memory()
    memory.allocate([TensorSpec("t", (1, 2), BF16, TensorKind.ACTIVATION, tagged=True)])
    memory.write("t", torch.tensor([[1.5, -2.0]]))
    assert memory["t"].tolist() == [[1.5, -2.0]]


def test_a_copy_shares_weights_and_nothing_else() -> None:
    memory = Memory()
    memory.bind(WEIGHT, torch.ones(2, 3))
    memory.allocate([TensorSpec("y", (2, 2), F32, TensorKind.ACTIVATION)])
    twin = memory.copy()
    twin["y"].fill_(1)
    assert bool((memory["y"] == 0).all())
    assert twin["w"].data_ptr() == memory["w"].data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (0, 3)}, "every size must be a positive integer"),
        ({"shape": ()}, "every size must be a positive integer"),
        ({"shape": (4.0, 6)}, r"shape \(4.0, 6\): every size must be a positive integer"),
        ({"kind": TensorKind.WEIGHT, "tagged": True}, "is tagged but weight"),
        ({"shape": (2, 3), "dtype": BF16, "tagged": True}, "whole 4-byte words"),
        ({"parts": (Part("p", 2),)}, "s has parts but is activation, not weight"),
        (
            {"kind": TensorKind.WEIGHT, "parts": (Part("p", 2), Part("q", 1))},
            r"s has 2 rows, its parts have 2 \+ 1",
        ),
        (
            {"kind": TensorKind.WEIGHT, "parts": (Part("p", 2), Part("q", 0))},
            "part q of tensor s has 0 rows",
        ),
    ],
)
def test_an_impossible_spec_is_refused(arguments: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {"shape": (2, 2), "dtype": F32, "kind": TensorKind.ACTIVATION}
    with pytest.raises(ValueError, match=message):
        TensorSpec("s", **(usual | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [CpuMachine, ReferenceMachine])
def test_half_a_step_is_refused_and_leaves_the_epoch(make: Callable[[], Machine]) -> None:
    memory = Memory()
    executable = make().load(Program.build([], [Noop()], [[0]]), memory)
    with pytest.raises(ValueError, match=r"the epoch would be 1\.5: a run has a whole number of"):
        executable.run(1.5)  # type: ignore[arg-type]
    assert memory.epoch == 0
    executable.run(2)
    assert memory.epoch == 2


# Weights in parts.

JOINED = TensorSpec("qk", (5, 3), F32, TensorKind.WEIGHT, parts=(Part("q", 4), Part("k", 1)))


def in_parts() -> tuple[Memory, torch.Tensor, torch.Tensor]:
    memory, q, k = Memory(), torch.randn(4, 3), torch.randn(1, 3)
    memory.bind(JOINED, q, k)
    return memory, q, k


def test_parts_are_bound_without_a_copy_and_read_as_one_tensor() -> None:
    memory, q, k = in_parts()
    assert [p.data_ptr() for p in memory.stored_parts("qk")] == [q.data_ptr(), k.data_ptr()]
    assert torch.equal(memory["qk"], torch.cat([q, k]))
    assert memory.bytes == 5 * 3 * 4
    memory.require([JOINED], rows=True)
    with pytest.raises(ValueError, match="qk is stored in 2 parts, not as one tensor"):
        memory.storage("qk")


def test_a_tensor_with_parts_may_be_bound_or_allocated_as_one() -> None:
    memory, value = Memory(), torch.randn(5, 3)
    memory.bind(JOINED, value)
    assert memory["qk"].data_ptr() == value.data_ptr()
    other = Memory()
    other.allocate([JOINED])
    other["qk"].fill_(2)
    assert bool((other.storage("qk") == 2).all())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(4, 3), (1, 3), (1, 3)], "qk of 2 parts cannot be bound to 3 values"),
        ([], "qk of 2 parts cannot be bound to 0 values"),
        ([(1, 3), (4, 3)], r"tensor q has shape \(1, 3\), expected \(4, 3\)"),
        ([(4, 3), (1, 2)], r"tensor k has shape \(1, 2\), expected \(1, 3\)"),
        ([(4, 3)], r"tensor qk has shape \(4, 3\), expected \(5, 3\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(shapes: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Memory().bind(JOINED, *(torch.ones(shape) for shape in shapes))


@pytest.mark.parametrize("count", [0, 2])
def test_a_tensor_without_parts_is_bound_to_one_value(count: int) -> None:
    with pytest.raises(ValueError, match=f"w of 0 parts cannot be bound to {count} values"):
        Memory().bind(WEIGHT, *[torch.ones(1, 3)] * count)


@pytest.mark.parametrize("layout", [ROWS, units(), units(1), units(3)], ids=str)
def test_a_relayout_joins_the_parts(layout: Layout) -> None:
    spec = TensorSpec("qk", (6, 3), F32, TensorKind.WEIGHT, parts=(Part("q", 4), Part("k", 2)))
    memory, q, k = Memory(), torch.randn(4, 3), torch.randn(2, 3)
    memory.bind(spec, q, k)
    memory.relayout("qk", layout)
    assert memory.layout("qk") == layout
    assert torch.equal(memory.storage("qk"), layout.pack(spec, torch.cat([q, k])))
    assert torch.equal(memory["qk"], torch.cat([q, k]))
    assert memory.relayouts == 1
    memory.relayout("qk", layout)
    assert memory.relayouts == 1


def test_values_are_written_to_the_parts() -> None:
    memory, q, k = in_parts()
    value = torch.randn(5, 3)
    memory.write("qk", value)
    assert torch.equal(q, value[:4])
    assert torch.equal(k, value[4:])


@pytest.mark.parametrize("layout", [None, ROWS, units()], ids=str)
def test_contents_pass_between_parts_and_other_forms(layout: Layout | None) -> None:
    memory, q, k = in_parts()
    other = Memory()
    other.allocate([JOINED])
    if layout is None:
        other = Memory()
        other.bind(JOINED, torch.zeros(4, 3), torch.zeros(1, 3))
    else:
        other.relayout("qk", layout)
    other.take("qk", memory)
    assert torch.equal(other["qk"], torch.cat([q, k]))
    q.zero_()
    memory.take("qk", other)
    assert torch.equal(memory["qk"], other["qk"])
    assert bool(q.any())


def test_a_copy_shares_the_parts_and_another_device_gets_its_own() -> None:
    memory, q, k = in_parts()
    assert [p.data_ptr() for p in memory.copy().stored_parts("qk")] == [q.data_ptr(), k.data_ptr()]
    assert [p.shape for p in memory.copy("meta").stored_parts("qk")] == [(4, 3), (1, 3)]
    memory.relayout("qk", units())
    assert [p.shape for p in memory.copy("meta").stored_parts("qk")] == [(5, 3)]


def test_a_joined_tensor_has_the_parts_of_its_parts() -> None:
    joined = TensorSpec.joined("wqk", [WEIGHT, JOINED])
    assert joined.shape == (7, 3)
    assert joined.parts == (("w", 2), ("q", 4), ("k", 1))
    with pytest.raises(ValueError, match="tensor both cannot join"):
        TensorSpec.joined("both", [WEIGHT, TensorSpec("v", (2, 4), F32, TensorKind.WEIGHT)])


@pytest.mark.parametrize("layout", [None, ROWS, units()], ids=str)
def test_a_part_is_read_and_written_under_its_own_name(layout: Layout | None) -> None:
    memory, q, _ = in_parts()
    if layout is not None:
        memory.relayout("qk", layout)
    assert "k" in memory
    assert "v" not in memory
    assert memory.spec("k") == TensorSpec("k", (1, 3), F32, TensorKind.WEIGHT)
    value = torch.randn(1, 3)
    memory.write("k", value)
    assert torch.equal(memory["k"], value)
    assert torch.equal(memory["q"], q)
    assert torch.equal(memory["qk"], torch.cat([q, value]))
    with pytest.raises(ValueError, match=r"tensor k has shape \(1, 3\), not \(2, 3\)"):
        memory.write("k", torch.ones(2, 3))
    for use in (memory.spec, memory.__getitem__, lambda name: memory.write(name, value)):
        with pytest.raises(KeyError, match="v"):
            use("v")


def test_a_part_that_is_a_tensor_of_its_own_has_the_values_of_the_other() -> None:
    own = TensorSpec("q", (4, 3), F32, TensorKind.WEIGHT)
    memory, q = Memory(), torch.randn(4, 3)
    memory.bind(own, q)
    memory.allocate([JOINED])
    assert torch.equal(memory["qk"], torch.cat([q, torch.zeros(1, 3)]))
    memory.write("q", q + 1)
    assert torch.equal(memory.storage("q"), memory["qk"][:4])
    other, q, _ = in_parts()
    other.allocate([own])
    assert torch.equal(other.storage("q"), q)


def test_a_part_cannot_be_bound_to_other_values() -> None:
    own = TensorSpec("q", (4, 3), F32, TensorKind.WEIGHT)
    memory, q, _ = in_parts()
    with pytest.raises(ValueError, match="q is in this memory already, with other values, as a p"):
        memory.bind(own, q + 1)
    memory.bind(own, q)
