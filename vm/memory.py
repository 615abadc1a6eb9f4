"""Memory: the named tensors that programs address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from megavm.vm.huge_pages import zeros_in_huge_pages
from megavm.vm.layout import COPIES, ROWS, Layout
from megavm.vm.tensors import DType, Part, TensorKind, TensorSpec
from megavm.vm.words import EMPTY, Turns, from_copies, tag_of, to_copies

TORCH_DTYPE = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.I32: torch.int32}

Device = torch.device | str
# (shape, dtype) -> zeros for each rank, at places that all ranks know
AllocateShares = Callable[[tuple[int, ...], torch.dtype], Sequence[torch.Tensor]]


class WordStore(Protocol):
    """Where a machine keeps tagged tensors as GPUs store them, for all ranks of a memory."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """For each rank, the copies of a tensor: [COPIES, *shape]."""

    def fill(self, value: int) -> None:
        """Fill all that was allocated with a word, int32."""


def tagged_values(words: torch.Tensor, dtype: DType) -> torch.Tensor:
    """A copy of the values of tagged words, int32 [rows, words, value and tag]."""
    # NOTE: ``contiguous`` leaves a single word as it is, and ``view`` refuses its strides.
    values = words[..., 0].clone(memory_format=torch.contiguous_format)
    return values.view(TORCH_DTYPE[dtype])


class Memory:
    """Tensors by name, on one device. Programs of one model share a memory.

    A tensor is bound (weights, without a copy) or allocated and filled with zeros. A tagged tensor is stored
    as int32 [rows, words, 2]: the value's bits, then the epoch that wrote them; a CudaMachine stores it in
    another form (vm/words.py), of which ``tagged_words`` makes this one. Any other tensor is stored
    contiguously in its own shape and dtype, unless a machine has given it another layout (vm/layout.py). A
    tensor that is bound in parts (TensorSpec) is stored in parts until ``relayout`` joins them.

    ``spec``, ``[name]`` and ``write`` also take the name of a part. If a part is a tensor of its own as well,
    ``write`` of its name stores both, and ``allocate`` gives the one the values of the other.

    The memory of a machine of several ranks is that of rank 0; ``ranks`` has all of them, in order, itself
    included. They have the same tensors and one epoch: ``allocate`` allocates on all ranks, and all other
    methods concern one. Ranks on one device may be bound to the same storage of a read-only tensor.

    ``device``: of all ranks, or a sequence with one for each rank. ``allocate_shares`` allocates tensors with
    shares, if all ranks must be able to write them. ``Machine.memory`` chooses both.
    """

    def __init__(
        self,
        device: Device | Sequence[Device] = "cpu",
        ranks: int = 1,
        allocate_shares: AllocateShares | None = None,
    ) -> None:
        devices = [device] * ranks if isinstance(device, torch.device | str) else list(device)
        self.device = torch.device(devices[0])
        self._others = tuple(Memory(other) for other in devices[1:])
        # NOTE: no rank refers to the first one: memory in a cycle would stay until it is collected.
        self._epoch = [0]
        self.turns = Turns()
        self.words: WordStore | None = None  # where a machine keeps tagged tensors
        for other in self._others:
            other._epoch, other.turns = self._epoch, self.turns
        self._allocate_shares = allocate_shares
        self._specs: dict[str, TensorSpec] = {}
        self._storage: dict[str, tuple[torch.Tensor, ...]] = {}  # one, or one for each part
        self._layouts: dict[str, Layout] = {}
        self.relayouts = 0  # number of times that storage has moved

    @property
    def ranks(self) -> tuple[Memory, ...]:
        """The memories of all ranks."""
        return self, *self._others

    @property
    def epoch(self) -> int:
        """Steps run on this memory so far; the tag of the last step."""
        return self._epoch[0]

    @epoch.setter
    def epoch(self, value: int) -> None:
        if not isinstance(value, int):
            raise ValueError(f"the epoch would be {value}: a run has a whole number of steps")
        self._epoch[0] = value

    def __contains__(self, name: object) -> bool:
        return name in self._storage or any(self._places_of_part(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._storage)

    def _places_of_part(self, name: object) -> Iterator[tuple[str, slice]]:
        """The tensors that have a part of this name, with its rows in each."""
        for spec in self._specs.values():
            begin = 0
            for part in spec.parts:
                if part.name == name:
                    yield spec.name, slice(begin, begin + part.rows)
                begin += part.rows

    def _first_place(self, name: str) -> tuple[str, slice]:
        """The first of the tensors that have a part of this name. Raises KeyError when there is none."""
        for place in self._places_of_part(name):
            return place
        raise KeyError(name)

    def bind(self, spec: TensorSpec, *values: torch.Tensor) -> None:
        """Use one value, or one for each part, as the tensor of ``spec``, without copying them.

        Raises ValueError when name, number, shape, dtype, device or layout do not fit, and when it is a part
        of a tensor that has other values.
        """
        if spec.name in self._storage:
            raise ValueError(f"tensor {spec.name} is in this memory already")
        if spec.tagged:
            raise ValueError(f"tensor {spec.name} is tagged: it can only be allocated")
        parts = spec.parts if len(values) > 1 else (Part(spec.name, spec.rows),)
        if len(values) != len(parts):
            raise ValueError(
                f"tensor {spec.name} of {len(spec.parts)} parts cannot be bound to {len(values)} values"
            )
        for part, value in zip(parts, values, strict=True):
            shape = (part.rows, *spec.shape[1:])
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"tensor {part.name} has shape {tuple(value.shape)}, expected {shape}"
                )
            if value.dtype != TORCH_DTYPE[spec.dtype]:
                raise ValueError(
                    f"tensor {part.name} holds {value.dtype}, expected {TORCH_DTYPE[spec.dtype]}"
                )
            if value.device != self.device or not value.is_contiguous():
                raise ValueError(
                    f"tensor {part.name} must be contiguous and on {self.device}; it is on "
                    f"{value.device} with strides {value.stride()}"
                )
        for owner, rows in self._places_of_part(spec.name):
            if not torch.equal(self[owner][rows], torch.cat(values)):
                raise ValueError(
                    f"tensor {spec.name} is in this memory already, with other values, as a part of"
                    f" {owner}: write it"
                )
        self._specs[spec.name] = spec
        self._layouts[spec.name] = ROWS
        self._storage[spec.name] = values

    def allocate(self, specs: Iterable[TensorSpec]) -> None:
        """Allocate the tensors that are not present yet, on all ranks.

        Raises ValueError when a tensor of the same name is present with another kind, shape or dtype.
        """
        for spec in specs:
            missing = [rank for rank in self.ranks if spec.name not in rank._specs]
            for rank in self.ranks:
                if rank not in missing:
                    rank.require([spec])
            if not missing:
                continue
            shape, dtype = _storage_of(spec)
            if spec.shares > 1 and self._allocate_shares is not None:
                storage = self._allocate_shares(shape, dtype)
            else:
                storage = [_zeros(shape, dtype, rank.device) for rank in missing]
            for rank, own in zip(missing, storage, strict=True):
                if spec.kind is TensorKind.WEIGHT:
                    parts = spec.parts or (Part(spec.name, spec.rows),)
                    split = torch.split(own, [part.rows for part in parts])
                    for part, rows in zip(parts, split, strict=True):
                        if part.name in rank:
                            rows.copy_(rank[part.name])
                rank._specs[spec.name] = spec
                rank._layouts[spec.name] = ROWS
                rank._storage[spec.name] = (own,)

    def spec(self, name: str) -> TensorSpec:
        """The spec that the tensor was bound or allocated with. Raises KeyError when it is absent."""
        if name in self._specs:
            return self._specs[name]
        owner, rows = self._first_place(name)
        whole = self._specs[owner]
        return TensorSpec(name, (rows.stop - rows.start, *whole.shape[1:]), whole.dtype, whole.kind)

    def require(self, specs: Iterable[TensorSpec], *, rows: bool = False) -> None:
        """Check that a program's tensors are present and, with ``rows``, in natural order.

        Raises ValueError when one is missing, is another kind, shape or dtype, or has another layout.
        """
        for spec in specs:
            present = self._specs.get(spec.name)
            if present is None:
                raise ValueError(f"tensor {spec.name} of the program is not in memory")
            if present != spec:
                raise ValueError(f"tensor {spec.name} is in memory as {present}, needed as {spec}")
            layout = self._layouts[spec.name]
            if rows and layout != ROWS:
                raise ValueError(f"tensor {spec.name} has the layout {layout}, not rows")

    def storage(self, name: str) -> torch.Tensor:
        """The bytes that machines work on (see the class for tagged tensors and layouts).

        Raises ValueError when the tensor is stored in parts.
        """
        parts = self._storage[name]
        if len(parts) > 1:
            raise ValueError(f"tensor {name} is stored in {len(parts)} parts, not as one tensor")
        return parts[0]

    def stored_parts(self, name: str) -> tuple[torch.Tensor, ...]:
        """The storage of each part, in order; of the whole tensor if it is stored as one."""
        return self._storage[name]

    def layout(self, name: str) -> Layout:
        """The layout of the storage. Raises KeyError when the tensor is absent."""
        return self._layouts[name]

    def relayout(self, name: str, layout: Layout) -> None:
        """Store a tensor as one, in a layout; its storage moves if that changes anything.

        Raises ValueError when the tensor cannot have it.
        """
        spec, present = self._specs[name], self.layout(name)
        if layout == present and len(self._storage[name]) == 1:
            return
        layout.check(spec)
        if len(self._storage[name]) > 1:
            # Releases the parts before packing: with them the tensor would be in memory three times.
            self._storage[name] = (torch.cat(self._storage[name]),)
        if layout != present:
            packed = layout.pack(spec, present.unpack(spec, self.storage(name)))
            self._storage[name] = (packed,)
            self._layouts[name] = layout
        self.relayouts += 1

    def __getitem__(self, name: str) -> torch.Tensor:
        """The values in natural order, in the shape and dtype of the spec.

        A view if they are stored in that form, otherwise a copy. Change a tagged tensor, or one in parts or
        in another layout, with ``write``.
        """
        if name not in self._storage:
            owner, rows = self._first_place(name)
            return self[owner][rows]
        parts, spec = self._storage[name], self._specs[name]
        if spec.tagged:
            return tagged_values(self.tagged_words(name), spec.dtype).reshape(spec.shape)
        storage = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.layout(name).unpack(spec, storage)

    def tagged_words(self, name: str) -> torch.Tensor:
        """The words of a tagged tensor: int32 [rows, words, 2], value and tag. A copy of what a GPU stores."""
        storage = self.storage(name)
        if self.layout(name) != COPIES:
            return storage
        return from_copies(storage, self.turns.of(name), self.epoch, self.turns.ahead)

    def _store_words(self, name: str, words: torch.Tensor) -> None:
        storage = self.storage(name)
        if self.layout(name) != COPIES:
            storage.copy_(words)
        else:
            self._fill_copies(name, words, storage)

    def _fill_copies(self, name: str, words: torch.Tensor, copies: torch.Tensor) -> None:
        turns = self.turns
        to_copies(words.to(self.device), copies, turns.of(name), self.epoch, turns.ahead)

    def give_copies(self, names: Iterable[str]) -> None:
        """Store tagged tensors as GPUs do, in ``words``, on all ranks."""
        assert self.words is not None
        for name in names:
            if self.layout(name) == COPIES:
                continue
            shape, dtype = _storage_of(self._specs[name])
            stored = list(zip(self.ranks, self.words.allocate(shape[:2], dtype), strict=True))
            for rank, copies in stored:
                rank._fill_copies(name, rank.storage(name), copies)
            for rank, copies in stored:
                rank._storage[name], rank._layouts[name] = (copies,), COPIES

    def empty_words(self) -> None:
        """Empty all words that GPUs store, on all ranks."""
        if self.words is not None:
            self.words.fill(EMPTY)
        self.turns.restart()

    def write(self, name: str, value: torch.Tensor) -> None:
        """Store values given in natural order. Words of a tagged tensor get the tag of the next step.

        Raises ValueError when the shape is not that of the tensor.
        """
        shape = self.spec(name).shape
        if tuple(value.shape) != shape:
            raise ValueError(f"tensor {name} has shape {shape}, not {tuple(value.shape)}")
        for owner, rows in self._places_of_part(name):
            whole = self[owner]
            whole[rows] = value.to(self.device, whole.dtype)
            self._store(owner, whole)
        if name in self._storage:
            self._store(name, value)

    def _store(self, name: str, value: torch.Tensor) -> None:
        parts, spec = self._storage[name], self._specs[name]
        value = value.to(self.device, TORCH_DTYPE[spec.dtype]).contiguous()
        if spec.tagged:
            values = value.reshape(spec.rows, -1).view(torch.int32)
            tags = torch.full_like(values, tag_of(self.epoch + 1))
            self._store_words(name, torch.stack([values, tags], -1))
        else:
            packed = self.layout(name).pack(spec, value)
            sizes = [len(part) for part in parts]
            for part, rows in zip(parts, torch.split(packed, sizes), strict=True):
                part.copy_(rows)

    def take(self, name: str, other: Memory) -> None:
        """Copy a tensor's contents, tags included, from a memory on any device and in any layout."""
        mine, theirs = self._storage[name], other.stored_parts(name)
        alike = self.layout(name) == other.layout(name) and len(mine) == len(theirs)
        if self._specs[name].tagged:
            self._store_words(name, other.tagged_words(name))
        elif alike:
            for part, source in zip(mine, theirs, strict=True):
                part.copy_(source)
        else:
            self.write(name, other[name])

    def copy(self, device: torch.device | str | None = None) -> Memory:
        """An independent memory with the same contents, of all ranks, on this or another device.

        On the same device the copy shares tensors that no program writes. On another device all tensors are
        in natural order.
        """
        twin = self._copy(device)
        twin.epoch = self.epoch
        twin._others = tuple(other._copy(device) for other in self._others)
        for other in twin._others:
            other._epoch, other.turns = twin._epoch, twin.turns
        if self._allocate_shares is not None and twin.device == self.device:
            twin._allocate_shares = self._allocate_shares
            for name, spec in self._specs.items():
                if spec.shares > 1:
                    storage = self._allocate_shares(*_storage_of(spec))
                    for own, rank, source in zip(storage, twin.ranks, self.ranks, strict=True):
                        stored = source.tagged_words(name) if spec.tagged else source.storage(name)
                        rank._storage[name] = (own.copy_(stored),)
        return twin

    def _copy(self, device: torch.device | str | None) -> Memory:
        twin = Memory(self.device if device is None else device)
        twin._specs = dict(self._specs)
        if twin.device != self.device:
            twin._storage = {
                name: tuple(p.to(twin.device) for p in self._natural(name))
                for name in self._storage
            }
            twin._layouts = dict.fromkeys(self._layouts, ROWS)
            return twin
        twin._layouts = dict(self._layouts)
        for name, parts in self._storage.items():
            if self._layouts[name] == COPIES:
                parts, twin._layouts[name] = self._natural(name), ROWS
            elif self._specs[name].writable:
                parts = tuple(p.clone() for p in parts)
            twin._storage[name] = parts
        return twin

    def _natural(self, name: str) -> tuple[torch.Tensor, ...]:
        """The storage of a tensor, or what it would be in natural order."""
        if self._layouts[name] == ROWS:
            return self._storage[name]
        return (self.tagged_words(name) if self._specs[name].tagged else self[name],)

    @property
    def bytes(self) -> int:
        """Bytes of all storage."""
        return sum(p.numel() * p.element_size() for parts in self._storage.values() for p in parts)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _storage_of(spec: TensorSpec) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of an allocated tensor's storage."""
    if spec.tagged:
        return (spec.rows, spec.columns * spec.dtype.size // 4, 2), torch.int32
    return spec.shape, TORCH_DTYPE[spec.dtype]
