"""Copy in torch."""

from megavm.instructions.copy import Copy
from megavm.vm.reference import View


def execute(inst: Copy, m: View) -> None:
    rows, columns = (inst.row_begin, inst.row_end), (inst.column_begin, inst.column_end)
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    source = (inst.x_row, inst.x_row + height), (inst.x_column, inst.x_column + width)
    m.write(inst.out, rows, columns, m.read(inst.x, *source), inst.only_rank)
