"""How long steps take, learned from those that ran, and how many rows or steps fit into a time."""

from __future__ import annotations

import statistics
from typing import Final

from megavm.scheduler.engine.step import bucket_rows

# Prompts get at least so many rows of a step in which sequences decode, whatever the limit.
FEWEST_PROMPT_ROWS: Final = 16
_REMEMBERED = 9  # a size is expected to take the median of its last steps, so many
# The host's work for a launch, in seconds for each sequence (benchmarks/serve_cuda.py), and the
# largest share of the launch that it should take.
_HOST_SECONDS: Final = 6e-6
_HOST_SHARE: Final = 0.06
# A launch was held up by the host if it took so many times the machine's own time.
_HELD_UP: Final = 1.1
# The host is slow if it held up so many of the remembered launches: one or two may have waited for
# their program.
_OFTEN: Final = 3


class StepPace:
    """Times of steps by their size, and the rows that a step may have to end within ``limit``.

    A size is the rows of a step's bucket (``bucket_rows``): steps of one size run one program.
    The first step of each size is not counted, as its program may have been compiled in it. A size
    that has not run is expected to lie on the line through the two largest measured sizes below it;
    if there is one, to take as much longer than that as it has more rows, which is an upper bound:
    a step reads the weights once, whatever its rows. No size is tried before the one below it.

    ``limit``: seconds; None: a step may take as long as it does. ``launch``: seconds that a launch
    of several steps should take; None: as long as it does. It takes longer with many sequences, for
    the host's sake, and where the host was seen to need longer for a launch.

    One thread may call ``note`` and ``note_launch`` while another calls ``most_rows`` or
    ``most_steps``.

    Raises ValueError when a number of seconds is not positive.
    """

    def __init__(self, limit: float | None = None, launch: float | None = None) -> None:
        for what, seconds in (("a step", limit), ("a launch", launch)):
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"the time limit of {what} is {seconds} s, expected a positive number"
                )
        self.limit = limit
        self.launch = launch
        self._times: dict[int, tuple[float, ...]] = {}  # by size: of the last steps
        # Of the last launches: the seconds of one that the host held up, 0 for another.
        self._host: tuple[float, ...] = ()

    def note(self, rows: int, seconds: float) -> None:
        """Count a step of ``rows`` rows that took the machine so long."""
        size = bucket_rows(rows)
        before = self._times.get(size)
        # A new tuple each time: another thread may be reading the old one.
        self._times[size] = () if before is None else (*before, seconds)[-_REMEMBERED:]

    def note_launch(self, seconds: float, machine: float) -> None:
        """Count a launch whose results came ``seconds`` after those before; the machine's share."""
        held_up = seconds > _HELD_UP * machine
        self._host = (*self._host, seconds if held_up else 0.0)[-_REMEMBERED:]

    def expected(self, rows: int) -> float:
        """Seconds that a step of ``rows`` rows is expected to take; 0 if nothing is known."""
        size = bucket_rows(rows)
        known = [
            (s, statistics.median(t)) for s, t in sorted(self._times.items()) if t and s <= size
        ]
        if not known:
            return 0.0
        largest, time = known[-1]
        slope = time / largest
        if len(known) > 1:
            smaller, shorter = known[-2]
            slope = min(slope, max((time - shorter) / (largest - smaller), 0.0))
        return time + slope * (size - largest)

    def most_rows(self, decoding: int, most: int) -> int:
        """The most rows, up to ``most``, of a step that ends within the limit.

        ``decoding``: rows of sequences that decode. Beside them a step has room for at least
        FEWEST_PROMPT_ROWS rows of prompts, or no prompt would ever be read.
        """
        if self.limit is None:
            return most
        least = min(decoding + FEWEST_PROMPT_ROWS, most)
        rows = bucket_rows(least)
        while rows < most and self._times.get(rows) and self.expected(rows + 1) <= self.limit:
            rows = bucket_rows(rows + 1)
        return max(least, min(rows, most))

    def most_steps(self, rows: int, most: int) -> int:
        """The most steps, up to ``most``, of a launch in which ``rows`` sequences decode.

        A request that comes waits for two launches, the one that runs and the one behind it. Of a
        size below all that have run, a step takes at most as long as one of the next.
        """
        if self.launch is None:
            return most
        larger = (statistics.median(t) for _, t in sorted(self._times.items()) if t)
        step = self.expected(rows) or next(larger, 0.0)
        if not step:
            return most
        host = sorted(self._host)[-_OFTEN] if len(self._host) >= _OFTEN else 0.0
        seconds = max(self.launch, rows * _HOST_SECONDS / _HOST_SHARE, host)
        return max(1, min(most, round(seconds / step)))
