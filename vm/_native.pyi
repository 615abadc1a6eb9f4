"""The compiled module: vm/cpu/bindings.cpp and vm/verify/bindings.cpp."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# (address and rows of each part, rows, columns, columns that a rank writes, shape, dtype code, tagged)
_Tensor = tuple[Sequence[tuple[int, int]], int, int, int, Sequence[int], int, bool]
# (instruction, kind of condition, barrier or tensor, row, word, target, value)
_Report = tuple[int, str, int, int, int, int, int]
# (kind, cause, worker, reports of all workers)
_Fault = tuple[str, str, int, list[_Report]]
# (instruction, barrier, value, target, missing instruction)
_Blocked = tuple[int, int, int, int, int]

class Executable:
    @property
    def broken(self) -> bool: ...
    @property
    def barriers(self) -> list[int]: ...
    def take_notes(self) -> list[npt.NDArray[np.int64]]: ...
    def reset(self) -> None: ...
    def set_steps_run(self, steps: int) -> None: ...
    def lose_signal(self, barrier: int, rank: int = 0) -> None: ...

class Interpreter:
    def __init__(self, level: str | None, timeout: float) -> None: ...
    @property
    def level(self) -> str: ...
    def load(
        self,
        words: bytes,
        tensors: Sequence[Sequence[_Tensor]],  # of each rank
        queues: Sequence[bytes],
        dynamic: bool,
        workers: int,
        signals: bytes,
        shared_barriers: int,
        exchanged: npt.NDArray[np.int64],
        arena_limits: Sequence[int],
    ) -> Executable: ...
    def run(
        self, executable: Executable, steps: int, epoch: int, main_thread: bool, trace: bool
    ) -> _Fault | None: ...
    def execute_one(
        self, executable: Executable, rank: int, index: int, step: int, epoch: int
    ) -> tuple[_Fault | None, int]: ...

declared: dict[str, str]  # what codegen.digests said when this was compiled

def levels() -> list[str]: ...
def num_processors() -> int: ...
def analyse(
    barriers: int,
    dynamic: bool,
    queues: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    waits: npt.NDArray[np.int64],
    signals: npt.NDArray[np.int64],
    orders: npt.NDArray[np.bool_],
    accesses: npt.NDArray[np.int64],
    traits: npt.NDArray[np.bool_],
) -> tuple[tuple[str, int, int, int, int, list[_Blocked]] | None, bool]: ...
