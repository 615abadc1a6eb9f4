"""The arrays through which the host describes a step and reads its tokens, for any device.

On the CPU they are views of the memory. For a GPU they are copies in pinned memory: one copy moves
the host's writes to the GPU before a launch, and one copy brings the chosen tokens back after it.
Rows of the large tensors move only when they have changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch

from megavm.scheduler.engine.step import Floats, Ints, Step
from megavm.vm.machine import Executable
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.tensors import TensorKind, TensorSpec

ALIGNMENT = 64  # words: every tensor of the slab begins at a multiple of 256 bytes
BY_ROW = ("allowed", "bias")  # inputs that move to the GPU row by row, when they have changed


class AsynchronousExecutable(Executable, Protocol):
    """A program that can be started and waited for (vm.cuda.machine.CudaExecutable)."""

    def launch(self, steps: int = 1) -> None:
        """Start to run without waiting."""
        ...

    def finish(self) -> None:
        """Wait until all launches are complete. Raises MachineFault when one fails."""
        ...


class Rows(Protocol):
    """Rows of a matrix, by index or slice."""

    def __getitem__(self, key: Any, /) -> Any: ...


class StepMemory:
    """The step tensors of a memory on the CPU; ``arrays`` by the names of ``step_tensors``."""

    def __init__(self, memory: Memory, steps: Mapping[str, TensorSpec]) -> None:
        first, *others = memory.ranks
        for spec in steps.values():
            if spec.kind is TensorKind.INPUT:  # all ranks read the same
                storage = torch.zeros(spec.shape, dtype=TORCH_DTYPE[spec.dtype])
                for rank in memory.ranks:
                    rank.bind(spec, storage)
        memory.allocate(steps.values())
        self.arrays: dict[str, Any] = {name: first[s.name].numpy() for name, s in steps.items()}
        self.logits: Rows = first["logits"].numpy()
        self._copies = [rank[steps["tokens"].name].numpy() for rank in others]

    def write_tokens(self, slot: int, tokens: Ints) -> None:
        """Set the first tokens of a slot."""
        for table in (self.arrays["tokens"], *self._copies):
            table[slot, : len(tokens)] = tokens

    def publish(self, name: str, slot: int) -> None:
        """Let the next launch see a changed row of a tensor of BY_ROW."""

    def run(
        self,
        executable: Executable,
        step: Step,
        steps: int,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the program for the step that the arrays describe. Raises MachineFault.

        Calls ``started`` when nothing is left to do but to wait for the machine.
        """
        started()
        executable.run(steps)


class DeviceRows:
    """Rows of a float32 tensor on a GPU; indexing copies them to the host."""

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name

    def __getitem__(self, key: Any, /) -> Floats:
        rows: Floats = self._memory[self._name][key].cpu().numpy()
        return rows


