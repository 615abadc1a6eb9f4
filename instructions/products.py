"""Functions that the torch references of products, and of the instructions around them, share."""

from __future__ import annotations

from typing import Protocol

import torch

from megavm.instructions.tiles import unit_of
from megavm.vm.config import NONE, UNIT_ROWS
from megavm.vm.memory import TORCH_DTYPE
from megavm.vm.reference import Rows, View


class Scaling(Protocol):
    """An instruction that multiplies the normalised rows of ``x``."""

    x: int
    x_squares: int
    eps: float


class Scaled(Protocol):
    """An instruction that prepares its result for an RMSNorm."""

    out_gain: int
    out_scaled: int
    out_squares: int


def product(
    m: View,
    x: torch.Tensor,
    weight: int,
    columns: Rows,
    scale: torch.Tensor,
    bias: int = NONE,
    k: Rows | None = None,
) -> torch.Tensor:
    """scale * (x . weight[columns]^T) + bias[columns], float32 [rows, columns], summed in float32.

    ``x`` [rows, k] is rounded to the weight's type; ``scale`` is [rows, 1]. With ``k``, ``x`` holds
    only those columns of the weight.
    """
    dtype = TORCH_DTYPE[m.tensors[weight].dtype]
    out = scale * (x.to(dtype).float() @ m.read(weight, columns, k).T)
    if bias != NONE:
        out += m.read(bias, columns).T
    return out


def norm_scale(m: View, inst: Scaling, rows: Rows) -> torch.Tensor:
    """1 / RMS of rows of x, from ``x_squares``; 1 without ``x_squares``. float32 [rows, 1]."""
    if inst.x_squares == NONE:
        return torch.ones(rows[1] - rows[0], 1)
    squares = m.read(inst.x_squares, rows).sum(-1, keepdim=True)
    return torch.rsqrt(squares / m.tensors[inst.x].columns + inst.eps)


def write_scaled(m: View, inst: Scaled, rows: Rows, columns: Rows, out: torch.Tensor) -> None:
    """Write ``out_scaled`` and ``out_squares`` of ``out`` [rows, columns], if the instruction has them."""
    if inst.out_scaled == NONE:
        return
    gain = m.raw(inst.out_gain)[columns[0] : columns[1]].float()
    m.write(inst.out_scaled, rows, columns, out * gain)
    unit = unit_of(m.tensors, inst)
    squares = sums_of_squares(out, unit)
    first = columns[0] // unit
    m.write(inst.out_squares, rows, (first, first + squares.shape[1]), squares)


def sums_of_squares(x: torch.Tensor, unit: int = UNIT_ROWS) -> torch.Tensor:
    """The sum of squares of every ``unit`` columns of x [rows, columns], in float32."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % unit))
    return padded.pow(2).view(len(x), -1, unit).sum(-1)
