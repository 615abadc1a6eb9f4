"""Random weights of a Llama in the memory of a machine."""

from __future__ import annotations

import zlib

import torch

from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, rope_table
from megavm.scheduler.run.buckets import weight_specs
from megavm.vm.memory import Memory
from megavm.vm.tensors import BF16


def bind_random_weights(memory: Memory, config: LlamaConfig, limits: Limits) -> None:
    """Weights of bfloat16 that keep the size of activations: the same ones for the same names."""
    for spec in weight_specs(config, limits, BF16):
        if spec.name == "rope":
            memory.bind(spec, rope_table(config, limits.max_model_len).to(memory.device))
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        width = spec.shape[-1] if len(spec.shape) > 1 else 1
        values = torch.randn(spec.shape, generator=generator) * width**-0.5
        values = (values if width > 1 else 1 + 0.1 * values).bfloat16()
        memory.bind(spec, values.to(memory.device))