class DeviceStepMemory(StepMemory):
    """The step tensors of a memory on a GPU.

    All inputs but those of BY_ROW share one slab on the host and one on the GPU. Launches write
    tokens too, so these have a mirror on the host, with the host's tokens and those that launches
    chose.
    """

    def __init__(self, memory: Memory, steps: Mapping[str, TensorSpec]) -> None:
        self._devices = [rank.device for rank in memory.ranks]
        self._on_gpu = memory.device.type == "cuda"
        inputs = {n: s for n, s in steps.items() if s.kind is TensorKind.INPUT and n not in BY_ROW}
        sizes = [-(-s.bytes // 4 // ALIGNMENT) * ALIGNMENT for s in inputs.values()]
        self._host_slab = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self._on_gpu)
        self._slabs = [torch.zeros_like(self._host_slab, device=d) for d in self._devices]
        self.arrays = {}
        begin = 0
        for (name, spec), size in zip(inputs.items(), sizes, strict=True):
            words = slice(begin, begin + spec.bytes // 4)
            dtype = TORCH_DTYPE[spec.dtype]
            for rank, slab in zip(memory.ranks, self._slabs, strict=True):
                rank.bind(spec, slab[words].view(dtype).view(spec.shape))
            self.arrays[name] = self._host_slab[words].view(dtype).view(spec.shape).numpy()
            begin += size
        tokens = steps["tokens"]
        memory.allocate([tokens])
        self._tokens = [rank.storage(tokens.name) for rank in memory.ranks]
        self._host_tokens = torch.zeros(tokens.shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self.arrays["tokens"] = self._host_tokens.numpy()
        self._written: list[tuple[int, int]] = []  # (slot, count) of tokens to copy to the GPU
        # On the host, and on each rank's GPU.
        self._rows: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for name in BY_ROW:
            spec = steps[name]
            memory.allocate([spec])
            dtype = TORCH_DTYPE[spec.dtype]
            host = torch.zeros(spec.shape, dtype=dtype, pin_memory=self._on_gpu)
            self._rows[name] = host, [rank.storage(spec.name) for rank in memory.ranks]
            self.arrays[name] = host.numpy()
        self._changed: dict[tuple[str, int], None] = {}  # (tensor, row) to copy to the GPU
        self.logits = DeviceRows(memory, "logits")
        self._copies = []
        self._reserve(steps["logit_row"].rows)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the GPU of rank 0 current for torch, in any thread."""
        return torch.cuda.device(self._devices[0]) if self._on_gpu else contextlib.nullcontext()

    def _reserve(self, count: int) -> None:
        """Allocate buffers for ``count`` chosen tokens and their places, on host and GPU."""
        self._places = torch.zeros(count, dtype=torch.int64, pin_memory=self._on_gpu)
        self._device_places = torch.zeros(count, dtype=torch.int64, device=self._devices[0])
        self._chosen = torch.zeros(count, dtype=torch.int32, pin_memory=self._on_gpu)
        self._device_chosen = torch.zeros(count, dtype=torch.int32, device=self._devices[0])

    def write_tokens(self, slot: int, tokens: Ints) -> None:
        super().write_tokens(slot, tokens)
        self._written.append((slot, len(tokens)))

    def publish(self, name: str, slot: int) -> None:
        self._changed[name, slot] = None

    def run(
        self,
        executable: Executable,
        step: Step,
        steps: int,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        device = cast(AsynchronousExecutable, executable)
        with self._current():
            for slab in self._slabs:
                slab.copy_(self._host_slab, non_blocking=True)
            for slot, count in self._written:
                source = self._host_tokens[slot, :count]
                for tokens in self._tokens:
                    tokens[slot, :count].copy_(source, non_blocking=True)
            self._written.clear()
            for name, slot in self._changed:
                host, of_ranks = self._rows[name]
                for rows in of_ranks:
                    rows[slot].copy_(host[slot], non_blocking=True)
            self._changed.clear()
            device.launch(steps)
            places = self._fetch(step, steps)
            started()
            device.finish()
        self.arrays["tokens"].reshape(-1)[places] = self._chosen[: len(places)].numpy()

    def _fetch(self, step: Step, steps: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Start to copy the tokens that follow the logit rows; their flat indices in the table."""
        slots = step.row_sequence[step.logit_row].astype(np.int64)
        following = step.row_position[step.logit_row] + 1
        columns = following[:, None] + np.arange(steps)[None]
        # A bad step may name places outside the table: clip them, the machine reports the error.
        tokens = self._tokens[0]  # all ranks choose the same
        places = (slots[:, None] * tokens.shape[1] + columns).reshape(-1)
        places = places.clip(0, tokens.numel() - 1)
        count = len(places)
        if count > len(self._places):
            self._reserve(2 * count)
        self._places[:count].numpy()[:] = places
        self._device_places[:count].copy_(self._places[:count], non_blocking=True)
        torch.index_select(
            tokens.view(-1), 0, self._device_places[:count], out=self._device_chosen[:count]
        )
        self._chosen[:count].copy_(self._device_chosen[:count], non_blocking=True)
        return places
