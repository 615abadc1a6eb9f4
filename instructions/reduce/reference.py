"""Reduce in torch."""

from megavm.instructions.products import write_scaled
from megavm.instructions.reduce import Reduce
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: Reduce, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    if rows[0] == rows[1]:
        return
    columns = (inst.column_begin, inst.column_end)
    size = m.tensors[inst.out].own_columns
    out = m.read(inst.parts, rows, columns)
    for begin in range(size, m.tensors[inst.parts].columns, size):
        out = out + m.read(inst.parts, rows, (begin + columns[0], begin + columns[1]))
    if inst.bias != NONE:
        out = out + m.read(inst.bias, columns).T
    if inst.residual != NONE:
        out = out + m.read(inst.residual, rows, columns)
    m.write(inst.out, rows, columns, out)
    write_scaled(m, inst, rows, columns, out)
