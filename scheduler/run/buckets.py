"""Buckets of steps: sizes that share a program, and the programs and weights of a Llama."""

from __future__ import annotations

from collections.abc import Callable

from megavm.instructions.attention.lower import Tiling, attention_tiling
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.rewrites import rewrite
from megavm.scheduler.engine.step import bucket_rows, power_of_two
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec

OptionsFor = Callable[[int], CompileOptions]  # rows of a step -> its compile options

MIN_CONTEXT_BUCKET = 256


def choose_bucket(
    config: LlamaConfig,
    limits: Limits,
    options: OptionsFor,
    rows: int,
    logit_rows: int,
    context: int,
    *,
    decode: bool = False,
    parallel: Parallel = ONE_RANK,
) -> Bucket:
    """See ``ModelPrograms.bucket``."""
    rows = min(bucket_rows(rows), limits.max_num_batched_tokens)
    if not decode and _reads_tokens_again(options(rows), rows, context):
        rows = min(2 * options(rows).target.group_rows, limits.max_num_batched_tokens)
    chosen = options(rows)
    logit_rows = bucket_rows(logit_rows)
    if chosen.target.is_matrix_step(rows, BF16):
        logit_rows = max(logit_rows, chosen.target.min_matrix_rows)  # also of the LM head
    logit_rows = min(logit_rows, limits.max_logit_rows)

    # ``decode`` changes only programs of several rows that exchange tagged words.
    decode = decode and rows > 1 and chosen.exchange != "barrier"
    queries = 0 if decode else config.num_heads // config.num_kv_heads * config.head_dim
    heads, longest = parallel.heads(config.num_kv_heads), limits.max_model_len

    def tiling(tokens: int) -> Tiling:
        return attention_tiling(rows, heads, limits.block_size, tokens, chosen, queries)

    context = min(power_of_two(max(context, MIN_CONTEXT_BUCKET)), longest)
    while context < longest and tiling(longer := min(2 * context, longest)) == tiling(context):
        context = longer
    return Bucket(rows, logit_rows, context, decode)


def _reads_tokens_again(options: CompileOptions, rows: int, context: int) -> bool:
    """Whether so few rows of a prompt read a long context so often that larger programs are faster.

    Up to ``Target.group_rows`` rows attend one after the other, each to all tokens before it; more
    attend together. On an H200, 16 rows of 1B after 30,000 tokens take 4.9 ms, 32 rows 2.7; after
    few tokens 1.0 and 1.3 (docs/techniques.md, "Long contexts beside short ones").
    """
    target = options.target
    most = target.group_rows
    long = target.long_split > 0 and power_of_two(context) >= 2 * target.long_split
    return long and most // 2 < rows <= most and not options.fixed_order


def compile_bucket(
    config: LlamaConfig,
    limits: Limits,
    dtype: DType,
    bucket: Bucket,
    options: OptionsFor,
    parallel: Parallel = ONE_RANK,
) -> Program:
    """The verified program of a bucket."""
    graph = llama_graph(config, limits, bucket, dtype, parallel)
    metadata = {"model": "llama", "bucket": vars(bucket)}
    return compile_graph(graph, options(bucket.rows), metadata)


def choose_dtype(config: LlamaConfig, name: str) -> DType:
    """The element type of weights and KV cache for ``auto``, ``bfloat16`` or ``float32``.

    Raises ValueError for another name.
    """
    if name == "auto":
        name = "float32" if config.dtype == "float32" else "bfloat16"
    types = {"float32": F32, "bfloat16": BF16}
    if name not in types:
        raise ValueError(f"dtype {name!r} is not supported: expected auto, bfloat16 or float32")
    return types[name]


def weight_specs(
    config: LlamaConfig, limits: Limits, dtype: DType, parallel: Parallel = ONE_RANK
) -> list[TensorSpec]:
    """The weights that the programs of a Llama use, with the rotary table, as a rank has them."""
    graph = llama_graph(config, limits, Bucket(1, 1, limits.max_model_len), dtype, parallel)
    specs: dict[str, TensorSpec] = {}
    for operation in rewrite(graph, CompileOptions(workers=1)):
        for value in operation.inputs.values():
            if value.spec is not None and value.spec.kind is TensorKind.WEIGHT:
                specs[value.spec.name] = value.spec
    return list(specs.values())
