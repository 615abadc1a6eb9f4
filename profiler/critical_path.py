"""The critical path of a step: the chain of causes from its last record back to its beginning.

The cause of a record is the record that delayed the begin of its computation. Following causes from
the record that ends last gives the chain that determined the step's duration: shortening any other
record would not have made the step shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from megavm.profiler.trace import TAGGED, Trace, TraceError

# The parts of a link: the record has not begun although its cause is over (delay), the inputs
# travel from the cause to the record (latency), waiting for loads, computing, and storing and
# signalling.
PARTS: Final = ("delay", "latency", "loading", "computing", "signalling")


@dataclass(frozen=True)
class Link:
    """One record on the path, from ``begin``, when its cause was over, to ``end``; ns.

    ``through``: how the cause delayed it: "barrier", "words" or "queue"; "start" for a record
    without a cause, which counts from the beginning of the step. ``channel`` names the barrier or
    tensor. ``parts`` divides the time, see ``PARTS``.
    """

    record: int
    begin: int
    end: int
    through: str
    channel: str
    parts: dict[str, int]


@dataclass(frozen=True)
class CriticalPath:
    """The links of a step's critical path in order of time. ``begin``, ``end``: the step's, ns."""

    step: int
    begin: int
    end: int
    links: tuple[Link, ...]

    @property
    def length(self) -> int:
        """Total time of the links: ns."""
        return sum(link.end - link.begin for link in self.links)


def critical_path(trace: Trace, step: int) -> CriticalPath:
    """The critical path of the step with index ``step``, in time linear in its links.

    Raises TraceError when the causes form a cycle.
    """
    begin, end = int(trace.step_begin[step]), int(trace.step_end[step])
    offsets = trace.step_offsets
    own = slice(int(offsets[step]), int(offsets[step + 1]))
    record = own.start + int(trace.spans.signalled[own].argmax())
    links: list[Link] = []
    seen: set[int] = set()
    until = int(trace.spans.signalled[record])
    while record >= 0 and until > begin:
        if record in seen:
            raise TraceError(f"the causes of record {record} go in a circle")
        seen.add(record)
        cause = int(trace.record_cause[record])
        since = begin if cause < 0 else max(min(_over(trace, record, cause), until), begin)
        links.append(_link(trace, record, cause, since, until))
        record, until = cause, since
    return CriticalPath(step, begin, end, tuple(reversed(links)))


def _over(trace: Trace, record: int, cause: int) -> int:
    """When the cause stopped delaying the record."""
    spans, channel = trace.spans, int(trace.record_cause_channel[record])
    if channel < 0:
        return int(spans.left[cause])
    program = trace.programs[trace.record_program[record]]
    barrier = program.channel_kind[channel] != TAGGED
    over = int((spans.signalled if barrier else spans.end)[cause])
    # The record may have seen the barrier or words before the cause noted its time.
    return min(over, int(spans.inputs[record]))


def _link(trace: Trace, record: int, cause: int, since: int, until: int) -> Link:
    spans = trace.spans
    channel = int(trace.record_cause_channel[record])
    program = trace.programs[trace.record_program[record]]
    through = "start" if cause < 0 else "queue"
    if channel >= 0:
        through = "words" if program.channel_kind[channel] == TAGGED else "barrier"
    marks = {
        "delay": int(spans.begin[record]),
        "latency": int(spans.inputs[record]),
        "loading": int(spans.loaded[record]),
        "computing": int(spans.end[record]),
        "signalling": until,
    }
    parts, at = {}, since
    for part, mark in marks.items():
        mark = min(max(mark, at), until)
        parts[part], at = mark - at, mark
    return Link(record, since, until, through, program.channel_name(channel), parts)
