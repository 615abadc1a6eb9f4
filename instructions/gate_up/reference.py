"""GateUp in torch."""

from torch.nn.functional import silu

from megavm.instructions.gate_up import GateUp
from megavm.instructions.products import norm_scale, product
from megavm.vm.reference import View


def execute(inst: GateUp, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    columns = (inst.column_begin, inst.column_end)
    x, scale = m.read(inst.x, rows), norm_scale(m, inst, rows)
    half = m.tensors[inst.weight].rows // 2
    gate, up = (
        product(m, x, inst.weight, (first + columns[0], first + columns[1]), scale, inst.bias)
        for first in (0, half)
    )
    m.write(inst.out, rows, columns, silu(gate) * up)
