"""Examples of Noop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megavm.instructions.noop import Noop
from megavm.vm.example import Example, Table
from megavm.vm.tensors import F32


def examples(rng: np.random.Generator) -> Iterator[Example]:
    table = Table(rng)
    table.activation("bystander", (2, 4), F32)
    yield Example("nothing", Noop(), table.specs, table.values)
