"""The arrays through which the host describes a step and reads its tokens, for any device.

On the CPU they are views of the memory. For a GPU they are copies in pinned memory: one copy moves
the small ones to the GPU before a launch, and a kernel brings the chosen tokens back after it. Of
the large ones only what has changed moves: rows of masks and biases, words of tokens and KV blocks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from megavm.scheduler.engine.step import Bools, Floats, Ints, Step, signed_word
from megavm.vm.cuda.copies import Copies, HostCopies, Words
from megavm.vm.cuda.driver import CudaError, current_stream
from megavm.vm.machine import Executable, MachineFault
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.tensors import TensorKind, TensorSpec

ALIGNMENT = 64  # words: every tensor of the slab begins at a multiple of 256 bytes
MOST_LAUNCHES = 2  # in progress: one runs, and one waits behind it
# Inputs that move to the GPU row by row, when they have changed.
BY_ROW = ("allowed", "bias", "masks_written")
# Tensors of which the words move that the host has written (``write_tokens``, ``write_blocks``).
BY_WORD = ("tokens", "block_table")


class AsynchronousExecutable(Executable, Protocol):
    """A program that can be started and waited for (vm.cuda.machine.CudaExecutable)."""

    def launch(self, steps: int = 1) -> None:
        """Start to run without waiting."""
        ...

    def mark(self) -> Callable[[], None]:
        """Note all work that was started until now; the result waits for it.

        It raises MachineFault when a launch has failed.
        """
        ...


class Rows(Protocol):
    """Rows of a matrix, by index or slice."""

    def __getitem__(self, key: Any, /) -> Any: ...


class StepMemory:
    """The step tensors of a memory on the CPU; ``arrays`` by the names of ``step_tensors``.

    ``machine_seconds``: for how long the machine has run launches that have ended without a fault;
    of several GPUs the first. On an emulated one it stays 0.

    ``late_launches``: those that began when the GPU ran nothing; 0 on other machines.
    """

    machine_seconds = 0.0
    late_launches = 0

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
        self._other_tokens = [rank[steps["tokens"].name].numpy() for rank in others]

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Inside of it steps run in the order in which they are started, by whatever thread."""
        return contextlib.nullcontext()

    def write_tokens(self, slot: int, tokens: Ints) -> None:
        """Set the first tokens of a slot."""
        for table in (self.arrays["tokens"], *self._other_tokens):
            table[slot, : len(tokens)] = tokens

    def write_blocks(self, slot: int, column: int, blocks: Ints) -> None:
        """Set KV blocks of a slot, from a column of the block table on."""
        self.arrays["block_table"][slot, column : column + len(blocks)] = blocks

    def publish(self, name: str, slot: int) -> None:
        """Let the next launch see a changed row of a tensor of BY_ROW."""

    @property
    def can_await_masks(self) -> bool:
        """Whether masks may be given to a launch that runs (``give_masks``)."""
        return False

    def give_masks(self) -> None:
        """Let the last launch, if it awaits masks, see the rows that are published since it began.

        Raises MachineFault.
        """

    def release(self) -> None:
        """Let the last launch go on without the masks that it awaits: something has failed."""

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
        begin = time.perf_counter()
        executable.run(steps)
        self.machine_seconds += time.perf_counter() - begin


class DeviceRows:
    """Rows of a float32 tensor on a GPU; indexing copies them to the host."""

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name

    def __getitem__(self, key: Any, /) -> Floats:
        rows: Floats = self._memory[self._name][key].cpu().numpy()
        return rows


@dataclass(slots=True)
class _Stage:
    """Pinned memory that copies of one launch use. The host writes to it when it has ended."""

    slab: torch.Tensor
    view: memoryview  # the slab's memory, to which the host copies without torch
    times: tuple[Any, Any]  # events: begin and end of the launch
    chosen: Words  # the tokens that the launch chooses
    written: Words  # what the host wrote before the launch, of the tensors of BY_WORD


