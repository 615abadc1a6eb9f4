"""The shared memory of the GPU's kernels: as much as they use, and what is left for pages."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from megavm.instructions.attention.examples import FAST, Case
from megavm.instructions.attention.examples import example as attention_example
from megavm.instructions.matmul.examples import Case as Product
from megavm.instructions.matmul.examples import example as product_example
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.run.buckets import choose_bucket, compile_bucket
from megavm.scheduler.run.kernels import default_limits
from megavm.vm.config import MIN_PAGES, NUM_PAGES, PAGE_BYTES, SHARED_BYTES
from megavm.vm.cuda.compiler import CompileError, compile_kernel
from megavm.vm.cuda.memory import SCRATCH_BYTES, SCRATCH_UNIT, KernelMemory, kernel_memory
from megavm.vm.specialisation import program_header, specialisation
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)


def memory_of(config: LlamaConfig, rows: int) -> KernelMemory:
    limits = default_limits(config)
    options_for = functools.partial(default_options, "cuda", TARGETS["cuda"].workers)
    bucket = choose_bucket(config, limits, options_for, rows, rows, 1000, decode=True)
    program = compile_bucket(config, limits, BF16, bucket, options_for)
    return kernel_memory(specialisation(program.instructions, program.tensors).common)


def test_a_row_of_8b_has_its_scratch_from_attention_and_12_pages() -> None:
    assert memory_of(LLAMA_8B, 1) == KernelMemory(
        group_rows=1,
        unit_pages=14,
        chunk_pages=4,
        panel_bytes=4 * 1024 * 2,
        partial_floats=8 * 8 * 8,
        scales=0,
        scratch_bytes=8 * 4 * (128 + 2) * 4,
        pages=12,
    )


def test_several_rows_of_8b_have_their_scratch_from_partial_sums_and_11_pages() -> None:
    assert memory_of(LLAMA_8B, 8) == KernelMemory(
        group_rows=8,
        unit_pages=14,  # down_proj is not split: 14336 columns, 1024 in a page
        chunk_pages=2,
        panel_bytes=0,
        partial_floats=8 * 8 * 8 * 8,
        scales=8,
        scratch_bytes=2 * 4 * (8 * 8 * 8 * 8 + 8) + 64,  # a multiple of 128
        pages=11,
    )


def test_sixteen_rows_of_8b_have_as_much_for_half_of_a_block() -> None:
    memory = memory_of(LLAMA_8B, 16)
    assert (memory.group_rows, memory.scales) == (16, 16)
    assert memory.partial_floats == 8 * 8 * 8 * 8
    assert memory.scratch_bytes == 2 * 4 * (8 * 8 * 8 * 8 + 16)
    assert memory.pages == 11


def test_without_products_there_is_room_for_all_pages() -> None:
    memory = kernel_memory({"max_rows": 500})
    assert (memory.scratch_bytes, memory.pages) == (0, NUM_PAGES)


@pytest.mark.parametrize("scratch", [0, 1, 20000, SCRATCH_BYTES - 1, SCRATCH_BYTES])
def test_scratch_takes_pages_and_leaves_what_kernels_need(scratch: int) -> None:
    memory = kernel_memory({"max_rows": 1, "max_scratch": scratch})
    assert memory.scratch_bytes >= scratch
    assert memory.scratch_bytes % 128 == 0
    assert MIN_PAGES <= memory.pages <= NUM_PAGES
    assert memory.pages * PAGE_BYTES + memory.scratch_bytes < SHARED_BYTES


def test_scratch_that_leaves_too_few_pages_is_refused() -> None:
    needed = SCRATCH_BYTES + SCRATCH_UNIT
    with pytest.raises(ValueError, match=rf"needs {needed} bytes of scratch, .* beside 4 pages"):
        kernel_memory({"max_rows": 1, "max_scratch": SCRATCH_BYTES + 1})


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("kScratchBytes", 6144, 6016),  # of the product: its panel and partial sums
        ("kPanelBytes", 2048, 1024),
        ("kPages", 13, 14),
        ("kMaxScratch", 8 * 4 * 66 * 4, 4),  # of attention
    ],
)
def test_device_code_asserts_the_sizes_that_it_is_given(
    name: str, value: int, wrong: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    if name == "kMaxScratch":
        made = attention_example(rng, Case("", 4, 1, 64, [(0, 3)], 1, **FAST))
    else:
        made = product_example(rng, Product("", k=128, weight=BF16))
    header = program_header(made.program())
    line = f"constexpr unsigned int {name} = {value}u;"
    assert line in header
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_kernel(header.replace(line, line.replace(str(value), str(wrong))))
