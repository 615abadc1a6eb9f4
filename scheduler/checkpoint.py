"""Hugging Face model directories: where they are, what they say, and their weights on disk.

`resolve` finds the directory, `LlamaConfig` reads config.json and refuses what megavm does not
compute, `Checkpoint` hands out tensors. Nothing is read twice and nothing is copied: a tensor is a
view of the mapped file, its pages are read on first use and given back with `Checkpoint.release`.
torch is imported only when the first tensor is asked for, so that reading a configuration stays
fast.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast, get_args

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["bfloat16", "float32", "float16"]
RopeKind = Literal["default", "linear", "llama3"]

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
SHIPPED_MODELS: Final = Path(__file__).resolve().parent.parent / "models"

EMBEDDING: Final = "model.embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"

# What is fetched first: small, and enough to refuse a model before its weights are downloaded.
_DESCRIPTION_FILES: Final = [
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]

# Sizes of one element in a safetensors file, and the names of those that hold weights megavm
# computes with.
_ELEMENT_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_WEIGHT_DTYPES: Final[dict[str, StoredDtype]] = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
}

_MAX_JSON_BYTES: Final = 256 << 20
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format itself
_CONVERSION_BYTES: Final = 16 << 20  # source bytes that one conversion keeps mapped at a time


# --- finding the directory -----------------------------------------------------------------------


def resolve(model: str) -> Path:
    """The local directory of `model`, downloading it only if it is nowhere on this machine.

    Tried in order: an existing directory; a model shipped with megavm ("stories"); the cache of
    Hugging Face; its hub (huggingface_hub respects `HF_HUB_OFFLINE`, `HF_HOME` and `HF_TOKEN`). A
    model that megavm cannot run is refused by its config.json, before its weights are fetched.

    Raises:
        ValueError: not a directory and not a model id, no such repository, access not granted,
            offline, or a configuration that is not supported.
    """
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        raise ValueError(f"model must be a directory or a Hugging Face model id, not {model!r}")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.exists():
            raise ValueError(f"{path} is a file: give the directory that holds it")
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no home for "~user"
        raise ValueError(f"cannot look for the model {model!r}: {error}") from error
    if re.fullmatch(r"[a-z0-9_-]+", model) and (SHIPPED_MODELS / model / CONFIG_FILE).is_file():
        return SHIPPED_MODELS / model
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", model, re.ASCII):
        raise ValueError(f"no such directory: {model}")
    return _resolve_on_hub(model)


def _resolve_on_hub(model: str) -> Path:
    """The snapshot directory of a hub id, from the cache if it is complete there."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no directory {model!r} here, and huggingface_hub, which might fetch it, is missing"
        ) from error
    cached = _cached_snapshot(model)
    if cached is not None and (cached / "tokenizer.json").is_file():
        return cached
    try:
        first = Path(huggingface_hub.snapshot_download(model, allow_patterns=_DESCRIPTION_FILES))
        LlamaConfig.from_dict(read_json(first / CONFIG_FILE))
        weights = (
            sorted(set(_read_index(first / INDEX_FILE).values()))
            if (first / INDEX_FILE).is_file()
            else [SINGLE_FILE]
        )
        huggingface_hub.snapshot_download(
            model, revision=first.name, allow_patterns=[*_DESCRIPTION_FILES, *weights]
        )
    except Exception as error:
        if cached is not None and _is_offline(error):
            return cached
        raise _hub_error(model, error) from error
    if not all((first / name).is_file() for name in weights):
        raise ValueError(f"the repository {model} on the Hugging Face hub has no {weights[0]}")
    return first


