"""RmsNorm in torch."""

from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.reference import View


def execute(inst: RmsNorm, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    m.write(inst.out, rows, None, m.normalise(m.read(inst.x, rows), inst.gain, inst.eps))
