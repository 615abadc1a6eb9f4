"""Safetensors files: a checked header, and tensors that are views of the mapped data."""

from __future__ import annotations

import functools
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from megavm.scheduler.llama.json_files import one_line

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["bfloat16", "float32", "float16"]

# Bytes of one element of each safetensors dtype; below, the dtypes of weights that megavm reads.
_ELEMENT_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
WEIGHT_DTYPES: Final[dict[str, StoredDtype]] = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
}

_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format itself


@dataclass(frozen=True)
class TensorEntry:
    """Position of one tensor: `begin` and `end` are byte offsets from the start of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One safetensors file. Reads and checks the header at once, maps the data on first use.

    The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape,
    data_offsets}}, then the data of all tensors without gaps.

    Raises:
        ValueError: the file is missing, truncated, longer than its header says, or its header is
        corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        if not path.is_file():
            raise ValueError(f"no {path.name} in {path.parent}")
        try:
            self._read_header()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error

    def _read_header(self) -> None:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise ValueError(f"{self.path} is truncated: {size} bytes cannot hold a header")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(
                    f"{self.path} is not a safetensors file: its header would have {length} bytes"
                )
            if 8 + length > size:
                raise ValueError(
                    f"{self.path} is truncated: it has {size} bytes and its header alone needs"
                    f" {8 + length}"
                )
            text = file.read(length)
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_pairs)
            if not isinstance(header, dict):
                raise ValueError("it is not an object")
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self.entries[name] = _read_entry(name, entry, 8 + length)
            end = self._check_layout(8 + length)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header of {self.path} is corrupt: {one_line(error)}") from error
        if end > size:
            raise ValueError(
                f"{self.path} is truncated: it has {size} bytes and its header announces {end}"
            )
        if end < size:
            raise ValueError(
                f"{self.path} is corrupt: it has {size} bytes and its header announces {end}"
            )

    def _check_layout(self, end: int) -> int:
        """The offset after the last tensor. Raises ValueError for a gap or an overlap."""
        for name, entry in sorted(
            self.entries.items(), key=lambda item: (item[1].begin, item[1].end)
        ):
            if entry.begin != end:
                raise ValueError(f"tensor {name} begins at byte {entry.begin} instead of {end}")
            end = entry.end
        return end

    @functools.cached_property
    def _map(self) -> mmap.mmap:
        """The whole file, mapped copy-on-write: a write to a tensor never reaches the disk."""
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot map {self.path}: {one_line(error)}") from error
        announced = max((entry.end for entry in self.entries.values()), default=0)
        if len(mapped) < announced:
            raise ValueError(f"{self.path} has become shorter than its header announces")
        return mapped

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor `name` as a view of the mapped file, in its stored shape and dtype."""
        import torch

        entry = self.entries[name]
        dtype: torch.dtype = getattr(torch, WEIGHT_DTYPES[entry.dtype])
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:  # unaligned, behind a header of odd length: copy it
            data = bytearray(self._map[entry.begin : entry.end])
            return torch.frombuffer(data, dtype=dtype).view(entry.shape)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def release(self, begin: int, end: int) -> None:
        """Release the resident pages of bytes [begin, end); tensors over them stay valid."""
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page
        if hasattr(mmap, "MADV_DONTNEED") and last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _sizes(name: str, entry: dict[str, Any], key: str) -> list[int]:
    value = entry.get(key)
    if isinstance(value, list) and len(value) <= 64:
        sizes = [size for size in value if type(size) is int and 0 <= size < 1 << 62]
        if len(sizes) == len(value):
            return sizes
    raise ValueError(f"{key} of tensor {name} is not a list of sizes")


def _read_entry(name: str, entry: object, base: int) -> TensorEntry:
    """One header entry; offsets are converted from the data section (``base``) to the file."""
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of tensor {name} is not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of tensor {name} is not a string")
    shape, offsets = _sizes(name, entry, "shape"), _sizes(name, entry, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets of tensor {name} are not [begin, end]")
    width = _ELEMENT_BYTES.get(dtype)
    if width is not None and math.prod(shape) * width != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {name} of shape {shape} and dtype {dtype} does not fill its"
            f" {offsets[1] - offsets[0]} bytes"
        )
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])