def _cached_snapshot(model: str) -> Path | None:
    """The snapshot of `model` in the local cache if its configuration and weights are all there."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(model, CONFIG_FILE)
    except ValueError:  # not a valid id: the download says so in full
        return None
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    if (directory / SINGLE_FILE).is_file():
        return directory
    if not (directory / INDEX_FILE).is_file():
        return None
    shards = set(_read_index(directory / INDEX_FILE).values())
    return directory if all((directory / name).is_file() for name in shards) else None


def _is_offline(error: Exception) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(
        names
        & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectionError",
           "TimeoutException", "ProxyError"}
    )  # fmt: skip


def _hub_error(model: str, error: Exception) -> ValueError:
    """What a failed download means and what to do about it, in one sentence."""
    names = {cls.__name__ for cls in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    url = f"https://huggingface.co/{model}"
    if "GatedRepoError" in names or (
        status in (401, 403) and "RepositoryNotFoundError" not in names
    ):
        reason = f"{model} is gated: accept the licence at {url}, then run `hf auth login`"
    elif "RepositoryNotFoundError" in names:
        reason = (
            f"no directory {model!r} here and no model {model} on the Hugging Face hub"
            " (if it is private, run `hf auth login`)"
        )
    elif _is_offline(error):
        reason = (
            f"no directory {model!r} here, no such model in the Hugging Face cache, and the hub"
            " cannot be reached (offline)"
        )
    elif isinstance(error, ValueError) and "HFValidationError" not in names:
        return error  # already one of our sentences: the configuration or the index is refused
    else:
        reason = f"cannot download {model} from the Hugging Face hub: {_one_line(error)}"
    return ValueError(reason)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- JSON files ----------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory.

    Raises:
        ValueError: the file is missing, not a plain file, unreadable, too large, not JSON, or not
        an object.
    """
    if not path.is_file():
        raise ValueError(f"no {path.name} in {path.parent}")
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor of a sharded checkpoint; no file outside the directory."""
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


# --- configuration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; fields that `kind` does not use keep their defaults."""

    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of one Llama model, as config.json gives it; sizes in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: StoredDtype = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def from_dict(config: dict[str, Any]) -> LlamaConfig:
        """Read the content of config.json, in the spelling of any transformers version.

        Raises:
            ValueError: a key is missing, of the wrong type, out of range, or asks for something
                that megavm does not compute; the sentence names the key and its value.
        """
        _refuse_unsupported(config)
        keys = _Keys(config)
        hidden_size = keys.integer("hidden_size", maximum=1 << 17)
        num_heads = keys.integer("num_attention_heads", maximum=1 << 12)
        num_kv_heads = keys.integer("num_key_value_heads", maximum=1 << 12, default=num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"config key num_attention_heads={num_heads} is not a multiple of"
                f" num_key_value_heads={num_kv_heads}"
            )
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ValueError(
                f"config key hidden_size={hidden_size} is not a multiple of"
                f" num_attention_heads={num_heads}, and head_dim is not given"
            )
        head_dim = keys.integer("head_dim", maximum=1 << 12, default=hidden_size // num_heads)
        if head_dim % 2:
            raise ValueError(f"config key head_dim={head_dim} is odd: rotary embedding needs pairs")
        max_positions = keys.integer("max_position_embeddings", maximum=1 << 28, default=2048)
        rope_theta, rope_scaling = _read_rope(config, max_positions)
        bos = keys.token_ids("bos_token_id")
        return LlamaConfig(
            vocab_size=keys.integer("vocab_size", maximum=1 << 24),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size", maximum=1 << 20),
            num_layers=keys.integer("num_hidden_layers", maximum=1 << 12),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=keys.boolean("tie_word_embeddings"),
            attention_bias=keys.boolean("attention_bias"),
            mlp_bias=keys.boolean("mlp_bias"),
            dtype=_read_dtype(config) or "float32",
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=keys.token_ids("eos_token_id"),
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied LM head counts once."""
        shapes = expected_tensors(self)
        if self.tie_word_embeddings:
            shapes.pop(LM_HEAD)
        return sum(math.prod(shape) for shape in shapes.values())

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of keys and values that one token of one sequence adds, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class _Keys:
    """Typed reads of a config object; every error names the key and its value."""

    def __init__(self, config: dict[str, Any], prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix

    def _fail(self, key: str, wanted: str) -> NoReturn:
        if self._config.get(key) is None:
            raise ValueError(f"config key {self._prefix}{key} is missing")
        value = _short(self._config[key])
        raise ValueError(f"config key {self._prefix}{key}={value} must be {wanted}")

    def integer(self, key: str, *, maximum: int, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            self._fail(key, f"an integer in [1, {maximum}]")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not _is_positive_number(value):
            self._fail(key, "a positive number")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str) -> bool:
        value = self._config.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            self._fail(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._config.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in values
        ):
            self._fail(key, "a token id or a list of token ids")
        return tuple(values)


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and float(value) > 0
    except OverflowError:  # an integer beyond the range of a double
        return False


def _short(value: object) -> str:
    text = json.dumps(value) if isinstance(value, str | list | dict) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Name the first key that asks for a computation megavm does not have."""

    def refuse(key: str, reason: str) -> NoReturn:
        raise ValueError(f"config key {key}={_short(config[key])} is not supported: {reason}")

    architectures = config.get("architectures")
    if architectures is None:
        if config.get("model_type") is None:
            raise ValueError("config key architectures is missing: megavm runs LlamaForCausalLM")
        if config["model_type"] != "llama":
            refuse("model_type", "megavm runs llama")
    elif architectures != ["LlamaForCausalLM"]:
        refuse("architectures", "megavm runs LlamaForCausalLM")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "megavm runs silu")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            refuse(key, "megavm reads weights stored as bfloat16, float32 or float16")
    if config.get("pretraining_tp") not in (None, 1):
        refuse("pretraining_tp", "only 1 is")
    if config.get("partial_rotary_factor") not in (None, 1):
        refuse("partial_rotary_factor", "only 1 is")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        refuse("sliding_window", "every layer attends to the whole context")
    layer_types = config.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        refuse("layer_types", "every layer attends to the whole context")
    if config.get("is_encoder_decoder"):
        refuse("is_encoder_decoder", "megavm runs decoders")


def _read_dtype(config: dict[str, Any]) -> StoredDtype | None:
    """The stored dtype that config.json names, or None where it names none."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in get_args(StoredDtype):
        raise ValueError(
            f"config key {key}={_short(value)} is not supported: megavm reads bfloat16, float32"
            " and float16"
        )
    return cast(StoredDtype, name)


def _read_rope(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """rope_theta and the scaling, spelt `rope_parameters` or `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key)
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config key {key}={_short(parameters)} must be an object")
    keys = _Keys(parameters, prefix=f"{key}.")
    theta_keys = keys if parameters.get("rope_theta") is not None else _Keys(config)
    theta = theta_keys.number("rope_theta", default=10000.0)
    if parameters.get("partial_rotary_factor") not in (None, 1):
        value = _short(parameters["partial_rotary_factor"])
        raise ValueError(
            f"config key {key}.partial_rotary_factor={value} is not supported: only 1 is"
        )
    type_key = "rope_type" if parameters.get("rope_type") is not None else "type"
    kind = parameters.get(type_key)
    if kind is None or kind == "default":
        if kind is None and any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError(
                f"config key {key}={_short(parameters)} is not supported: one rotary embedding"
                " for all layers is"
            )
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=keys.number("factor"))
    if kind != "llama3":
        raise ValueError(
            f"config key {key}.{type_key}={_short(kind)} is not supported: megavm runs"
            " default, linear and llama3"
        )
    scaling = RopeScaling(
        kind="llama3",
        factor=keys.number("factor"),
        low_freq_factor=keys.number("low_freq_factor"),
        high_freq_factor=keys.number("high_freq_factor"),
        original_max_position_embeddings=keys.integer(
            "original_max_position_embeddings", maximum=1 << 28, default=max_positions
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(
            f"config key {key}.high_freq_factor={scaling.high_freq_factor} must be greater than"
            f" low_freq_factor={scaling.low_freq_factor}"
        )
    return theta, scaling


def rope_inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """The angle that one position adds to each rotary pair: float32 [head_dim / 2], radians.

    With d = head_dim and i in [0, d / 2):

    - default (Su et al. 2021, RoFormer, section 3.4.2): f[i] = rope_theta ** (-2 i / d)
    - linear (Chen et al. 2023, position interpolation): f[i] / factor
    - llama3 (the Llama 3.1 reference code): with wavelength w = 2 pi / f[i] and L the context of
      the pretraining, f[i] where w < L / high_freq_factor, f[i] / factor where w > L /
      low_freq_factor, and between the two (1 - s) f[i] / factor + s f[i] with s = (L / w -
      low_freq_factor) / (high_freq_factor - low_freq_factor)

    Computed in float32 in the order of operations that transformers uses, so that the bits agree.
    """
    import torch

    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies: torch.Tensor = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < context / high, frequencies, stretched)


# --- weights -------------------------------------------------------------------------------------


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a model, in the order in which a forward pass reads them.

    Matrices are [outputs, inputs] as Hugging Face stores them. `lm_head.weight` is always listed:
    where the embeddings are tied it is the embedding itself and need not be in the file.
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, shape in attention.items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = shape
            if config.attention_bias:
                shapes[f"{prefix}.self_attn.{name}.bias"] = shape[:1]
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in mlp.items():
            shapes[f"{prefix}.mlp.{name}.weight"] = shape
            if config.mlp_bias:
                shapes[f"{prefix}.mlp.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `begin` and `end` are byte offsets from the start of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One safetensors file: its header read and checked at once, its data mapped on first use.

    The format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape,
    data_offsets}}, then the data of all tensors without holes.

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
            raise ValueError(f"the header of {self.path} is corrupt: {_one_line(error)}") from error
        if end > size:
            raise ValueError(
                f"{self.path} is truncated: it has {size} bytes and its header announces {end}"
            )
        if end < size:
            raise ValueError(
                f"{self.path} is corrupt: it has {size} bytes and its header announces {end}"
            )

    def _check_layout(self, end: int) -> int:
        """The offset after the last tensor; tensors must follow each other without holes."""
        for name, entry in sorted(
            self.entries.items(), key=lambda item: (item[1].begin, item[1].end)
        ):
            if entry.begin != end:
                raise ValueError(f"tensor {name} begins at byte {entry.begin} instead of {end}")
            end = entry.end
        return end

    @functools.cached_property
    def _map(self) -> mmap.mmap:
        """The whole file, private and copy-on-write: a write to a tensor never reaches the disk."""
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot map {self.path}: {_one_line(error)}") from error
        announced = max((entry.end for entry in self.entries.values()), default=0)
        if len(mapped) < announced:
            raise ValueError(f"{self.path} has become shorter than its header announces")
        return mapped

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor `name` as a view of the mapped file, in its stored shape and dtype."""
        import torch

        entry = self.entries[name]
        dtype: torch.dtype = getattr(torch, _WEIGHT_DTYPES[entry.dtype])
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:  # a header of odd length: this tensor has to be copied
            data = bytearray(self._map[entry.begin : entry.end])
            return torch.frombuffer(data, dtype=dtype).view(entry.shape)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def release(self, begin: int, end: int) -> None:
        """Give bytes [begin, end) back to the page cache; tensors over them stay valid."""
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
    """One header entry with its offsets made relative to the file instead of the data section."""
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


class Checkpoint:
    """One model directory: its configuration, its generation defaults and its weights.

    `generation` is generation_config.json as a dict with `eos_token_id` made a tuple (from
    config.json where generation_config.json has none). Not safe for use by several threads while
    files are first opened.
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
        """Read the JSON files of `directory`; weights are not looked at before `check` or `tensor`.

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
        # A single file wins over an index beside it, as in transformers.
        sharded = (directory / INDEX_FILE).is_file() and not (directory / SINGLE_FILE).is_file()
        weight_map = _read_index(directory / INDEX_FILE) if sharded else None
        checkpoint = cls(directory, config, _read_generation(directory, config), weight_map)
        if _read_dtype(raw) is None and (sharded or (directory / SINGLE_FILE).is_file()):
            file, stored_name = checkpoint._locate(EMBEDDING)
            stored = _WEIGHT_DTYPES[file.entries[stored_name].dtype]
            checkpoint.config = replace(config, dtype=stored)
        return checkpoint

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a generation, possibly none."""
        ids: tuple[int, ...] = self.generation["eos_token_id"]
        return ids

    def check(self) -> None:
        """Check every file header and the place, shape and dtype of every weight; reads no data.

        Raises:
            ValueError: a file or tensor is missing, truncated, corrupt, of another shape, or stored
                in a dtype that megavm does not read.
        """
        for name in self._expected:
            self._locate(name)
        self._refuse_ignored_weights()

    def extra_tensors(self) -> Iterator[str]:
        """Names of stored tensors that the model does not use, such as `rotary_emb.inv_freq`."""
        for file_name in sorted(
            set(self._weight_map.values()) if self._weight_map else {SINGLE_FILE}
        ):
            yield from (
                name for name in self._file(file_name).entries if name not in self._expected
            )

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Weight `name` in the shape that `expected_tensors` gives, in `dtype` or as it is stored.

        Without a conversion it is a view of the mapped file: no memory until it is read, at most
        8-byte aligned, and not to be written. With one it is a fresh contiguous tensor; the source
        is read in pieces and given back, so that no second copy of a weight is ever resident.

        Raises:
            ValueError: no such weight, or it is missing, corrupt, or of another shape or dtype.
        """
        import torch

        file, stored_name = self._locate(name)
        source = file.tensor(stored_name)
        if dtype is None or dtype == source.dtype:
            return source
        if not dtype.is_floating_point:
            raise ValueError(f"cannot convert tensor {name} to {dtype}")
        entry = file.entries[stored_name]
        result = torch.empty(source.shape, dtype=dtype)
        flat_source, flat_result = source.view(-1), result.view(-1)
        width = source.element_size()
        step = _CONVERSION_BYTES // width
        for first in range(0, source.numel(), step):
            flat_result[first : first + step].copy_(flat_source[first : first + step])
            begin = entry.begin + first * width
            file.release(begin, min(begin + _CONVERSION_BYTES, entry.end))
        return result

    def release(self, name: str) -> None:
        """Give the memory that reading weight `name` made resident back to the system.

        For callers that copy a weight elsewhere: afterwards only their copy counts. A tensor handed
        out earlier stays valid; it is read from the file again where it is touched again.
        """
        file, stored_name = self._locate(name)
        entry = file.entries[stored_name]
        file.release(entry.begin, entry.end)

    def stored_bytes(self) -> int:
        """Bytes of all weights as they are stored; a tied LM head counts once."""
        places = {}
        for name in self._expected:
            file, stored_name = self._locate(name)
            places[stored_name] = file.entries[stored_name]
        return sum(entry.end - entry.begin for entry in places.values())

    def _locate(self, name: str) -> tuple[SafetensorsFile, str]:
        """The file of weight `name` and its name there; shape and dtype are checked."""
        shape = self._expected.get(name)
        if shape is None:
            raise ValueError(f"{name} is not a weight of the model in {self.directory}")
        # Tied embeddings are one tensor under one of two names; the embedding is the usual one.
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
        if entry.dtype not in _WEIGHT_DTYPES:
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
        """A bias that config.json does not announce would change the result if it were skipped."""
        modules = {name.removesuffix(".weight") for name in self._expected}
        for name in self.extra_tensors():
            module, _, kind = name.rpartition(".")
            if kind == "bias" and module in modules:
                raise ValueError(
                    f"{self.directory} holds tensor {name}, but config.json says attention_bias="
                    f"{self.config.attention_bias} and mlp_bias={self.config.mlp_bias}"
                )


def _read_generation(directory: Path, config: LlamaConfig) -> dict[str, Any]:
    """generation_config.json, its types checked; an empty one where the file is absent."""
    path = directory / GENERATION_FILE
    generation = read_json(path) if path.is_file() else {}
    for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = generation.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{path}: key {key}={_short(value)} must be a number")
    try:
        eos = _Keys(generation).token_ids("eos_token_id")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {**generation, "eos_token_id": eos or config.eos_token_ids}
