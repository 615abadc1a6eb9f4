"""What a GPU is told of the tagged words that the storer sees to."""

from __future__ import annotations

import numpy as np
import pytest

from megavm.instructions.copy import Copy
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.alike import tag_orders
from megavm.vm.config import HEADER_WORDS, NONE
from megavm.vm.cuda.exchange import make_exchanges
from megavm.vm.cuda.launch import BY_MACHINE
from megavm.vm.isa import TagOrder
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorKind, TensorSpec

CONFIG = LlamaConfig(1024, 2048, 8192, 1, 32, 8, 64)


def llama(rows: int) -> Program:
    limits = Limits(rows, 512, rows, rows, 8 * rows, 64)
    graph = llama_graph(CONFIG, limits, Bucket(rows, rows, 512, decode=rows > 1), BF16)
    return compile_graph(graph, default_options("cuda", 132, rows))


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_kernels_of_a_model_order_their_words_themselves(rows: int) -> None:
    program = llama(rows)
    table = make_exchanges(program).table
    assert (tag_orders(program.words, program.tensors) != TagOrder.BY_MACHINE.value)[
        table["num_regions"] > 0
    ].all()
    assert not (table["by_machine"] & BY_MACHINE).any()


def test_of_instructions_with_a_row_count_the_storer_knows_rows_and_words() -> None:
    program = llama(8)
    exchanges = make_exchanges(program)
    (numbers,) = np.nonzero(exchanges.table["num_regions"])
    kinds = {program.instructions[i].name() for i in numbers}
    assert kinds == {"embed", "qkv_rope", "attention", "matmul", "gate_up"}
    for i in numbers[::37].tolist():
        inst, entry = program.instructions[i], exchanges.table[i]
        values = vars(inst)
        assert (entry["row_begin"], entry["row_end"]) == (values["row_begin"], values["row_end"])
        operands = program.words[i, HEADER_WORDS:]
        assert exchanges.counts[entry["row_count"]] == values["row_count"]
        begin = int(entry["regions_begin"])
        found = exchanges.regions[begin : begin + int(entry["num_regions"])]
        told = {
            (
                int(operands[r["operand"]]),
                int(r["written"]),
                (r["row_begin"], r["row_end"]),
                (r["word_begin"], r["word_end"]),
            )
            for r in found
        }
        declared = {
            (
                r.tensor,
                write,
                r.rows,
                tuple(c * program.tensors[r.tensor].dtype.size // 4 for c in r.columns),
            )
            for write, regions in (
                (0, inst.reads(program.tensors)),
                (1, inst.writes(program.tensors)),
            )
            for r in regions
            if program.tensors[r.tensor].tagged
        }
        assert told == declared


def test_a_kernel_that_goes_over_its_work_several_times_leaves_all_words_to_the_storer() -> None:
    tensors = [
        TensorSpec("a", (2, 8), F32, TensorKind.STATE),
        TensorSpec("t", (2, 8), F32, TensorKind.ACTIVATION, tagged=True),
        TensorSpec("b", (2, 8), F32, TensorKind.STATE),
    ]
    tile = {"row_end": 2, "column_end": 8}
    zero = ("x_row", "x_column", "row_begin", "column_begin")
    operands = dict.fromkeys(zero, 0) | tile
    copies = [Copy(waits=(), signal=None, x=x, out=x + 1, **operands) for x in (0, 1)]
    program = Program.build(tensors, copies, [[0, 1]])
    exchanges = make_exchanges(program)
    assert exchanges.table["num_regions"].tolist() == [1, 1]
    out = 1 << [field.name for field in Copy.fields].index("out")
    assert exchanges.table["by_machine"].tolist() == [BY_MACHINE | out, BY_MACHINE]
    assert exchanges.table["row_count"].tolist() == [NONE, NONE]
    assert exchanges.regions["written"].tolist() == [1, 0]
