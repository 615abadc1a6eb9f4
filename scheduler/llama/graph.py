"""Llama as a graph: the only module that knows the architecture.

The residual stream is float32. Queries, attention results and MLP activations have the type of the
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megavm.instructions.sample import INTEGER_COLUMNS, MASK_BITS, REAL_COLUMNS
from megavm.scheduler.compiler.graph import Batch, Graph, Value
from megavm.scheduler.llama.config import (
    EMBEDDING,
    LM_HEAD,
    LlamaConfig,
    rope_inverse_frequencies,
)
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.vm.tensors import F32, I32, DType, TensorKind, TensorSpec

MAX_LOGIT_ROWS = 64


def default_logit_rows(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """The default of ``Limits.max_logit_rows``: one for each sequence, and some for prompts.

    With fewer than 17 of them a GPU's kernel of more rows also has the code of few rows, which
    makes its matrix products slow.
    """
    return max(max_num_seqs, min(MAX_LOGIT_ROWS, max_num_batched_tokens))


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
    one row are decode programs in any case. ``sampled``: sequences may have any sampling
    parameters, such as a temperature, penalties or masks; else every choice is the largest logit.
    """

    rows: int
    logit_rows: int
    context: int
    decode: bool = False
    sampled: bool = False


INPUT, STATE = TensorKind.INPUT, TensorKind.STATE


