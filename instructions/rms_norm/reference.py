"""RmsNorm in torch."""

import torch

from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.reference import View


def execute(inst: RmsNorm, m: View) -> None:
    rows = m.live(inst.row_count, inst.row_begin, inst.row_end)
    x, gain = m.read(inst.x, rows), m.raw(inst.gain).float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + inst.eps)
    m.write(inst.out, rows, None, x * scale * gain)