class DeviceStepMemory(StepMemory):
    """The step tensors of a memory on a GPU.

    All inputs but those of BY_ROW and BY_WORD share one slab on the host and one on the GPU. Those
    of BY_WORD share one too: one kernel brings what the host has written to it. Launches write
    tokens as well, so that the host has its own tokens and those that launches chose.

    A launch may be started while another one is in progress, but not while two are. Copies to the
    GPU run in the order of launches, from a stage of each of them.

    Masks may come later (``give_masks``): copies beside the kernel that awaits them, in order of
    their own, then their number. A kernel that has ended has waited for them, so that the host may
    write the same rows again then.
    """

    def __init__(self, memory: Memory, steps: Mapping[str, TensorSpec]) -> None:
        self._devices = [rank.device for rank in memory.ranks]
        self._on_gpu = memory.device.type == "cuda"
        gpus = reversed(dict.fromkeys(self._devices)) if self._on_gpu else ()
        # The last one is that of rank 0, by its GPU's number.
        self._streams = {gpu.index or 0: torch.cuda.default_stream(gpu) for gpu in gpus}
        self._copies = [Copies(d) if self._on_gpu else HostCopies() for d in self._devices]
        self.arrays = {}
        by_word = {name: steps[name] for name in BY_WORD}
        inputs = {
            name: spec
            for name, spec in steps.items()
            if spec.kind is TensorKind.INPUT and name not in (*BY_ROW, *BY_WORD)
        }
        # The host's copy of a slab, those on the ranks' GPUs, and the first word of each tensor.
        host_slab, self._slabs, _ = self._make_slab(memory, inputs)
        host_tables, self._tables, self._begin = self._make_slab(memory, by_word)
        self._host_view = host_slab.numpy().data
        self._host_tables: Ints = host_tables.numpy()
        self._width = steps["tokens"].columns
        # Tokens that the GPU of rank 0 chooses; all ranks choose the same.
        self._tokens = memory.ranks[0].storage(steps["tokens"].name).view(-1)
        self._places = np.arange(self._width)
        self._written: dict[int, int] = {}  # words to copy to the GPU: how many, by the first one
        # On the host, and on each rank's GPU.
        self._rows: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for name in BY_ROW:
            spec = steps[name]
            memory.allocate([spec])
            host = self._pinned(spec.shape, TORCH_DTYPE[spec.dtype])
            self._rows[name] = host, [rank.storage(spec.name) for rank in memory.ranks]
            self.arrays[name] = host.numpy()
        self._changed: dict[tuple[str, int], None] = {}  # (tensor, row) to copy to the GPU
        self.logits = DeviceRows(memory, "logits")
        self._other_tokens = []
        self._rows_sent: list[Callable[[], None]] = []  # wait for copies of rows to the GPUs
        count = steps["logit_row"].rows
        self._stages = [self._make_stage(len(host_slab), count) for _ in range(MOST_LAUNCHES)]
        self._next = 0  # stage of the next launch
        self._awaited = 0  # launches that have begun before their masks were known
        self._given = 0  # those of them that have theirs
        # The number on its way to the GPUs: nobody writes it before it is there.
        self._numbers = [self._pinned((1,), torch.int32) for _ in range(MOST_LAUNCHES)]
        self._last_end: Any = None  # the event at the end of the last launch

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make rank 0's GPU current for torch, and on each GPU the default stream."""
        if self._are_current():
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for stream in self._streams.values():
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    def _are_current(self) -> bool:
        """Whether all that is so already: to make it so takes as long as several launches."""
        for gpu, stream in self._streams.items():
            if current_stream(gpu) != stream.cuda_stream:
                return False
        return not self._streams or torch.cuda.current_device() == next(reversed(self._streams))

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._on_gpu)

    def _make_slab(
        self, memory: Memory, steps: Mapping[str, TensorSpec]
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, int]]:
        """Tensors in one: on the host and on each rank's GPU, and where each tensor begins there.

        Binds them, and makes their ``arrays``.
        """
        begins, size = {}, 0
        for name, spec in steps.items():
            begins[name] = size
            size += -(-spec.bytes // 4 // ALIGNMENT) * ALIGNMENT
        host = torch.zeros(size, dtype=torch.int32)
        of_ranks = [torch.zeros_like(host, device=rank.device) for rank in memory.ranks]
        for name, spec in steps.items():
            words = slice(begins[name], begins[name] + spec.bytes // 4)
            dtype = TORCH_DTYPE[spec.dtype]
            for rank, slab in zip(memory.ranks, of_ranks, strict=True):
                rank.bind(spec, slab[words].view(dtype).view(spec.shape))
            self.arrays[name] = host[words].view(dtype).view(spec.shape).numpy()
        return host, of_ranks, begins

    def _make_stage(self, words: int, count: int) -> _Stage:
        slab = self._pinned((words,), torch.int32)
        times = self._copies[0].event(), self._copies[0].event()
        return _Stage(
            slab, slab.numpy().data, times, self._make_words(count), self._make_words(count)
        )

    def _make_words(self, count: int) -> Words:
        return Words(count, pinned=self._on_gpu)

    def write_tokens(self, slot: int, tokens: Ints) -> None:
        super().write_tokens(slot, tokens)
        self._note("tokens", slot, 0, len(tokens))

    def write_blocks(self, slot: int, column: int, blocks: Ints) -> None:
        super().write_blocks(slot, column, blocks)
        self._note("block_table", slot, column, len(blocks))

    def _note(self, name: str, slot: int, column: int, count: int) -> None:
        """The host has written so many words of a tensor of BY_WORD."""
        first = self._begin[name] + slot * self.arrays[name].shape[1] + column
        self._written[first] = max(count, self._written.get(first, 0))

    def publish(self, name: str, slot: int) -> None:
        self._changed[name, slot] = None

    @property
    def can_await_masks(self) -> bool:
        return all(copies.beside for copies in self._copies)

    def give_masks(self) -> None:
        if self._given == self._awaited:
            return
        with _errors_as_faults():
            for rank, copies in enumerate(self._copies):
                for name, slot in self._changed:
                    host, of_ranks = self._rows[name]
                    copies.send_beside(of_ranks[rank][slot], host[slot])
            self._changed.clear()
            self._send_number()

    def release(self) -> None:
        if self._given != self._awaited:
            with contextlib.suppress(CudaError):
                self._send_number()

    def _send_number(self) -> None:
        """Behind the masks. Launches wait for it."""
        number = self._numbers[self._awaited % MOST_LAUNCHES]
        number.fill_(signed_word(self._awaited))
        _, of_ranks = self._rows["masks_written"]
        for copies, rank in zip(self._copies, of_ranks, strict=True):
            copies.send_beside(rank, number)
        self._given = self._awaited

    def run(
        self,
        executable: Executable,
        step: Step,
        steps: int,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        finish = self.start(executable, step, steps)
        started()
        finish(None)

    def start(
        self, executable: Executable, step: Step, steps: int
    ) -> Callable[[Bools | None], None]:
        """Start the program, behind a launch in progress; the result is ``Launch.finish``.

        Call it inside of ``current``. Raises MachineFault.
        """
        with _errors_as_faults():
            return self._start(cast(AsynchronousExecutable, executable), step, steps)

    def _start(
        self, device: AsynchronousExecutable, step: Step, steps: int
    ) -> Callable[[Bools | None], None]:
        stage = self._stages[self._next]
        self._next = (self._next + 1) % MOST_LAUNCHES
        self.release()  # a launch that an interrupt has left behind
        self._awaited += step.awaits_masks
        self.arrays["masks_awaited"][0] = signed_word(self._awaited)
        # Copies of numpy and torch would give up the interpreter.
        stage.view[:] = self._host_view
        for copies, slab in zip(self._copies, self._slabs, strict=True):
            copies.send(slab, stage.slab)
        self._send_written(stage)
        self._send_changed()
        (begin, end), gpu = stage.times, self._copies[0]
        self.late_launches += gpu.is_over(self._last_end)
        gpu.record(begin)
        device.launch(steps)
        gpu.record(end)
        self._last_end = end
        slots, places = self._fetch(stage, step, steps)
        wait = device.mark()
        table = self.arrays["tokens"].reshape(-1)
        found = stage.chosen.value_array[: len(places)]  # once the launch has ended
        awaited = self._awaited

        def finish(gone: Bools | None = None) -> None:
            if self._given < awaited:  # nobody will write its masks any more
                self.release()
            wait()
            if self._last_end is end:
                self._last_end = None
            # A launch behind this one copies rows that the host may write for the one after it.
            sent, self._rows_sent = self._rows_sent, []
            with _errors_as_faults():
                for wait_for_copies in sent:
                    wait_for_copies()
                self.machine_seconds += gpu.seconds(begin, end)
            if gone is None:
                table[places] = found
            else:
                kept = ~gone[slots]
                table[places[kept]] = found[kept]

        return finish

    def _send_written(self, stage: _Stage) -> None:
        """Start to copy what the host has written to the tensors of BY_WORD."""
        written, self._written = self._written, {}
        if not written:
            return
        total = sum(written.values())
        if total > stage.written.size:
            stage.written = self._make_words(2 * total)
        words, at = stage.written, 0
        for first, count in written.items():
            own = slice(at, at + count)
            words.value_array[own] = self._host_tables[first : first + count]
            words.place_array[own] = self._places[:count]
            words.place_array[own] += first
            at += count
        for copies, of_rank in zip(self._copies, self._tables, strict=True):
            copies.scatter(words, of_rank, total)

    def _send_changed(self) -> None:
        """Start to copy the rows that ``publish`` has named, from where the host writes them."""
        if not self._changed:
            return
        for name, slot in self._changed:
            host, of_ranks = self._rows[name]
            for copies, rows in zip(self._copies, of_ranks, strict=True):
                copies.send(rows[slot], host[slot])
        self._changed.clear()
        self._rows_sent = [copies.mark() for copies in self._copies]

    def _fetch(
        self, stage: _Stage, step: Step, steps: int
    ) -> tuple[Ints, np.ndarray[Any, np.dtype[np.int64]]]:
        """Start to copy the tokens that follow the logit rows.

        Returns their slots, and their flat indices in the table.
        """
        slots = step.row_sequence[step.logit_row]
        following = step.row_position[step.logit_row] + 1
        columns = following[:, None] + np.arange(steps)[None]
        # A bad step may name places outside the table: clip them, the machine reports the error.
        places = (slots[:, None].astype(np.int64) * self._width + columns).reshape(-1)
        places = np.minimum(np.maximum(places, 0), len(self._tokens) - 1)
        count = len(places)
        if count > stage.chosen.size:
            stage.chosen = self._make_words(2 * count)
        stage.chosen.place_array[:count] = places
        self._copies[0].gather(stage.chosen, self._tokens, count)
        return slots.repeat(steps), places


@contextlib.contextmanager
def _errors_as_faults() -> Iterator[None]:
    """Raise MachineFault for an error of the driver."""
    try:
        yield
    except CudaError as error:
        raise MachineFault(f"the GPU failed: {error}") from error
