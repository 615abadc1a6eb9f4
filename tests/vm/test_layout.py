"""Layouts: every element is found again, and lies where the GPU's kernels look for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megavm.instructions.copy import Copy
from megavm.instructions.embed import Embed
from megavm.instructions.matmul import Matmul
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.layouts import program_layouts
from megavm.vm.layout import ROWS, SWIZZLED, Layout, units
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec

WEIGHT, STATE = TensorKind.WEIGHT, TensorKind.STATE


def numbered(spec: TensorSpec) -> torch.Tensor:
    """Distinct values, as far as the type can tell them apart."""
    torch.manual_seed(0)
    return torch.randn(spec.shape).to(TORCH_DTYPE[spec.dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("shape", "half"),
    [((8, 32), 0), ((16, 64), 4), ((13, 40), 0), ((1, 1), 0), ((12, 7), 3), ((72, 100), 36)],
)
def test_a_weight_in_units_is_found_again(dtype: DType, shape: tuple[int, int], half: int) -> None:
    spec = TensorSpec("w", shape, dtype, WEIGHT)
    value = numbered(spec)
    packed = units(half).pack(spec, value)
    tile = 64 // dtype.size
    assert packed.shape == (-(-shape[0] // 8), -(-shape[1] // tile), 8, tile)
    assert packed.is_contiguous()
    assert torch.equal(units(half).unpack(spec, packed), value)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_element_lies_in_the_tile_of_its_row_and_column(dtype: DType) -> None:
    spec = TensorSpec("w", (20, 70), dtype, WEIGHT)
    value = numbered(spec)
    flat = units().pack(spec, value).reshape(-1)
    tile = 64 // dtype.size
    tiles = -(-70 // tile)
    for row, column in ((0, 0), (7, 69), (8, 31), (19, 32), (13, 15)):
        unit, inner = divmod(row, 8)
        chunk, element = divmod(column % tile, 16 // dtype.size)
        within = (chunk ^ inner // 2) * (16 // dtype.size) + element
        place = ((unit * tiles + column // tile) * 8 + inner) * tile + within
        assert flat[place] == value[row, column]


def test_padding_is_zero() -> None:
    spec = TensorSpec("w", (3, 5), F32, WEIGHT)
    packed = units().pack(spec, torch.ones(3, 5))
    assert float(packed.sum()) == 15
    assert packed.numel() == 8 * 16


def test_halves_of_a_head_are_neighbours() -> None:
    spec = TensorSpec("w", (16, 32), BF16, WEIGHT)
    value = torch.arange(16).bfloat16()[:, None].expand(16, 32).contiguous()
    packed = units(half=4).pack(spec, value)
    first_head = [0, 4, 1, 5, 2, 6, 3, 7]
    assert packed[:, 0, :, 0].tolist() == [first_head, [8 + r for r in first_head]]


@pytest.mark.parametrize("columns", [64, 128])
def test_chunks_of_a_swizzled_cache_are_exchanged_by_slot(columns: int) -> None:
    spec = TensorSpec("k", (3, 2, 16, columns), BF16, STATE)
    value = numbered(spec)
    stored = SWIZZLED.pack(spec, value)
    assert torch.equal(SWIZZLED.unpack(spec, stored), value)
    for slot in (0, 1, 7, 8, 13):
        for chunk in range(columns // 8):
            at = chunk ^ (slot & 7)
            want = value[2, 1, slot, 8 * chunk : 8 * chunk + 8]
            assert torch.equal(stored[2, 1, slot, 8 * at : 8 * at + 8], want)


@pytest.mark.parametrize(
    ("spec", "wanted", "message"),
    [
        (TensorSpec("w", (8, 2, 4), F32, WEIGHT), units(), "not a matrix"),
        (TensorSpec("w", (12, 4), F32, WEIGHT), units(4), "not groups of 8"),
        (TensorSpec("k", (2, 2, 4, 64), F32, STATE), SWIZZLED, "not a KV cache of bfloat16"),
        (TensorSpec("k", (2, 2, 4, 80), BF16, STATE), SWIZZLED, "multiples of 64"),
        (TensorSpec("t", (2, 64), F32, TensorKind.ACTIVATION, True), units(), "it is tagged"),
    ],
)
def test_what_cannot_lie_so_is_refused(spec: TensorSpec, wanted: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wanted.check(spec)


# Memory.


def test_memory_speaks_natural_order_whatever_the_layout() -> None:
    spec = TensorSpec("w", (13, 40), BF16, WEIGHT)
    memory, value = Memory(), numbered(spec)
    memory.bind(spec, value)
    memory.relayout("w", units())
    assert memory.layout("w") == units()
    assert memory.relayouts == 1
    assert memory.storage("w").shape == (2, 2, 8, 32)
    assert torch.equal(memory["w"], value)
    other = value + 1
    memory.write("w", other)
    assert torch.equal(memory["w"], other)
    assert torch.equal(memory.storage("w"), units().pack(spec, other))
    memory.relayout("w", ROWS)
    assert torch.equal(memory.storage("w"), other)
    assert memory.relayouts == 2


def test_a_copy_has_the_layouts_and_take_converts() -> None:
    spec = TensorSpec("k", (2, 1, 8, 64), BF16, STATE)
    left, right = Memory(), Memory()
    for memory in (left, right):
        memory.allocate([spec])
    left.relayout("k", SWIZZLED)
    left.write("k", numbered(spec))
    assert left.copy().layout("k") == SWIZZLED
    assert torch.equal(left.copy()["k"], numbered(spec))
    right.take("k", left)
    assert torch.equal(right.storage("k"), numbered(spec))


def test_written_words_of_a_tagged_tensor_are_the_next_steps() -> None:
    spec = TensorSpec("t", (2, 4), BF16, TensorKind.ACTIVATION, tagged=True)
    memory = Memory()
    memory.allocate([spec])
    memory.epoch = 0xFFFFFFFE
    memory.write("t", numbered(spec))
    assert torch.equal(memory["t"], numbered(spec))
    assert memory.storage("t")[..., 1].unique().tolist() == [-1]


def test_write_refuses_another_shape() -> None:
    memory = Memory()
    memory.allocate([TensorSpec("y", (2, 3), F32, STATE)])
    with pytest.raises(ValueError, match=r"y has shape \(2, 3\), not \(3, 2\)"):
        memory.write("y", torch.zeros(3, 2))


# Programs.


def llama(dtype: DType, head_dim: int, tied: bool = True) -> Program:
    config = LlamaConfig(
        vocab_size=70,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    graph = llama_graph(config, Limits(2, 64, 4, 2, 16, 16), Bucket(1, 1, 64), dtype)
    return compile_graph(graph, CompileOptions(2))


def test_a_llamas_weights_are_units_its_caches_swizzled_and_the_rest_rows() -> None:
    wanted = program_layouts(llama(BF16, 64))
    assert wanted["model.embed_tokens.weight"] == (units(),)  # the LM head reads it too
    assert wanted["model.layers.1.self_attn.qkv_proj.weight"] == (units(32),)
    assert wanted["model.layers.0.mlp.gate_up_proj.weight"] == (units(96),)
    assert wanted["layers.0.k_cache"] == (SWIZZLED,)
    for name in ("model.norm.weight", "rope", "step.tokens", "logits"):
        assert wanted[name] == (ROWS,)


def test_embeddings_of_their_own_may_be_units_and_other_caches_are_rows() -> None:
    wanted = program_layouts(llama(F32, 64, tied=False))
    assert wanted["model.embed_tokens.weight"] == (ROWS, units())
    assert wanted["layers.0.k_cache"] == (ROWS,)
    assert program_layouts(llama(BF16, 16))["layers.1.v_cache"] == (ROWS,)


def product(**operands: int) -> Matmul:
    """x times a square weight: tensors 0 (x), 1 (w) and 2 (y)."""
    handles: dict[str, Any] = {"x": 0, "weight": 1, "out": 2, **operands}
    tile: dict[str, Any] = {
        "row_begin": 0,
        "row_end": 8,
        "column_begin": 0,
        "column_end": 8,
        "x_rows": 8,
    }
    return Matmul(**handles, **tile, tile=0, part=0, part_k=8, eps=0.0)


def copied(x: int, out: int) -> Copy:
    rows: dict[str, Any] = {"x_row": 0, "row_begin": 0, "row_end": 8}
    return Copy(x=x, out=out, **rows, x_column=0, column_begin=0, column_end=8)


SQUARES = [
    TensorSpec("x", (8, 8), F32, STATE),
    TensorSpec("w", (8, 8), F32, STATE),
    TensorSpec("y", (8, 8), F32, STATE),
]


@pytest.mark.parametrize("other", [copied(1, 2), copied(0, 1)], ids=["read", "written"])
def test_a_weight_in_units_that_another_kernel_takes_in_rows_is_refused(other: Copy) -> None:
    program = Program.build(SQUARES, [product(), other], [[0, 1]])
    operand = "x" if other.x == 1 else "out"
    with pytest.raises(ValueError, match="tensor w is needed as") as error:
        program_layouts(program)
    assert str(error.value) == (
        "tensor w is needed as units by instruction 0 (matmul, weight) "
        f"and rows by instruction 1 (copy, {operand})"
    )


def test_an_instruction_may_not_want_a_tensor_in_two_layouts_itself() -> None:
    program = Program.build(SQUARES, [product(x=1)], [[0]])
    with pytest.raises(ValueError, match=r"w is needed as units by .*weight\) and rows by .*x\)"):
        program_layouts(program)


def test_two_kernels_that_have_no_layout_in_common_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = llama(BF16, 64)
    assert isinstance(program.instructions[0], Embed)
    monkeypatch.setattr(Embed, "layouts", lambda self, tensors: {"table": (ROWS, units(4))})
    with pytest.raises(
        ValueError,
        match=r"embed_tokens.weight is needed as rows or units\(4\) by instruction 0 "
        r"\(embed, table\) and units by instruction \d+ \(matmul, weight\)",
    ):
        program_layouts(program)


def test_other_machines_refuse_layouts_that_they_cannot_read() -> None:
    program = llama(BF16, 64)
    memory = Memory()
    memory.allocate(program.tensors)
    memory.relayout("model.embed_tokens.weight", units())
    with pytest.raises(ValueError, match=r"embed_tokens.weight has the layout units, not rows"):
        CpuMachine().load(program, memory)