def step_tensors(limits: Limits, vocabulary: int) -> dict[str, TensorSpec]:
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
        "allowed": ((sequences, -(-vocabulary // MASK_BITS)), I32, INPUT),
        "bias": ((sequences, vocabulary), F32, INPUT),
        "masks_written": ((1,), I32, INPUT),
        "masks_awaited": ((1,), I32, INPUT),
    }
    return {
        name: TensorSpec(f"step.{name}", shape, dtype, kind)
        for name, (shape, dtype, kind) in shapes.items()
    }


def llama_graph(
    config: LlamaConfig,
    limits: Limits,
    bucket: Bucket,
    dtype: DType,
    parallel: Parallel = ONE_RANK,
) -> Graph:
    """One step of a Llama: the batch's new tokens in, the next token of every logit row out.

    The program keeps logits in memory as "logits", float32 [max_logit_rows, vocabulary]. A greedy
    program of ranks that divide the vocabulary gathers only the largest logits, and each rank keeps
    its own as "logits.own", float32 [max_logit_rows, vocabulary / ranks].

    Raises ValueError when the model cannot be divided among the ranks.
    """
    parallel.check(config)
    steps = step_tensors(limits, config.vocab_size)
    # A step has at least one row, so a program for one row counts none: its row is live, and its
    # kernel needs no code for dead rows. It computes logits even for a step that wants none.
    counted = bucket.rows > 1
    row_count = steps["row_count"] if counted else None
    graph = Graph(bucket.rows, row_count, limits.max_num_batched_tokens, parallel.ranks)
    batch = Batch(**{name: Value.of(spec) for name, spec in steps.items()})
    layers = _Layers(graph, config, limits, bucket, batch, dtype, parallel)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    embeddings = graph.weight(EMBEDDING, (vocabulary, layers.hidden), dtype)
    x = graph.embed("embed", embeddings, batch)
    for layer in range(config.num_layers):
        x = layers.add(layer, x)
    normed = layers.normed("norm", x, "model.norm")
    count = batch.logit_count if counted else None
    chosen = graph.gather("logit_rows", normed, batch.logit_row, count, bucket.logit_rows)
    divided = parallel.divides_vocabulary(vocabulary)
    head = embeddings
    if parallel.ranks > 1 or not config.tie_word_embeddings:
        rows = vocabulary // parallel.ranks if divided else vocabulary
        head = graph.weight(LM_HEAD, (rows, hidden), dtype)
    logits = graph.linear("lm_head", chosen, head, dtype=F32)
    if not divided:
        logits = graph.output(logits, "logits")
    elif bucket.sampled:
        logits = graph.output(graph.all_gather("lm_head.all", logits), "logits")
    else:
        logits = graph.all_gather("lm_head.all", graph.output(logits, "logits.own"))
    graph.sample("sample", logits, batch, sampled=bucket.sampled)
    return graph


def logits_spec(config: LlamaConfig, limits: Limits, parallel: Parallel = ONE_RANK) -> TensorSpec:
    """The tensor "logits" of those programs of a model that have all logits on every rank."""
    shape = (limits.max_logit_rows, config.vocab_size)
    shares = parallel.ranks if parallel.divides_vocabulary(config.vocab_size) else 1
    return TensorSpec("logits", shape, F32, TensorKind.ACTIVATION, shares=shares)


@dataclass(frozen=True)
class _Layers:
    """Adds layers to a graph. All weights are those of a rank."""

    graph: Graph
    config: LlamaConfig
    limits: Limits
    bucket: Bucket
    batch: Batch
    dtype: DType
    parallel: Parallel

    @property
    def hidden(self) -> int:
        """Columns of the residual stream that a rank has: its share if ranks meet by gathers."""
        size = self.config.hidden_size
        return size // self.parallel.ranks if self.parallel.gathers else size

    def add(self, layer: int, x: Value) -> Value:
        """The rows x after a layer."""
        graph, name, label = self.graph, f"model.layers.{layer}", f"layers.{layer}"
        normed = self.normed(f"{label}.input_norm", x, f"{name}.input_layernorm")
        attended = self._attention(label, f"{name}.self_attn", normed)
        projected = self._joined(
            f"{label}.o_proj", f"{name}.self_attn.o_proj", attended, self.config.attention_bias
        )
        x = graph.add(f"{label}.attention_residual", projected, x)
        normed = self.normed(f"{label}.post_attention_norm", x, f"{name}.post_attention_layernorm")
        activated = self._mlp(label, f"{name}.mlp", normed)
        down = self._joined(
            f"{label}.down_proj", f"{name}.mlp.down_proj", activated, self.config.mlp_bias
        )
        return graph.add(f"{label}.mlp_residual", down, x)

    def normed(self, label: str, x: Value, name: str) -> Value:
        """All columns of the rows x, normalised."""
        if self.parallel.gathers:
            x = self.graph.all_gather(f"{label}.x", x)
        gain = self.graph.weight(f"{name}.weight", (self.hidden,), self.dtype)
        return self.graph.rms_norm(label, x, gain, self.config.rms_norm_eps)

    def _attention(self, label: str, name: str, normed: Value) -> Value:
        graph, config, limits, bucket = self.graph, self.config, self.limits, self.bucket
        heads, kv_heads = map(self.parallel.heads, (config.num_heads, config.num_kv_heads))
        shape = (limits.num_blocks, kv_heads, limits.block_size, config.head_dim)
        k_cache = graph.tensor(f"{label}.k_cache", shape, self.dtype, STATE)
        v_cache = graph.tensor(f"{label}.v_cache", shape, self.dtype, STATE)
        parts = [
            (f"{name}.{part}_proj", count * config.head_dim)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        ]
        weights = [self._weight(part, size, config.hidden_size) for part, size in parts]
        biases = [self._bias(part, size, config.attention_bias) for part, size in parts]
        rope = graph.weight("rope", (limits.max_model_len, config.head_dim), F32)
        q = graph.qkv_rope(
            f"{label}.qkv",
            normed,
            graph.joined(f"{name}.qkv_proj.weight", *weights),
            (k_cache, v_cache),
            rope,
            self.batch,
            self.dtype,
            graph.joined(f"{name}.qkv_proj.bias", *filter(None, biases)) if any(biases) else None,
            decode=bucket.decode or bucket.rows == 1,
        )
        return graph.attention(
            f"{label}.attention",
            q,
            (k_cache, v_cache),
            self.batch,
            scale=config.head_dim**-0.5,
            context=bucket.context,
        )

    def _mlp(self, label: str, name: str, normed: Value) -> Value:
        wide = self.parallel.width(self.config.intermediate_size)
        gate, up = (
            self.graph.linear(
                f"{label}.{part}",
                normed,
                self._weight(f"{name}.{part}", wide, self.config.hidden_size),
                self._bias(f"{name}.{part}", wide, self.config.mlp_bias),
                self.dtype,
            )
            for part in ("gate_proj", "up_proj")
        )
        return self.graph.silu_mul(f"{label}.gate_up", gate, up)

    def _joined(self, label: str, name: str, x: Value, has_bias: bool) -> Value:
        """The product of x, whose columns are divided among the ranks. All ranks get the result."""
        bias = self._bias(name, self.hidden, has_bias)
        if self.parallel.ranks > 1 and not self.parallel.gathers:
            weight = self._weight(name, self.hidden, x.columns)
            sums = self.graph.linear(label, x, weight, dtype=F32)
            return self.graph.all_reduce(f"{label}.sum", sums, bias, self.dtype)
        x = self.graph.all_gather(f"{label}.x", x)
        return self.graph.linear(
            label, x, self._weight(name, self.hidden, x.columns), bias, self.dtype
        )

    def _weight(self, name: str, *shape: int) -> Value:
        return self.graph.weight(f"{name}.weight", shape, self.dtype)

    def _bias(self, name: str, size: int, present: bool) -> Value | None:
        return self.graph.weight(f"{name}.bias", (size,), self.dtype) if present else None


def rope_table(config: LlamaConfig, positions: int) -> torch.Tensor:
    """cos and sin of the angles of every position: float32 [positions, head_dim]. See QkvRope."""
    frequencies = rope_inverse_frequencies(config).float()
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
