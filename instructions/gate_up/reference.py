"""GateUp in torch."""

from torch.nn.functional import silu

from megavm.instructions.gate_up import GateUp
from megavm.vm.reference import View


def execute(inst: GateUp, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    columns = (inst.column_begin, inst.column_end)
    x = m.normalise(m.read(inst.x, rows), inst.gain, inst.eps)
    gate = m.product(x, inst.gate, columns, inst.gate_bias)
    m.write(inst.out, rows, columns, silu(gate) * m.product(x, inst.up, columns, inst.up_bias))
