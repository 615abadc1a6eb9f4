"""Copy in torch."""

from megavm.instructions.copy import Copy
from megavm.vm.config import NONE
from megavm.vm.reference import View


def execute(inst: Copy, m: View) -> None:
    rows, columns = (inst.row_begin, inst.row_end), (inst.column_begin, inst.column_end)
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    source = (inst.x_row, inst.x_row + height), (inst.x_column, inst.x_column + width)
    if inst.row_index != NONE:
        return _gather(inst, m, source[1], columns)
    m.write(inst.out, rows, columns, m.read(inst.x, *source), inst.only_rank)


def _gather(inst: Copy, m: View, source: tuple[int, int], columns: tuple[int, int]) -> None:
    for row in range(*m.live(inst.row_count, inst.row_begin, inst.row_end)):
        found = int(m.raw(inst.row_index)[row])
        if not 0 <= found < inst.x_rows:
            raise IndexError(f"row_index of row {row} is {found}, x_rows is {inst.x_rows}")
        value = m.read(inst.x, (found, found + 1), source)
        m.write(inst.out, (row, row + 1), columns, value, inst.only_rank)
