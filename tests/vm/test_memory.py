"""Memory binds without copying, allocates zeros, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch

from megavm.vm.isa import BF16, F32, TensorKind, TensorSpec
from megavm.vm.memory import Memory

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
        ({"shape": (0, 3)}, "every size must be positive"),
        ({"shape": ()}, "every size must be positive"),
        ({"kind": TensorKind.WEIGHT, "tagged": True}, "is tagged but weight"),
        ({"shape": (2, 3), "dtype": BF16, "tagged": True}, "whole 4-byte words"),
    ],
)
def test_an_impossible_spec_is_refused(arguments: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {"shape": (2, 2), "dtype": F32, "kind": TensorKind.ACTIVATION}
    with pytest.raises(ValueError, match=message):
        TensorSpec("s", **(usual | arguments))  # type: ignore[arg-type]
