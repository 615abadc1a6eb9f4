"""The GPU kernels of a Llama. Most programs of several rows share one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from megavm.scheduler.compiler.compile import unordered
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.step import bucket_sizes
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, default_logit_rows, llama_graph
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.scheduler.run.buckets import choose_bucket
from megavm.vm.cuda.compiler import Kernel, compile_ahead, compile_kernel
from megavm.vm.specialisation import program_header
from megavm.vm.target import TARGETS
from megavm.vm.tensors import DType


@dataclass(frozen=True)
class ModelKernel:
    """A kernel, and the bucket sizes (in rows) of the programs that it runs."""

    rows: tuple[int, ...]
    kernel: Kernel


def default_limits(config: LlamaConfig) -> Limits:
    """The default sizes of LLM on a GPU, with KV blocks for one sequence of full context."""
    length = config.max_position_embeddings
    target = TARGETS["cuda"]
    return Limits(
        max_num_seqs=target.max_num_seqs,
        max_model_len=length,
        max_num_batched_tokens=target.max_num_batched_tokens,
        max_logit_rows=default_logit_rows(target.max_num_seqs, target.max_num_batched_tokens),
        num_blocks=-(-length // target.block_size),
        block_size=target.block_size,
    )


def kernel_headers(
    config: LlamaConfig,
    dtype: DType,
    workers: int = TARGETS["cuda"].workers,
    trace: bool = False,
    sampled: bool = False,
    parallel: Parallel = ONE_RANK,
    fixed_order: bool = False,
) -> dict[str, tuple[int, ...]]:
    """The generated header of each kernel of a model -> rows of the buckets that it runs.

    ``sampled``: of the programs that can sample, else of those for greedy steps (see Bucket).
    ``parallel``: how ranks divide the model. ``fixed_order``: see CompileOptions.
    """
    # All layers are alike and kernels do not depend on their number: one layer suffices.
    config = replace(config, num_layers=1)
    limits = default_limits(config)

    options_for = functools.partial(default_options, "cuda", workers, fixed_order=fixed_order)
    headers: dict[str, dict[int, None]] = {}
    buckets = dict.fromkeys(
        choose_bucket(
            config,
            limits,
            options_for,
            rows,
            min(rows, limits.max_num_seqs),
            context,
            decode=decode,
            parallel=parallel,
        )
        for rows in bucket_sizes(limits.max_num_batched_tokens)
        for context in (1, limits.max_model_len)
        for decode in ((False, True) if rows <= limits.max_num_seqs else (False,))
    )
    for bucket in buckets:
        graph = llama_graph(config, limits, replace(bucket, sampled=sampled), dtype, parallel)
        program = unordered(graph, options_for(bucket.rows))
        headers.setdefault(program_header(program, trace=trace), {})[bucket.rows] = None
    return {header: tuple(rows) for header, rows in headers.items()}


def compile_kernels(
    config: LlamaConfig,
    dtype: DType,
    *,
    architecture: str = TARGETS["cuda"].architecture,
    workers: int = TARGETS["cuda"].workers,
    sampled: bool = False,
    parallel: Parallel = ONE_RANK,
    fixed_order: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[ModelKernel]:
    """Compile the kernels of a model, or load them from the cache. See ``kernel_headers``.

    Kernels are compiled side by side, one for each core; ``report`` gets a line before that.

    Raises ValueError when the model cannot be compiled, CompileError when a kernel cannot.
    """
    headers = kernel_headers(
        config,
        dtype,
        workers,
        sampled=sampled,
        parallel=parallel,
        fixed_order=fixed_order,
    )
    if report is not None:
        report(f"compiling up to {len(headers)} kernels for {architecture} ...")
    new = set(compile_ahead(list(headers), architecture))
    kernels = []
    for header, rows in headers.items():
        kernel = compile_kernel(header, architecture)
        cached = kernel.cached and header not in new
        kernels.append(ModelKernel(rows, replace(kernel, cached=cached)))
    return kernels
