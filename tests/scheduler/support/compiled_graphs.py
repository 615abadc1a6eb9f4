"""Graphs that several tests compile, and their memory."""

from __future__ import annotations

from typing import Any

import torch

from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, DType, TensorKind

ALL_OPTIONS = [
    CompileOptions(1),
    CompileOptions(3),
    CompileOptions(3, assignment="round_robin", waves=2),
    CompileOptions(4, assignment="dynamic", waves=3),
    CompileOptions(3, exchange="tagged"),
    CompileOptions(4, assignment="dynamic", exchange="tagged"),
    CompileOptions(132, exchange="tagged"),
    CompileOptions(9, part_of_k=64),
    CompileOptions(40, assignment="dynamic", exchange="tagged", part_of_k=64),
]


def name_of(options: CompileOptions) -> str:
    parts = f"-parts-of-{options.part_of_k}" if options.part_of_k else ""
    return f"{options.workers}-{options.assignment}-{options.exchange}{parts}"


def mlp_graph(dtype: DType, rows: int, hidden: int = 64, wide: int = 160) -> Graph:
    graph = Graph(rows)
    x = graph.tensor("x", (rows, hidden), F32, TensorKind.INPUT)
    normed = graph.rms_norm("norm", x, graph.weight("gain", (hidden,), dtype), 1e-5)
    gate, up = (
        graph.linear(n, normed, graph.weight(f"{n}.w", (wide, hidden), dtype), dtype=dtype)
        for n in ("gate", "up")
    )
    h = graph.silu_mul("gate_up", gate, up)
    down = graph.linear("down", h, graph.weight("down.w", (hidden, wide), dtype), dtype=dtype)
    graph.output(graph.add("residual", down, x), "y")
    return graph


def random_memory(program: Program, seed: int = 0, device: str = "cpu") -> Memory:
    torch.manual_seed(seed)
    memory = Memory(device)
    memory.allocate(program.tensors)
    for spec in program.tensors:
        if spec.kind in (TensorKind.WEIGHT, TensorKind.INPUT) and spec.dtype in TORCH_DTYPE:
            values = memory[spec.name]
            if values.is_floating_point():
                values.normal_(0, spec.columns**-0.5 if spec.columns > 1 else 1)
    return memory


def tiny_llama(workers: int, rows: int = 4, *, sampled: bool = False, **options: Any) -> Program:
    config = LlamaConfig(
        vocab_size=1067 if sampled else 67,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    limits = Limits(4, 64, rows, 4, 64, 4)
    graph = llama_graph(config, limits, Bucket(rows, 4, 64, sampled=sampled), BF16)
    return compile_graph(graph, CompileOptions(workers, **options))
