"""Llama as a graph: the only module that knows the architecture.

The residual stream is float32. Queries, attention results and MLP activations have the type of the
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS
from megavm.scheduler.compiler.graph import Batch, Graph, Value
from megavm.scheduler.llama.config import LlamaConfig, rope_inverse_frequencies
from megavm.vm.isa import F32, I32, DType, TensorKind, TensorSpec

# Default sizes of steps.
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 512
MAX_LOGIT_ROWS = 64


@dataclass(frozen=True)
class Limits:
    """The sizes that all programs of a model share. Raises ValueError when one is not positive."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_logit_rows: int
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class Bucket:
    """The largest step that a program can run: rows, logit rows, tokens of context.

    ``decode``: the program runs only steps whose rows belong to different sequences. Programs of
    one row are decode programs in any case.
    """

    rows: int
    logit_rows: int
    context: int
    decode: bool = False


INPUT, STATE = TensorKind.INPUT, TensorKind.STATE


def step_tensors(limits: Limits) -> dict[str, TensorSpec]:
    """The tensors through which the host describes a step, by their name in ``Batch``."""
    sequences, rows = limits.max_num_seqs, limits.max_num_batched_tokens
    shapes = {
        "tokens": ((sequences, limits.max_model_len + 1), I32, STATE),
        "block_table": ((sequences, limits.blocks_per_sequence), I32, INPUT),
        "row_sequence": ((rows,), I32, INPUT),
        "row_position": ((rows,), I32, INPUT),
        "row_count": ((1,), I32, INPUT),
        "logit_row": ((limits.max_logit_rows,), I32, INPUT),
        "logit_count": ((1,), I32, INPUT),
        "sampling_real": ((sequences, REAL_COLUMNS), F32, INPUT),
        "sampling_integer": ((sequences, INTEGER_COLUMNS), I32, INPUT),
    }
    return {
        name: TensorSpec(f"step.{name}", shape, dtype, kind)
        for name, (shape, dtype, kind) in shapes.items()
    }


def llama_graph(config: LlamaConfig, limits: Limits, bucket: Bucket, dtype: DType) -> Graph:
    """One step of a Llama: the batch's new tokens in, the next token of every logit row out.

    The program keeps logits in memory as "logits", float32 [max_logit_rows, vocabulary].
    """
    steps = step_tensors(limits)
    # A step has at least one row, so a program for one row counts none: its row is live, and its
    # kernel needs no code for dead rows. It computes logits even for a step that wants none.
    counted = bucket.rows > 1
    row_count = steps["row_count"] if counted else None
    graph = Graph(bucket.rows, row_count, limits.max_num_batched_tokens)
    batch = Batch(**{name: Value.of(spec) for name, spec in steps.items()})
    hidden, eps = config.hidden_size, config.rms_norm_eps
    rope = graph.weight("rope", (limits.max_model_len, config.head_dim), F32)
    embeddings = graph.weight("model.embed_tokens.weight", (config.vocab_size, hidden), dtype)
    x = graph.embed("embed", embeddings, batch)
    for layer in range(config.num_layers):
        x = _layer(graph, config, limits, bucket, batch, rope, dtype, layer, x)
    gain = graph.weight("model.norm.weight", (hidden,), dtype)
    normed = graph.rms_norm("norm", x, gain, eps)
    count = batch.logit_count if counted else None
    chosen = graph.gather("logit_rows", normed, batch.logit_row, count, bucket.logit_rows)
    head = embeddings
    if not config.tie_word_embeddings:
        head = graph.weight("lm_head.weight", (config.vocab_size, hidden), dtype)
    logits = graph.linear("lm_head", chosen, head, dtype=F32)
    logits = graph.output(logits, "logits")
    graph.sample("sample", logits, batch)
    return graph


def _layer(
    graph: Graph,
    config: LlamaConfig,
    limits: Limits,
    bucket: Bucket,
    batch: Batch,
    rope: Value,
    dtype: DType,
    layer: int,
    x: Value,
) -> Value:
    hidden, wide, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    name, label = f"model.layers.{layer}", f"layers.{layer}"

    def weight(part: str, *shape: int) -> Value:
        return graph.weight(f"{name}.{part}.weight", shape, dtype)

    def bias(part: str, size: int, present: bool) -> Value | None:
        return graph.weight(f"{name}.{part}.bias", (size,), dtype) if present else None

    shape = (limits.num_blocks, config.num_kv_heads, limits.block_size, config.head_dim)
    k_cache = graph.tensor(f"{label}.k_cache", shape, dtype, STATE)
    v_cache = graph.tensor(f"{label}.v_cache", shape, dtype, STATE)

    normed = graph.rms_norm(f"{label}.input_norm", x, weight("input_layernorm", hidden), eps)
    parts = [(f"self_attn.{p}_proj", size) for p, size in (("q", query), ("k", kv), ("v", kv))]
    qkv = f"{name}.self_attn.qkv_proj"
    qkv_weight = graph.joined(
        f"{qkv}.weight", *(weight(part, size, hidden) for part, size in parts)
    )
    biases = [bias(part, size, config.attention_bias) for part, size in parts]
    qkv_bias = graph.joined(f"{qkv}.bias", *filter(None, biases)) if config.attention_bias else None
    caches = (k_cache, v_cache)
    decode = bucket.decode or bucket.rows == 1
    q = graph.qkv_rope(
        f"{label}.qkv",
        normed,
        qkv_weight,
        caches,
        rope,
        batch,
        dtype,
        qkv_bias,
        decode=decode,
    )
    attended = graph.attention(
        f"{label}.attention",
        q,
        caches,
        batch,
        scale=config.head_dim**-0.5,
        context=bucket.context,
    )
    projected = graph.linear(
        f"{label}.o_proj",
        attended,
        weight("self_attn.o_proj", hidden, query),
        bias("self_attn.o_proj", hidden, config.attention_bias),
        dtype,
    )
    x = graph.add(f"{label}.attention_residual", projected, x)

    normed = graph.rms_norm(
        f"{label}.post_attention_norm", x, weight("post_attention_layernorm", hidden), eps
    )
    gate, up = (
        graph.linear(
            f"{label}.{part}",
            normed,
            weight(f"mlp.{part}", wide, hidden),
            bias(f"mlp.{part}", wide, config.mlp_bias),
            dtype,
        )
        for part in ("gate_proj", "up_proj")
    )
    activated = graph.silu_mul(f"{label}.gate_up", gate, up)
    down = graph.linear(
        f"{label}.down_proj",
        activated,
        weight("mlp.down_proj", hidden, wide),
        bias("mlp.down_proj", hidden, config.mlp_bias),
        dtype,
    )
    return graph.add(f"{label}.mlp_residual", down, x)


def rope_table(config: LlamaConfig, positions: int) -> torch.Tensor:
    """cos and sin of the angles of every position: float32 [positions, head_dim]. See QkvRope."""
    frequencies = rope_inverse_frequencies(config).float()
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
