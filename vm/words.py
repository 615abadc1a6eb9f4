"""The forms in which a tagged tensor is stored, and which copy of it a step uses.

CPUs: int32 [rows, words, 2], each word's value and the tag of the step that wrote it. GPUs: int32 [COPIES, rows,
words], values alone; steps use the copies in turn, and a word of which nothing is stored is EMPTY
(cuda/words.cuh).
"""

from __future__ import annotations

import threading

import torch

from megavm.vm.cuda.launch import COPIES, EMPTY_WORD

EMPTY = EMPTY_WORD - (1 << 32)  # as int32


class Turns:
    """The copy that the next step uses, for each set of tensors that programs exchange.

    A step of a program uses the next copy of all its tagged tensors, and other steps leave these as they are.
    So programs that exchange the same tensors take turns together, and store the same words of them. Where the
    tensors of two programs are partly the same, all words must be emptied when one of them runs after the other.

    ``ahead``: the step of the next launch as part of which an instruction was run alone, else 0.

    One thread runs programs. Others may ask for the turns of tensors at any time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[frozenset[str], int] = {}  # none of them overlap
        self._is_spoilt = False
        self.ahead = 0

    def of(self, name: str) -> int:
        """The copy of a tensor that the next step uses."""
        with self._lock:
            return next((turn for names, turn in self._next.items() if name in names), 0)

    def begin(self, names: frozenset[str]) -> int | None:
        """The copy that a program's next step uses; None: all words must be emptied first, see ``restart``."""
        with self._lock:
            if self._is_spoilt:
                return None
            if names not in self._next:
                if any(names & others for others in self._next):
                    return None
                self._next[names] = 0
            return self._next[names]

    def advance(self, names: frozenset[str], steps: int) -> None:
        """Note that a program runs so many steps."""
        with self._lock:
            self._next[names] = (self._next[names] + steps) % COPIES
            self.ahead = 0

    def spoil(self) -> None:
        """Note that a run may have ended in the middle of a step."""
        self._is_spoilt = True

    def restart(self) -> None:
        """Note that all words are empty."""
        with self._lock:
            self._next.clear()
            self._is_spoilt = False


def to_copies(
    words: torch.Tensor, copies: torch.Tensor, turn: int, epoch: int, ahead: int = 0
) -> None:
    """Fill ``copies`` [COPIES, rows, words] with ``words`` [rows, words, 2].

    ``turn``: the copy that the next step uses; ``epoch``: the tag of the last step; ``ahead``: see Turns.
    """
    copies.fill_(EMPTY)
    value, tag = words.unbind(-1)
    value = torch.where(value == EMPTY, EMPTY_WORD >> 1, value)
    for step in _steps(ahead):
        is_of_step = tag == tag_of(epoch + 1 + step)
        copies[(turn + step) % COPIES] = torch.where(is_of_step, value, EMPTY)


def from_copies(copies: torch.Tensor, turn: int, epoch: int, ahead: int = 0) -> torch.Tensor:
    """The latest words of ``copies``, as int32 [rows, words, 2]; see ``to_copies``. Tag 0: there is none."""
    is_there = copies != EMPTY
    latest = is_there & ~is_there.roll(-1, 0)
    words = copies.new_zeros((*copies.shape[1:], 2))
    for step in _steps(ahead):
        copy = (turn + step) % COPIES
        words[..., 0] = torch.where(latest[copy], copies[copy], words[..., 0])
        words[..., 1] = torch.where(latest[copy], tag_of(epoch + 1 + step), words[..., 1])
    return words


def _steps(ahead: int) -> range:
    """The steps whose words the copies hold, counted from the one that runs next."""
    return range(ahead - COPIES // 2, ahead + COPIES // 2)


def tag_of(number: int) -> int:
    """The tag of a step, counted from the first that ran on a memory, as int32."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >> 31 else number
