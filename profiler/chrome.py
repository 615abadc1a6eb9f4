"""Export as Chrome's trace events in JSON, which Perfetto and chrome://tracing read.

A worker is a process and the lanes of its roles are threads. The slices of a consumer's phases nest
in the slice of the instruction. Arrows are flow events ("s" and "f") from the instruction whose
signal or words came last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from megavm.profiler.output import open_output
from megavm.profiler.slices import (
    THROUGH,
    Details,
    Lane,
    arrows,
    counter,
    details,
    inner,
    lanes,
    place,
    title,
)
from megavm.profiler.trace import Trace

MACHINE: Final = 0  # the process of steps and counters; worker w is process w + 1


def save_chrome(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace, one event per line.

    Raises TraceError when the trace does not say which worker executed what, OSError when the file
    cannot be written.
    """
    own = lanes(trace)
    facts = {name: getattr(trace, name) for name in ("created", "megavm", "machine", "model")}
    with open_output(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "otherData": ')
        file.write(json.dumps({name: json.dumps(_plain(value)) for name, value in facts.items()}))
        file.write(',\n"traceEvents": [\n')
        for i, event in enumerate(_events(trace, own)):
            file.write((",\n" if i else "") + event)
        file.write("\n]}\n")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else dict(value)


def _events(trace: Trace, own: list[Lane]) -> Iterator[str]:
    yield from _metadata(trace, own)
    steps = (trace.step_number, trace.step_begin, trace.step_end)
    for number, begin, end in zip(*(c.tolist() for c in steps), strict=True):
        yield _complete(MACHINE, 0, f'"step {number}"', '"step"', begin, end, "{}")
    found = details(trace)
    for lane in own:
        yield from _lane(trace, found, lane)
    yield from _arrows(trace, own)
    streams = counter(trace)
    for i, rate in enumerate(streams.rates.tolist()):
        time = _us(round(streams.begin + i * streams.bin))
        yield (
            f'{{"ph":"C","pid":{MACHINE},"ts":{time},"name":"weights and KV",'
            f'"args":{{"GB/s":{rate / 1e9:.3f}}}}}'
        )


def _metadata(trace: Trace, own: list[Lane]) -> Iterator[str]:
    yield from _name(MACHINE, None, title(trace), 0)
    yield from _name(MACHINE, 0, "steps", 0)
    for worker in sorted({lane.worker for lane in own}):
        yield from _name(worker + 1, None, trace.worker_title(worker), worker + 1)
    for lane in own:
        yield from _name(lane.worker + 1, lane.place, lane.name, lane.place)


def _name(process: int, thread: int | None, name: str, rank: int) -> Iterator[str]:
    """The name and the position of a process or thread."""
    what = "process" if thread is None else "thread"
    where = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    for key, argument in (
        (f"{what}_name", {"name": name}),
        (f"{what}_sort_index", {"sort_index": rank}),
    ):
        yield json.dumps({"ph": "M", **where, "name": key, "args": argument})


def _us(ns: int) -> str:
    """Nanoseconds as microseconds, exact."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _complete(
    process: int, thread: int, name: str, category: str, begin: int, end: int, arguments: str
) -> str:
    return (
        f'{{"ph":"X","pid":{process},"tid":{thread},"ts":{_us(begin)},"dur":{_us(end - begin)},'
        f'"name":{name},"cat":{category},"args":{arguments}}}'
    )


def _details(trace: Trace, found: Details, lane: Lane) -> list[str]:
    """More arguments of every slice of a consumer's lane; they begin with a comma."""
    labels = [json.dumps(label or "instruction") for label in trace.labels]
    columns = (getattr(found, field.name)[lane.record] for field in fields(found))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    result = []
    for flops, streamed, per_second, label, worker, by in rows:
        text = f',"flops":{flops},"held_up_by":"{THROUGH[by]}"'
        if streamed:
            text += f',"streamed_bytes":{streamed},"bytes_per_second":{per_second:.0f}'
        if label >= 0:
            text += f',"cause":{labels[label]}'
        if worker >= 0:
            text += f',"cause_worker":{worker}'
        result.append(text)
    return result


def _lane(trace: Trace, found: Details, lane: Lane) -> Iterator[str]:
    labels = [json.dumps(label or "instruction") for label in trace.labels]
    kinds = [json.dumps(kind) for kind in trace.kinds]
    record = lane.record
    columns = (
        lane.begin,
        lane.end,
        trace.record_label[record],
        trace.record_kind[record],
        trace.step_number[trace.record_step[record]],
        trace.record_instruction[record],
        trace.of_instruction("bytes")[record],
    )
    consumer = lane.role == "consumer"
    about = _details(trace, found, lane) if consumer else [""] * len(record)
    parts = [(n, b.tolist(), e.tolist()) for n, b, e in inner(trace, lane)] if consumer else []
    process, thread = lane.worker + 1, lane.place
    for i, (begin, end, label, kind, step, instruction, size) in enumerate(
        zip(*(c.tolist() for c in columns), strict=True)
    ):
        arguments = f'{{"step":{step},"instruction":{instruction},"bytes":{size}{about[i]}}}'
        yield _complete(process, thread, labels[label], kinds[kind], begin, end, arguments)
        for name, begins, ends in parts:
            if ends[i] > begins[i]:
                yield _complete(process, thread, f'"{name}"', kinds[kind], begins[i], ends[i], "{}")


def _arrows(trace: Trace, own: list[Lane]) -> Iterator[str]:
    flows = arrows(trace, own)
    thread = place("consumer")
    worker = trace.record_worker + 1
    columns = (worker[flows.source], flows.begin, worker[flows.target], flows.end)
    rows = zip(*(c.tolist() for c in columns), strict=True)
    for flow, (left, begin, right, end) in enumerate(rows):
        same = f'"cat":"dependency","name":"came last","id":{flow}'
        yield f'{{"ph":"s","pid":{left},"tid":{thread},"ts":{_us(begin)},{same}}}'
        yield f'{{"ph":"f","bp":"e","pid":{right},"tid":{thread},"ts":{_us(end)},{same}}}'
