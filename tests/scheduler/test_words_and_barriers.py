"""What instructions of a compiled step wait for: barriers, tagged words, and nothing more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from compiled_graphs import mlp_graph, name_of, random_memory, tiny_llama

from megavm.instructions.attention import Attention
from megavm.instructions.matmul import Matmul
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.isa import Instruction
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program, with_header
from megavm.vm.tensors import BF16, F32, DType, TensorKind
from megavm.vm.verify import VerificationError, verify


def llama_waits(program: Program, kind: str) -> list[tuple[str, ...]]:
    names = program.barriers
    return [
        tuple(sorted({names[w.barrier].split(".done")[0] for w in i.waits}))
        for i in program.instructions
        if i.name() == kind
    ]


def test_barriers_are_the_data_dependencies_and_nothing_more() -> None:
    program = tiny_llama(2, rows=1)
    assert set(llama_waits(program, "attention")) == {("layers.0.qkv",), ("layers.1.qkv",)}
    assert set(llama_waits(program, "gate_up")) == {("layers.0.o_proj",), ("layers.1.o_proj",)}
    assert set(llama_waits(program, "sample")) == {("lm_head",)}
    assert set(llama_waits(program, "embed")) == {("sample",)}
    for inst in program.instructions:
        for wait in inst.waits:
            full = int(program.signals[wait.barrier])
            assert wait.target == (0 if inst.name() == "embed" else full)


def decode_llama(
    options: CompileOptions, rows: int = 1, context: int = 32, dtype: DType = F32
) -> Program:
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    limits = Limits(rows, context, rows, rows, rows * context // 4, 4)
    graph = llama_graph(config, limits, Bucket(rows, rows, context, decode=True), dtype)
    return compile_graph(graph, options)


def memory_of_decode(program: Program, device: str = "cpu") -> Memory:
    memory = random_memory(program, device=device)
    blocks = memory["step.block_table"]
    rows = len(blocks)
    memory["step.logit_count"][0] = rows
    if rows > 1:  # a program of one row counts none
        memory["step.row_count"][0] = rows
    memory["step.row_sequence"][:] = memory["step.logit_row"][:] = torch.arange(rows)
    blocks[:] = torch.randperm(blocks.numel()).reshape(blocks.shape)
    memory["step.tokens"][:, 0] = torch.arange(3, 3 + rows)
    memory["step.sampling_integer"][:, 0] = 1
    memory["step.sampling_real"][:] = torch.tensor([0.0, 1, 0, 1, 0, 0])
    return memory


TAGGED = [
    CompileOptions(4, exchange="tagged"),
    CompileOptions(4, exchange="tagged", column_unit=8, min_chunk=4),
    CompileOptions(4, exchange="tagged", assignment="dynamic", column_unit=2),
    CompileOptions(40, exchange="tagged", column_unit=8, min_chunk=8),
]


IN_PARTS = CompileOptions(8, exchange="tagged", column_unit=8, part_of_k=64)


PREFERRED = [replace(options, exchange="preferred") for options in [*TAGGED, IN_PARTS]]


@pytest.mark.parametrize(
    ("options", "rows"), [*((o, 1) for o in [*TAGGED, IN_PARTS]), *((o, 5) for o in PREFERRED)]
)
def test_decode_steps_with_words_choose_what_steps_with_barriers_choose(
    machine: Machine, options: CompileOptions, rows: int
) -> None:
    tokens = []
    for each in (options, CompileOptions(1)):
        program = decode_llama(each, rows)
        memory = memory_of_decode(program, machine.memory_device)
        machine.load(program, memory).run(steps=29)
        memory["step.row_position"][:] = 29
        machine.load(program, memory).run(steps=2)
        tokens.append(memory["step.tokens"].tolist())
    assert tokens[0] == tokens[1]
    assert all(len(set(chosen)) > 3 for chosen in tokens[0])


@pytest.mark.parametrize("options", PREFERRED, ids=name_of)
def test_attention_of_a_decode_step_waits_for_no_barrier_of_its_step(
    options: CompileOptions,
) -> None:
    rows = min(options.workers // 2, 5)  # two KV heads: a worker has no more than one of a row
    program = decode_llama(options, rows, dtype=BF16 if options.column_unit > 2 else F32)
    assert tagged_for_attention(program) == {"q", "k_new", "v_new"}
    for inst, waits in attention_waits(program):
        assert inst.name() == "attention_merge" or waits
        assert all(name.endswith("qkv") and target == 0 for name, target in waits)
    # The tiles of rows and heads keep all workers busy but those of the largest program.
    assert ("layers.1.attention.merge" in program.labels) == (options.workers > 10)


@pytest.mark.parametrize("options", PREFERRED, ids=name_of)
def test_attention_to_more_rows_and_heads_than_workers_has_a_barrier_in_place_of_words(
    options: CompileOptions,
) -> None:
    rows = options.workers // 2 + 1
    program = decode_llama(options, rows, dtype=BF16 if options.column_unit > 2 else F32)
    assert tagged_for_attention(program) == set()
    for inst, waits in attention_waits(program):
        assert inst.name() == "attention_merge" or ("layers.1.qkv", 0) not in waits
        assert any(name == "layers.1.qkv" and target > 0 for name, target in waits)


def tagged_for_attention(program: Program) -> set[str]:
    return {t.name.split(".")[3] for t in program.tensors if t.tagged and ".qkv." in t.name}


def attention_waits(program: Program) -> list[tuple[Instruction, list[tuple[str, int]]]]:
    return [
        (inst, [(program.barriers[w.barrier].split(".done")[0], w.target) for w in inst.waits])
        for inst, label in zip(program.instructions, program.labels, strict=True)
        if label.startswith("layers.1.attention")
    ]


@pytest.mark.parametrize("rows", [1, 4])
def test_steps_that_do_not_decode_pass_no_words_to_attention(rows: int) -> None:
    """A single row always decodes."""
    program = tiny_llama(3, rows=rows, exchange="preferred")
    assert any(t.tagged and ".qkv." in t.name for t in program.tensors) == (rows == 1)


@pytest.mark.parametrize("options", TAGGED, ids=name_of)
def test_a_tagged_step_of_one_row_waits_for_no_barrier_before_its_logits(
    options: CompileOptions,
) -> None:
    program = decode_llama(options, dtype=BF16 if options.column_unit > 2 else F32)
    for inst in program.instructions:
        waits = [(program.barriers[w.barrier].split(".done")[0], w.target) for w in inst.waits]
        if inst.name() == "embed":
            assert all(target == 0 for _, target in waits)
        elif inst.name() == "attention":
            assert waits
            assert all(name.endswith("qkv") and target == 0 for name, target in waits)
        elif inst.name() == "sample":
            assert [name for name, _ in waits] == ["lm_head"]
        else:
            assert not waits
    kinds = {i.name() for i in program.instructions}
    assert "noop" not in kinds
    assert ("attention_merge" in kinds) == (options.min_chunk < 32)


@pytest.mark.parametrize("options", [TAGGED[1], TAGGED[2]], ids=name_of)
def test_attention_that_does_not_wait_for_the_step_before_is_rejected(
    options: CompileOptions,
) -> None:
    program = decode_llama(options)
    for index in np.flatnonzero(program.words[:, 0] == Attention.opcode):
        words = program.words.copy()
        words[index] = with_header(words[index], [], None)
        with pytest.raises(VerificationError, match=r"reads earlier indexed rows .*k_cache"):
            verify(replace(program, words=words))


def test_half_heads_of_odd_length_go_through_the_caches() -> None:
    def tensors(head_dim: int, unit: int, dtype: DType) -> set[str]:
        config = LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=head_dim,
        )
        graph = llama_graph(config, Limits(1, 8, 1, 1, 2, 4), Bucket(1, 1, 8), dtype)
        options = CompileOptions(2, exchange="tagged", column_unit=unit)
        names = [t.name for t in compile_graph(graph, options).tensors]
        return {n.split(".")[3] for n in names if n.startswith("layers.0.qkv.")}

    assert tensors(8, 16, BF16) == {"q", "k_new", "v_new"}
    assert tensors(8, 2, F32) == {"q", "k_new", "v_new"}
    assert tensors(10, 16, BF16) == tensors(8, 2, BF16) == set()


def test_row_tiles_wait_for_their_own_rows_only() -> None:
    graph = mlp_graph(F32, 256, hidden=512, wide=512)
    program = compile_graph(graph, CompileOptions(4))
    waited = {
        (i.row_begin, i.row_end): frozenset(w.barrier for w in i.waits)
        for i in program.instructions
        if isinstance(i, Matmul)
    }
    assert len(waited) > 1
    assert len(set(waited.values())) == len(waited)


def test_tagged_activations_need_no_barrier_inside_a_layer() -> None:
    program = tiny_llama(2, rows=1, exchange="tagged")
    for inst in program.instructions:
        if inst.name() in ("gate_up", "matmul", "qkv_rope"):
            assert not inst.waits
    kinds = {t.name for t in program.tensors if t.tagged}
    assert any("o_proj" in n or "residual" in n for n in kinds)


def square(graph: Graph, label: str, x: Value) -> Value:
    return graph.linear(label, x, graph.weight(f"{label}.w", (16, 16), F32), dtype=F32)


def test_more_dependencies_than_waits_are_joined_by_noops(machine: Machine) -> None:
    graph = Graph(1)
    first = square(graph, "first", graph.tensor("x", (1, 16), F32, TensorKind.INPUT))
    readers = [square(graph, f"reader{i}", first) for i in range(5)]
    # It takes the place of the first, whose readers it has to wait for.
    second = square(graph, "second", readers[4])
    graph.output(square(graph, "third", second), "z")
    for i, value in enumerate(readers[:4]):
        graph.output(value, f"y{i}")
    program = compile_graph(graph, CompileOptions(2))
    assert any(i.name() == "noop" for i in program.instructions)
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=3)
    weights = {n: memory[f"{n}.w"].T for n in ("first", "reader4", "second", "third")}
    one = memory["x"] @ weights["first"]
    for i in range(4):
        torch.testing.assert_close(memory[f"y{i}"], one @ memory[f"reader{i}.w"].T)
    want = one @ weights["reader4"] @ weights["second"] @ weights["third"]
    torch.testing.assert_close(memory["z"], want)


def test_the_ends_of_a_step_share_barriers_instead_of_noops(machine: Machine) -> None:
    graph = Graph(1)
    x = graph.tensor("x", (1, 16), F32, TensorKind.INPUT)
    for i in range(5):
        graph.output(square(graph, f"part{i}", x), f"y{i}")
    program = compile_graph(graph, CompileOptions(2))
    assert not any(i.name() == "noop" for i in program.instructions)
    assert all(len(i.waits) == 1 for i in program.instructions)
    memory = random_memory(program, device=machine.memory_device)
    machine.load(program, memory).run(steps=3)
    for i in range(5):
        torch.testing.assert_close(memory[f"y{i}"], memory["x"] @ memory[f"part{i}.w"].T)
