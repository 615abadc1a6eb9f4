"""The compiled module: scheduler/engine/append.cpp."""

from megavm.scheduler.engine.sequence import Delta, Sequence, State
from megavm.scheduler.engine.step import Bools, Ints

class Appender:
    """Appends the tokens of a step; ``finished`` is the state of sequences that have ended.

    Raises TypeError when an attribute is not in the ``__slots__`` of its class.
    """

    def __init__(self, sequence: type[Sequence], delta: type[Delta], finished: State) -> None: ...
    def append_inside(
        self, sequences: tuple[Sequence, ...], tokens: Ints, stopped: Bools
    ) -> tuple[list[Delta], list[int]]:
        """Append int32 tokens [sequences, steps] where only their text must be looked at.

        That is in the middle of a sequence: it has tokens already, does not reach its length, has
        not ended, and has a ``decoder``. Where ``stopped`` [sequences] is true, a token is a stop
        token. Nothing is done for all others; returns the new deltas, and the indices of the
        others. No sequence may want log-probabilities, and no token may complete a grammar.
        ``Sequence.append`` is not called.

        Raises ValueError when the shapes do not fit each other, TypeError for other types.
        """
