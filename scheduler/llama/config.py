"""config.json of a Llama: its values, the features that are refused, and the expected weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast, get_args

from megavm.scheduler.llama.json_files import Keys, short
from megavm.scheduler.llama.safetensors_file import StoredDtype

if TYPE_CHECKING:
    import torch

RopeKind = Literal["default", "linear", "llama3"]

EMBEDDING: Final = "model.embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies; fields that `kind` does not use keep their defaults."""

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
        """Read the contents of config.json, as written by any version of transformers.

        Raises:
            ValueError: a key is missing, of the wrong type, out of range, or asks for a computation
                that megavm does not have; the message names the key and its value.
        """
        _refuse_unsupported(config)
        keys = Keys(config)
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
            dtype=read_dtype(config) or "float32",
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

    def stored_name(self, name: str) -> str:
        """The weight of the checkpoint that has the elements of weight ``name``."""
        return EMBEDDING if name == LM_HEAD and self.tie_word_embeddings else name

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of keys and values that one token of one sequence adds, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Raise ValueError for the first key that asks for a computation megavm does not have."""

    def refuse(key: str, reason: str) -> NoReturn:
        raise ValueError(f"config key {key}={short(config[key])} is not supported: {reason}")

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


def read_dtype(config: dict[str, Any]) -> StoredDtype | None:
    """The stored dtype that config.json names, or None. Raises ValueError for an unknown one."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in get_args(StoredDtype):
        raise ValueError(
            f"config key {key}={short(value)} is not supported: megavm reads bfloat16, float32"
            " and float16"
        )
    return cast(StoredDtype, name)


def _read_rope(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """rope_theta and the scaling, from `rope_parameters` or `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key)
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ValueError(f"config key {key}={short(parameters)} must be an object")
    keys = Keys(parameters, prefix=f"{key}.")
    theta_keys = keys if parameters.get("rope_theta") is not None else Keys(config)
    theta = theta_keys.number("rope_theta", default=10000.0)
    if parameters.get("partial_rotary_factor") not in (None, 1):
        value = short(parameters["partial_rotary_factor"])
        raise ValueError(
            f"config key {key}.partial_rotary_factor={value} is not supported: only 1 is"
        )
    type_key = "rope_type" if parameters.get("rope_type") is not None else "type"
    kind = parameters.get(type_key)
    if kind is None or kind == "default":
        if kind is None and any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError(
                f"config key {key}={short(parameters)} is not supported: one rotary embedding"
                " for all layers is"
            )
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=keys.number("factor"))
    if kind != "llama3":
        raise ValueError(
            f"config key {key}.{type_key}={short(kind)} is not supported: megavm runs"
            " default, linear and llama3"
        )
    # As in transformers, the model's own key comes first.
    top = config.get("original_max_position_embeddings") is not None
    scaling = RopeScaling(
        kind="llama3",
        factor=keys.number("factor"),
        low_freq_factor=keys.number("low_freq_factor"),
        high_freq_factor=keys.number("high_freq_factor"),
        original_max_position_embeddings=(Keys(config) if top else keys).integer(
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

    Computed in float32 in the order of operations of transformers, so that results agree bit by
    bit.
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


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a model, in the order in which a forward pass reads them.

    Matrices are [outputs, inputs] as Hugging Face stores them. `lm_head.weight` is always listed.
    If embeddings are tied, it is the embedding itself and need not be in the file.
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
