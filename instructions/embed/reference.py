"""Embed in torch."""

from megavm.instructions.embed import Embed
from megavm.instructions.products import write_scaled
from megavm.vm.reference import View


def execute(inst: Embed, m: View) -> None:
    columns = (inst.column_begin, inst.column_end)
    for row in range(*m.live(inst.row_count, inst.row_begin, inst.row_end)):
        sequence = int(m.raw(inst.row_sequence)[row])
        token = int(m.raw(inst.tokens)[sequence, m.position(inst.row_position, row)])
        if not 0 <= token < m.tensors[inst.table].rows:
            raise IndexError(f"token {token} is outside the vocabulary")
        out = m.read(inst.table, (token, token + 1), columns)
        m.write(inst.out, (row, row + 1), columns, out)
        write_scaled(m, inst, (row, row + 1), columns, out)
