"""Hugging Face model directories: their JSON files and their weights on disk.

A tensor is a view of the mapped file, without a copy. Its pages are read on first use and released
with `Checkpoint.release`. torch is imported with the first tensor, so that reading a configuration
stays fast.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megavm.scheduler.llama.config import (
    EMBEDDING,
    LM_HEAD,
    LlamaConfig,
    expected_tensors,
    read_dtype,
)
from megavm.scheduler.llama.json_files import Keys, read_json, short
from megavm.scheduler.llama.safetensors_file import WEIGHT_DTYPES, SafetensorsFile
from megavm.vm.config import MAX_STOP_TOKENS

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("megavm")

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_OF_LLAMA: Final = ("model.", "lm_head.")  # names of a Llama's weights begin so
_COMPUTED: Final = "rotary_emb.inv_freq"  # tables that older versions of transformers stored

_CONVERSION_BYTES: Final = 16 << 20  # source bytes resident at a time during a conversion


class Checkpoint:
    """One model directory: its configuration, its generation defaults and its weights.

    `generation` is generation_config.json as a dict. Its `eos_token_id` is a tuple, taken from
    config.json where generation_config.json has none. Not thread-safe while files are first opened.
    """

    def __init__(
        self,
        directory: Path,
        config: LlamaConfig,
        generation: dict[str, Any],
        weight_map: dict[str, str] | None,
    ) -> None:
        self.directory = directory
        self.config = config
        self.generation = generation
        self._weight_map = weight_map
        self._expected = expected_tensors(config)
        self._files: dict[str, SafetensorsFile] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read the JSON files of `directory`; `check` and `tensor` open the weights.

        Raises:
            ValueError: a file is missing or invalid, or the configuration is not supported.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise ValueError(f"no such directory: {directory}")
        raw = read_json(directory / CONFIG_FILE)
        try:
            config = LlamaConfig.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{directory / CONFIG_FILE}: {error}") from error
        # A single file takes precedence over an index beside it, as in transformers.
        sharded = (directory / INDEX_FILE).is_file() and not (directory / SINGLE_FILE).is_file()
        weight_map = read_index(directory / INDEX_FILE) if sharded else None
        checkpoint = cls(directory, config, _read_generation(directory, config), weight_map)
        if read_dtype(raw) is None and (sharded or (directory / SINGLE_FILE).is_file()):
            file, stored_name = checkpoint._locate(EMBEDDING)
            stored = WEIGHT_DTYPES[file.entries[stored_name].dtype]
            checkpoint.config = replace(config, dtype=stored)
        return checkpoint

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a generation, possibly none."""
        ids: tuple[int, ...] = self.generation["eos_token_id"]
        return ids

    def check(self) -> None:
        """Check every file header and the position, shape and dtype of every weight, not the data.

        A head of its own wins over `tie_word_embeddings`, as in transformers 5: where both are
        stored and differ, `config` is untied.

        Raises:
            ValueError: a file or tensor is missing, truncated, corrupt, of another shape, or stored
                in a dtype that megavm does not read.
        """
        if self.config.tie_word_embeddings and self._has_own_head():
            logger.info("the LM head in %s differs from the embeddings: untied", self.directory)
            self.config = replace(self.config, tie_word_embeddings=False)
        for name in self._expected:
            self._locate(name)
        self._refuse_ignored_weights()

    def _has_own_head(self) -> bool:
        """Whether both embeddings and LM head are stored, and differ."""
        import torch

        files = [(self._file_of(name), name) for name in (EMBEDDING, LM_HEAD)]
        stored = [(file, name) for file, name in files if file is not None and name in file.entries]
        if len(stored) < len(files):
            return False
        entries = [file.entries[name] for file, name in stored]
        if len({(entry.shape, entry.dtype) for entry in entries}) > 1:
            return True
        equal = torch.equal(*(file.tensor(name).view(torch.uint8) for file, name in stored))
        for (file, _), entry in zip(stored, entries, strict=True):
            file.release(entry.begin, entry.end)
        return not equal

    def extra_tensors(self) -> Iterator[str]:
        """Names of stored tensors that the model does not use, such as `rotary_emb.inv_freq`."""
        for file_name in sorted(
            set(self._weight_map.values()) if self._weight_map else {SINGLE_FILE}
        ):
            yield from (
                name for name in self._file(file_name).entries if name not in self._expected
            )

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, *, copy: bool = False
    ) -> torch.Tensor:
        """Weight `name` in the shape that `expected_tensors` gives, in `dtype` or as it is stored.

        Without a conversion it is a view of the mapped file: it takes no memory until it is read,
        is aligned to 8 bytes at most, and must not be written. With a conversion, or with `copy`,
        it is a new contiguous tensor in huge pages (vm/huge_pages.py); the source is read and
        released piece by piece, so that at most 16 MiB of it are resident.

        Raises:
            ValueError: no such weight, or it is missing, corrupt, or of another shape or dtype.
        """
        from megavm.vm.huge_pages import zeros_in_huge_pages

        file, stored_name = self._locate(name)
        source = file.tensor(stored_name)
        dtype = dtype or source.dtype
        if dtype == source.dtype and not copy:
            return source
        if not dtype.is_floating_point:
            raise ValueError(f"cannot convert tensor {name} to {dtype}")
        entry = file.entries[stored_name]
        result = zeros_in_huge_pages(source.shape, dtype)
        flat_source, flat_result = source.view(-1), result.view(-1)
        width = source.element_size()
        step = _CONVERSION_BYTES // width
        for first in range(0, source.numel(), step):
            flat_result[first : first + step].copy_(flat_source[first : first + step])
            begin = entry.begin + first * width
            file.release(begin, min(begin + _CONVERSION_BYTES, entry.end))
        return result

    def release(self, name: str) -> None:
        """Release the resident pages of weight `name`, for callers that have copied it elsewhere.

        A tensor returned earlier stays valid; its pages are read from the file again on access.
        """
        file, stored_name = self._locate(name)
        entry = file.entries[stored_name]
        file.release(entry.begin, entry.end)

    def stored_bytes(self) -> int:
        """Bytes of all weights as they are stored; a tied LM head counts once."""
        entries = {}
        for name in self._expected:
            file, stored_name = self._locate(name)
            entries[stored_name] = file.entries[stored_name]
        return sum(entry.end - entry.begin for entry in entries.values())

    def _locate(self, name: str) -> tuple[SafetensorsFile, str]:
        """The file of weight `name` and its name in that file; checks shape and dtype."""
        shape = self._expected.get(name)
        if shape is None:
            raise ValueError(f"{name} is not a weight of the model in {self.directory}")
        # Tied embeddings are stored once, under either name; usually that of the embedding.
        names = [name]
        if self.config.tie_word_embeddings and name in (EMBEDDING, LM_HEAD):
            names = [EMBEDDING, LM_HEAD]
        for stored_name in names:
            file = self._file_of(stored_name)
            if file is not None and stored_name in file.entries:
                break
        else:
            where = SINGLE_FILE if self._weight_map is None else INDEX_FILE
            if self._weight_map is not None and names[0] in self._weight_map:
                where = self._weight_map[names[0]]
            raise ValueError(f"tensor {name} is missing from {self.directory / where}")
        entry = file.entries[stored_name]
        if entry.shape != shape:
            raise ValueError(
                f"tensor {stored_name} in {file.path} has shape {list(entry.shape)}, but"
                f" config.json asks for {list(shape)}"
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"tensor {stored_name} in {file.path} is stored as {entry.dtype}; megavm reads"
                " BF16, F32 and F16"
            )
        return file, stored_name

    def _file_of(self, name: str) -> SafetensorsFile | None:
        if self._weight_map is None:
            return self._file(SINGLE_FILE)
        file_name = self._weight_map.get(name)
        return None if file_name is None else self._file(file_name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            if name == SINGLE_FILE and not (self.directory / name).is_file():
                raise ValueError(
                    f"no {SINGLE_FILE} and no {INDEX_FILE} in {self.directory}: megavm reads"
                    " safetensors only"
                )
            self._files[name] = SafetensorsFile(self.directory / name)
        return self._files[name]

    def _refuse_ignored_weights(self) -> None:
        """Refuse weights of a Llama's modules that config.json does not announce.

        Skipping a layer, a bias or a norm would change results. Tables of rotations are computed,
        and tied embeddings may be stored under both of their names.
        """
        # No key announces a bias of the head.
        modules = {name.removesuffix(".weight") for name in self._expected if name != LM_HEAD}
        for name in self.extra_tensors():
            module, _, kind = name.rpartition(".")
            if kind == "bias" and module in modules:
                raise ValueError(
                    f"{self.directory} holds tensor {name}, but config.json says attention_bias="
                    f"{self.config.attention_bias} and mlp_bias={self.config.mlp_bias}"
                )
            known = name == LM_HEAD or name.endswith(_COMPUTED)
            if name.startswith(_OF_LLAMA) and not known:
                raise ValueError(
                    f"{self.directory} holds tensor {name}, which a Llama with this config.json "
                    f"has not (num_hidden_layers={self.config.num_layers})"
                )


def read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor of a sharded checkpoint.

    Raises ValueError when the index is invalid or names a file outside its directory.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} has no weight_map object")
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and re.fullmatch(r"[\w][\w.+-]*\.safetensors", name, re.ASCII)
        if not plain:
            raise ValueError(
                f"{path} places tensor {tensor} in {name!r}, which is not the name of a"
                " .safetensors file beside it"
            )
    return weight_map


def _read_generation(directory: Path, config: LlamaConfig) -> dict[str, Any]:
    """generation_config.json with its types checked; without the file, only `eos_token_id`."""
    path = directory / GENERATION_FILE
    generation = read_json(path) if path.is_file() else {}
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = generation.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{path}: key {key}={short(value)} must be a number")
    try:
        Keys(generation).boolean("do_sample")
        eos = Keys(generation).token_ids("eos_token_id")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if len(set(eos)) > MAX_STOP_TOKENS:
        raise ValueError(
            f"{path}: key eos_token_id holds {len(set(eos))} tokens, at most {MAX_STOP_TOKENS} are"
            " possible"
        )
    return {**generation, "eos_token_id": eos or config.eos_token_ids}
