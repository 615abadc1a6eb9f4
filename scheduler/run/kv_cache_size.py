"""The size of the KV cache: what is given, or what the memory of the machine has room for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

from megavm.instructions.attention import Attention
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits
from megavm.vm.cuda import machine as cuda_machine
from megavm.vm.target import Target
from megavm.vm.tensors import DType, TensorKind, TensorSpec

_STEP_BYTES: Final = 256 << 20
_WHOLE_STEPS: Final = 16


def default_bytes(target: Target, available: int) -> int:
    """Largest size in bytes of the default KV cache."""
    share = int(available * target.kv_fraction)
    if share >= _WHOLE_STEPS * _STEP_BYTES:
        # How much is free differs by some megabytes from run to run. Programs of the same size are
        # read from the disk (program_cache.py).
        share -= share % _STEP_BYTES
    return share if target.max_kv_bytes is None else min(target.max_kv_bytes, share)


def _weight_bytes(config: LlamaConfig, itemsize: int, ranks: int) -> int:
    """The weights of a rank in bytes.

    Every rank has the whole table of embeddings, and its share of the rest; a tied table is its
    share of the LM head, too.
    """
    table = config.vocab_size * config.hidden_size
    divided = config.num_parameters - (0 if config.tie_word_embeddings else table)
    whole = 0 if ranks == 1 and config.tie_word_embeddings else table
    return (divided // ranks + whole) * itemsize


def cpu_bytes(config: LlamaConfig, itemsize: int, ranks: int) -> int:
    """The memory in bytes that the weights will leave of this computer's.

    Raises ValueError when the weights are larger.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    weights = _weight_bytes(config, itemsize, ranks) * ranks
    if weights >= memory:
        raise ValueError(
            f"the weights take {weights / 2**30:.1f} GiB, the computer has {memory / 2**30:.1f} GiB"
        )
    return memory - weights


def gpu_bytes(config: LlamaConfig, itemsize: int, ranks: int) -> int:
    """The memory in bytes that the weights will leave free on the GPUs of all ranks.

    Raises ValueError when a GPU is not usable or the weights do not fit.
    """
    for rank in range(ranks):
        reason = cuda_machine.reason_unavailable(rank)
        if reason is not None:
            raise ValueError(f"machine 'cuda' is not available: {reason}")
    free = min(map(cuda_machine.free_memory, range(ranks)))
    rope = config.max_position_embeddings * config.head_dim * 4
    weights = _weight_bytes(config, itemsize, ranks) + rope
    if weights >= free:
        raise ValueError(
            f"the weights take {weights / 2**30:.1f} GiB{' of each GPU' if ranks > 1 else ''}, the "
            f"GPU has {free / 2**30:.1f} GiB free"
        )
    return (free - weights) * ranks


def check_memory(steps: Iterable[TensorSpec], kv_cache_bytes: int, available_bytes: int) -> None:
    """Raise ValueError when KV cache and step tensors are larger than the memory for them."""
    step_bytes = sum(spec.bytes for spec in steps)
    if kv_cache_bytes + step_bytes > available_bytes:
        raise ValueError(
            f"the KV cache takes {kv_cache_bytes / 2**30:.1f} GiB and what the host writes for "
            f"max_num_seqs sequences {step_bytes / 2**30:.1f} GiB, the memory for them has "
            f"{available_bytes / 2**30:.1f} GiB"
        )


def check_block_size(config: LlamaConfig, limits: Limits, dtype: DType, target: Target) -> None:
    """Raise ValueError when attention to KV blocks of this size needs more than a worker's memory.

    What it needs grows with the rows of a step up to a few dozen.
    """

    def needed(block_size: int) -> int:
        shape = (1, config.num_kv_heads, block_size, config.head_dim)
        tensors = (
            TensorSpec("q", (1, config.num_heads * config.head_dim), dtype, TensorKind.STATE),
            TensorSpec("keys", shape, dtype, TensorKind.STATE),
        )
        words: dict[str, Any] = dict.fromkeys(("row_sequence", "row_position", "block_table"), 0)
        words |= dict.fromkeys(("head_begin", "head_end", "split", "num_splits", "chunk"), 0)
        words |= {"context": 0, "step_rows": 0, "scale": 1.0, "q": 0, "k_cache": 1, "v_cache": 1}
        words |= {"row_begin": 0, "row_end": limits.max_num_batched_tokens}
        return Attention(**words).working_bytes(tensors)

    size, room = limits.block_size, target.working_bytes
    if room and needed(size) > room:
        fits = next((n for n in range(size - 1, 0, -1) if needed(n) <= room), None)
        raise ValueError(
            f"block_size is {size}: to attend to so many keys of {config.head_dim} {dtype.name} at"
            f" a time takes {needed(size):,} bytes, a worker has {room:,}"
            + ("" if fits is None else f"; {fits} is the largest that fits")
        )


def kv_cache_size(
    config: LlamaConfig,
    *,
    available_bytes: int,
    block_bytes: int,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_bytes: int | None,
    num_blocks: int | None,
) -> tuple[int, int]:
    """(max_model_len, num_blocks) from the given sizes and defaults.

    Raises ValueError when the given sizes contradict each other or exceed the model's limit.
    """
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ValueError("num_blocks and kv_cache_bytes both give the size of the KV cache")
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}, the model's max_position_embeddings {longest}"
        )
    if kv_cache_bytes is not None and kv_cache_bytes < block_bytes:
        raise ValueError(
            f"kv_cache_bytes is {kv_cache_bytes}, less than one KV block of {block_size} tokens, "
            f"{block_bytes} bytes"
        )
    given = num_blocks if kv_cache_bytes is None else kv_cache_bytes // block_bytes
    if given is not None:
        # The last token of a sequence needs no room.
        return max_model_len or min(longest, given * block_size + 1), given
    affordable = max(available_bytes // block_bytes, 1)
    length = max_model_len or min(longest, max(affordable * block_size, 2))
    per_sequence = -(-length // block_size)
    return length, max(min(affordable, per_sequence * max_num_seqs), per_sequence)
