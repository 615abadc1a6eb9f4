"""Matmul in torch."""

import torch

from megavm.instructions.matmul import Matmul
from megavm.instructions.products import norm_scale, product, write_scaled
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: Matmul, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    columns = (inst.column_begin, inst.column_end)
    if rows[0] == rows[1]:
        return
    k = inst.k(m.tensors)
    chosen = list(range(*rows))
    if inst.row_index != NONE:
        chosen = [int(r) for r in m.raw(inst.row_index)[rows[0] : rows[1]]]
        if any(not 0 <= r < inst.x_rows for r in chosen):
            raise IndexError(f"row_index holds {chosen}, x_rows is {inst.x_rows}")
    x = torch.cat([m.read(inst.x, (r, r + 1), k) for r in chosen])
    scale = torch.cat([norm_scale(m, inst, (r, r + 1)) for r in chosen])
    out = product(m, x, inst.weight, columns, scale, inst.bias, k)
    if inst.residual != NONE:
        out += m.read(inst.residual, rows, columns)
    if inst.addends != NONE:
        size = m.tensors[inst.weight].rows
        for begin in range(0, m.tensors[inst.addends].columns, size):
            out += m.read(inst.addends, rows, (begin + columns[0], begin + columns[1]))
    begin = inst.out_begin(m.tensors)
    m.write(inst.out, rows, (begin + columns[0], begin + columns[1]), out)
    write_scaled(m, inst, rows, columns, out)
    if inst.peaks != NONE:
        largest = out.amax(-1, keepdim=True)
        gathered = m.tensors[inst.peaks].shares > 1
        before = m.rank * m.tensors[inst.out].own_columns if gathered else 0
        first = before + inst.column_begin
        column = first + (out == largest).float().argmax(-1, keepdim=True)
        pair = torch.cat([largest, column.float()], dim=1)
        m.write(inst.peaks, rows, (2 * inst.tile, 2 * inst.tile + 2), pair)
