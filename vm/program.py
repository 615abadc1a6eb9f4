"""A program: all that one launch executes."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megavm.instructions import decode
from megavm.vm.config import HEADER_WORDS, INSTRUCTION_WORDS, NONE
from megavm.vm.isa import Instruction
from megavm.vm.tensors import DType, Part, TensorKind, TensorSpec

if TYPE_CHECKING:
    from megavm.vm.cuda.exchange import Exchanges

FORMAT_VERSION = 6


def encode(instructions: Sequence[Instruction]) -> npt.NDArray[np.uint32]:
    """The words of instructions: uint32 [n, 32]."""
    data = b"".join(i.encode() for i in instructions)
    return np.frombuffer(data, dtype="<u4").reshape(-1, INSTRUCTION_WORDS).copy()


@dataclass(frozen=True, eq=False)
class Program:
    """Instructions, the queues that hold them, the barriers they use and the tensors they name.

    ``words`` is uint32 [n, 32], one encoded instruction a row. ``queues`` holds instruction numbers:
    with ``dynamic`` one list that all workers draw from in order, otherwise one list per worker. A launch
    runs the program for one or more *steps*; every queue is run through once per step.

    The program runs on ``ranks`` GPUs (or groups of threads), each with its own workers, queues, barriers
    and tensors; all ranks run the same instructions. Ranks meet in tensors that they gather
    (TensorSpec.shares) and in the first ``shared_barriers`` barriers, which every signal reaches on all
    ranks.

    ``fixed_order``: on a GPU, every sum is added up in an order that does not depend on how the work is cut
    among workers and ranks. Its kernel is another one.

    ``labels`` names the graph operation of each instruction ("layers.3.down_proj"), for people.
    ``metadata`` is any JSON: the bucket, the model.
    """

    tensors: tuple[TensorSpec, ...]
    words: npt.NDArray[np.uint32]
    queues: tuple[npt.NDArray[np.int32], ...]
    dynamic: bool
    workers: int
    barriers: tuple[str, ...]
    labels: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    shared_barriers: int = 0
    fixed_order: bool = False

    @classmethod
    def build(
        cls,
        tensors: Sequence[TensorSpec],
        instructions: Sequence[Instruction],
        queues: Sequence[Sequence[int]],
        *,
        barriers: Sequence[str] = (),
        dynamic: bool = False,
        workers: int | None = None,
        labels: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        ranks: int = 1,
        shared_barriers: int = 0,
        fixed_order: bool = False,
    ) -> Program:
        """Encode instructions. ``workers`` defaults to the number of queues."""
        words = encode(instructions)
        return cls(
            tensors=tuple(tensors),
            words=words,
            queues=tuple(np.asarray(q, dtype=np.int32) for q in queues),
            dynamic=dynamic,
            workers=len(queues) if workers is None else workers,
            barriers=tuple(barriers),
            labels=tuple(labels) if labels is not None else ("",) * len(words),
            metadata=dict(metadata or {}),
            ranks=ranks,
            shared_barriers=shared_barriers,
            fixed_order=fixed_order,
        )

    def __len__(self) -> int:
        return len(self.words)

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The decoded instructions. Raises ValueError for an unknown opcode."""
        raw = self.words.astype("<u4").tobytes()
        size = 4 * INSTRUCTION_WORDS
        return tuple(decode(raw[i * size : (i + 1) * size]) for i in range(len(self.words)))

    @functools.cached_property
    def signals(self) -> npt.NDArray[np.uint32]:
        """How often one step signals each barrier of a rank: uint32 [barriers].

        Raises ValueError when an instruction signals a barrier that the program does not have.
        """
        signalled = self.words[:, 1]
        signalled = signalled[signalled != NONE]
        if signalled.size and int(signalled.max()) >= len(self.barriers):
            raise ValueError(
                f"barrier {int(signalled.max())} is signalled, the program has {len(self.barriers)}"
            )
        counts = np.bincount(signalled, minlength=len(self.barriers))
        counts[: self.shared_barriers] *= self.ranks
        return counts.astype(np.uint32)

    @functools.cached_property
    def needs_queue_order(self) -> bool:
        """Whether the results of a run on a GPU depend on the order of the static queues.

        False if barriers and tagged words alone order all accesses that conflict, as in every program
        that the compiler makes: a worker may then begin an instruction while the one before it is still
        being stored. True for a program that does not verify.
        """
        from megavm.vm.verify import VerificationError, verify

        try:
            verify(self, "cuda")  # sets self.__dict__["needs_queue_order"]
        except VerificationError:
            return True
        return bool(self.__dict__["needs_queue_order"])

    @functools.cached_property
    def exchanges(self) -> Exchanges:
        """The tables by which a GPU exchanges the tagged words of instructions."""
        from megavm.vm.cuda.exchange import make_exchanges

        return make_exchanges(self)

    def worker_of(self) -> npt.NDArray[np.int32]:
        """The queue of each instruction: int32 [n], -1 if it is in none."""
        owner = np.full(len(self), -1, dtype=np.int32)
        for worker, queue in enumerate(self.queues):
            owner[queue] = worker
        return owner

    def disassemble(self) -> Iterator[str]:
        """One line per instruction, queue by queue in the order of execution."""
        for worker, queue in enumerate(self.queues):
            yield "queue (dynamic):" if self.dynamic else f"worker {worker}:"
            for index in queue:
                label = self.labels[index]
                text = self.instructions[index].disassemble(self.tensors)
                yield f"  {index:6d}  {text}" + (f"  ; {label}" if label else "")

    def __str__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"program of {len(self)} instructions, {len(self.barriers)} barriers, "
            f"{len(self.tensors)} tensors, {kind} queues for {self.workers} workers{ranks}"
        )

    def fingerprint(self) -> str:
        """SHA-256 of everything that is executed: all but labels and metadata."""
        digest = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        parts = [self.words.astype("<u4"), *(queue.astype("<i4") for queue in self.queues)]
        for part in parts:
            digest.update(part.size.to_bytes(8, "little") + part.tobytes())
        return digest.hexdigest()

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "dynamic": self.dynamic,
            "workers": self.workers,
            "ranks": self.ranks,
            "barriers": list(self.barriers),
            "shared_barriers": self.shared_barriers,
            "fixed_order": self.fixed_order,
            "tensors": [
                [t.name, t.shape, t.dtype.name, t.kind.value, t.tagged, t.parts, t.shares]
                for t in self.tensors
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed npz: a JSON header, the words and the queues (Program.load reads it)."""
        with open(path, "wb") as file:
            file.write(self.to_bytes())

    def to_bytes(self) -> bytes:
        """What ``save`` writes."""
        header = self._header() | {"metadata": dict(self.metadata), "labels": list(self.labels)}
        lengths = np.array([len(q) for q in self.queues], dtype=np.int64)
        entries = np.concatenate([*self.queues, np.empty(0, np.int32)]).astype("<i4")
        text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        file = io.BytesIO()
        np.savez_compressed(
            file,
            header=text,
            words=self.words.astype("<u4"),
            queue_lengths=lengths,
            queue_entries=entries,
        )
        return file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Read a saved program; verify it before running it.

        Raises ValueError when the file is not a program of this format version.
        """
        with open(path, "rb") as stream:
            return cls.from_bytes(stream.read(), os.fspath(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Program:
        """A program from what ``to_bytes`` returns; ``name`` is for errors, as ``load`` raises them."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                header = json.loads(file["header"].tobytes())
                words = file["words"]
                lengths, entries = file["queue_lengths"], file["queue_entries"]
            if header["format"] != FORMAT_VERSION:
                raise ValueError(f"format {header['format']}, this version reads {FORMAT_VERSION}")
            if words.ndim != 2 or words.shape[1] != INSTRUCTION_WORDS or words.dtype != np.uint32:
                raise ValueError(f"instruction words of shape {words.shape} and {words.dtype}")
            if lengths.ndim != 1 or lengths.dtype != np.int64:
                raise ValueError(f"queue lengths of shape {lengths.shape} and {lengths.dtype}")
            if entries.ndim != 1 or entries.dtype != np.int32:
                raise ValueError(f"queue entries of shape {entries.shape} and {entries.dtype}")
            if lengths.min(initial=0) < 0 or int(lengths.sum()) != len(entries):
                raise ValueError("queue lengths do not add up to the queue entries")
            if len(header["labels"]) != len(words):
                raise ValueError(f"{len(header['labels'])} labels for {len(words)} instructions")
            _check_types(header)
            tensors = tuple(
                TensorSpec(
                    name,
                    tuple(shape),
                    DType[dtype],
                    TensorKind(kind),
                    tagged,
                    tuple(Part(*part) for part in parts),
                    shares,
                )
                for name, shape, dtype, kind, tagged, parts, shares in header["tensors"]
            )
            return cls(
                tensors=tensors,
                words=words,
                queues=tuple(np.split(entries, np.cumsum(lengths)[:-1])) if len(lengths) else (),
                dynamic=header["dynamic"],
                workers=header["workers"],
                barriers=tuple(header["barriers"]),
                labels=tuple(header["labels"]),
                metadata=header["metadata"],
                ranks=header["ranks"],
                shared_barriers=header["shared_barriers"],
                fixed_order=header["fixed_order"],
            )
        except _DAMAGED as error:
            raise ValueError(f"{name} is not a megavm program: {error}") from error


# Exceptions of numpy, zipfile, zlib and json for damaged or malicious files.
_DAMAGED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def _check_types(header: Any) -> None:
    """Raise TypeError when a member of a saved header has the wrong type."""
    wanted: dict[str, type] = {
        "dynamic": bool,
        "workers": int,
        "ranks": int,
        "barriers": list,
        "shared_barriers": int,
        "fixed_order": bool,
        "labels": list,
        "tensors": list,
        "metadata": dict,
    }
    for name, expected in wanted.items():
        if type(header[name]) is not expected:
            raise TypeError(f"{name} is {header[name]!r}, not {expected.__name__}")
    for name in ("barriers", "labels"):
        if not all(isinstance(text, str) for text in header[name]):
            raise TypeError(f"{name} are not all strings")
    for name, shape, _, _, tagged, parts, shares in header["tensors"]:
        if not isinstance(name, str) or type(tagged) is not bool:
            raise TypeError(f"tensor {name!r} has no name or is tagged {tagged!r}")
        if type(shares) is not int:
            raise TypeError(f"tensor {name} has shares {shares!r}")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise TypeError(f"tensor {name} has shape {shape!r}")
        for part in parts:
            if [type(member) for member in part] != [str, int]:
                raise TypeError(f"tensor {name} has part {part!r}, not a name and rows")


def with_header(
    words: npt.NDArray[np.uint32], waits: Sequence[tuple[int, int]], signal: int | None
) -> npt.NDArray[np.uint32]:
    """A copy of one encoded instruction with other waits and signal."""
    changed = words.copy()
    changed[1] = NONE if signal is None else signal
    changed[2:HEADER_WORDS] = [NONE, 0] * ((HEADER_WORDS - 2) // 2)
    for i, (barrier, target) in enumerate(waits):
        changed[2 + 2 * i : 4 + 2 * i] = (barrier, target)
    return changed
