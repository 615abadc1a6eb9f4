"""Memory: the named tensors that programs address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megavm.vm.isa import DType, TensorSpec

TORCH_DTYPE = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.I32: torch.int32}


class Memory:
    """Tensors by name, on one device. Programs of one model share a memory.

    A tensor is bound (weights: no copy is made) or allocated, filled with zeros. A tagged tensor is stored
    as int32 of shape [rows, words, 2]: the value's bits, then the epoch that wrote them; everything else
    in its own shape and dtype, contiguous.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._specs: dict[str, TensorSpec] = {}
        self._storage: dict[str, torch.Tensor] = {}
        self.epoch = 0  # steps run on this memory so far; the tag of the last step

    def __contains__(self, name: object) -> bool:
        return name in self._storage

    def __iter__(self) -> Iterator[str]:
        return iter(self._storage)

    def bind(self, spec: TensorSpec, value: torch.Tensor) -> None:
        """Use ``value`` as the tensor of ``spec``, without copying it.

        Raises ValueError when name, shape, dtype, device or layout do not fit.
        """
        if spec.name in self._storage:
            raise ValueError(f"tensor {spec.name} is in this memory already")
        if spec.tagged:
            raise ValueError(f"tensor {spec.name} is tagged: it can only be allocated")
        if tuple(value.shape) != spec.shape:
            raise ValueError(
                f"tensor {spec.name} has shape {tuple(value.shape)}, expected {spec.shape}"
            )
        if value.dtype != TORCH_DTYPE[spec.dtype]:
            raise ValueError(
                f"tensor {spec.name} holds {value.dtype}, expected {TORCH_DTYPE[spec.dtype]}"
            )
        if value.device != self.device or not value.is_contiguous():
            raise ValueError(
                f"tensor {spec.name} must be contiguous and on {self.device}; it is on {value.device} "
                f"with strides {value.stride()}"
            )
        self._specs[spec.name] = spec
        self._storage[spec.name] = value

    def allocate(self, specs: Iterable[TensorSpec]) -> None:
        """Allocate what is not there yet.

        Raises ValueError when a tensor of the same name but another kind, shape or dtype is there.
        """
        for spec in specs:
            present = self._specs.get(spec.name)
            if present is None:
                self._specs[spec.name] = spec
                shape: tuple[int, ...] = spec.shape
                dtype = TORCH_DTYPE[spec.dtype]
                if spec.tagged:
                    shape = (spec.rows, spec.columns * spec.dtype.size // 4, 2)
                    dtype = torch.int32
                self._storage[spec.name] = torch.zeros(shape, dtype=dtype, device=self.device)
            elif present != spec:
                raise ValueError(f"tensor {spec.name} is in memory as {present}, needed as {spec}")

    def spec(self, name: str) -> TensorSpec:
        """What the tensor was bound or allocated as. Raises KeyError when it is not there."""
        return self._specs[name]

    def storage(self, name: str) -> torch.Tensor:
        """The bytes that machines work on (see the class for the layout of tagged tensors)."""
        return self._storage[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The values, in the shape and dtype of the spec. A view, but for a tagged tensor a copy."""
        storage, spec = self._storage[name], self._specs[name]
        if not spec.tagged:
            return storage
        values = storage[..., 0].contiguous().view(TORCH_DTYPE[spec.dtype])
        return values.reshape(spec.shape)

    def copy(self) -> Memory:
        """A memory of its own with the same contents; tensors that no program writes are shared."""
        twin = Memory(self.device)
        twin._specs = dict(self._specs)
        twin._storage = {
            name: t.clone() if self._specs[name].writable else t
            for name, t in self._storage.items()
        }
        twin.epoch = self.epoch
        return twin

    @property
    def bytes(self) -> int:
        """Bytes of all storage."""
        return sum(t.numel() * t.element_size() for t in self._storage.values())
