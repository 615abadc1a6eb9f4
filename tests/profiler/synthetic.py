"""Traces of any size that no machine has run: workers do the same few instructions per layer.

A phase is one instruction per worker and waits for all of the phase before; half of the phases hand
their results on through barriers, the others through tagged words.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megavm.profiler.trace import BARRIER, TAGGED, Ints, Trace, TraceProgram

# Name, streamed bytes per worker, microseconds, whether its results are tagged words.
PHASES = (
    ("qkv_rope", 96 << 10, 2.5, True),
    ("attention", 32 << 10, 2.0, False),
    ("matmul", 64 << 10, 2.0, True),
    ("gate_up", 256 << 10, 6.0, True),
    ("matmul", 128 << 10, 3.5, False),
)
LABELS = ("qkv", "attention", "o_proj", "gate_up", "down_proj")
KINDS = {"embed": 3, "matmul": 5, "gate_up": 6, "qkv_rope": 7, "attention": 8, "sample": 10}
HOP = 700  # nanoseconds from a signal to who waits for it
GAP = 4000  # nanoseconds between launches
RATE = 4.2e12 / 132  # bytes per second and worker
FLOPS = 7.8e14 / 132  # operations per second and worker
FIELDS = ["x", "weight", "out", "row_begin", "row_end", "eps"]


def like_a_gpu(trace: Trace) -> Trace:
    """The trace with what only GPUs note, or do not.

    The storer stores while the consumers are at the next instruction, loads are noted when the
    consumers have seen them, and one kind of instruction does not note its inputs.
    """
    at = {event.name: i for i, event in enumerate(trace.events)}
    times = trace.times.copy()
    order = np.argsort(trace.record_worker, kind="stable")
    same = trace.record_worker[order][1:] == trace.record_worker[order][:-1]
    before, after = order[:-1][same], order[1:][same]
    computed, begin, end = (times[at[name]] for name in ("computed", "begin", "end"))
    begin[after] = np.maximum(computed[before], begin[after] - 400)
    end[before] = np.maximum(end[before], begin[after] + 30)
    times[at["signalled"]] = np.maximum(times[at["signalled"]], end)
    silent = trace.record_kind == trace.kinds.index("gate_up")
    for name in ("inputs", "computed", "load_arrived"):
        times[at[name], silent] = -1
    return dataclasses.replace(trace, times=times)


def program(workers: int, layers: int) -> TraceProgram:
    """A program of ``workers * (layers * len(PHASES) + 1) + 1`` instructions."""
    phases = [("embed", "embed", 4096, 1.0, False)]
    for layer in range(layers):
        phases += [
            (kind, f"layers.{layer}.{label}", size, us, tagged)
            for (kind, size, us, tagged), label in zip(PHASES, LABELS, strict=True)
        ]
    n, count = workers * len(phases) + 1, len(phases)
    phase = np.minimum(np.arange(n) // workers, count)
    kinds = [*(p[0] for p in phases), "sample"]
    words = np.zeros((n, 32), np.uint32)
    words[:, 0] = np.array([KINDS[k] for k in kinds], np.uint32)[phase]
    words[:, 1:8] = np.array([0xFFFFFFFF] + [0xFFFFFFFF, 0] * 3, np.uint32)
    words[:, 8:11] = np.column_stack([phase, np.full(n, count + 1), np.minimum(phase + 1, count)])
    words[:, 11] = np.arange(n) % workers
    words[:, 12] = np.arange(n) % workers + 1
    words[:, 13] = np.float32(1e-5).view(np.uint32)
    tagged = np.array([*(p[4] for p in phases), False])
    barrier = np.cumsum(~tagged) - 1  # of the phases that signal one
    plain = ~tagged[phase]
    words[plain, 1] = barrier[phase][plain]
    after_plain = (phase > 0) & ~tagged[phase - 1]
    words[after_plain, 2] = barrier[phase - 1][after_plain]
    words[after_plain, 3] = workers
    first = phase == 0
    words[first, 2] = barrier[count]
    # Channel c is for phase c, the last one for the next step's first.
    offsets = np.append(np.arange(count + 1) * workers, n)
    waits = np.column_stack([np.arange(n), np.where(first, count, phase - 1), first])
    size = np.array([*(p[2] for p in phases), 4096], np.int64)[phase]
    names = [p[1] for p in phases]
    facts: dict[str, Any] = {
        "fingerprint": f"{workers:032x}{layers:032x}",
        "dynamic": False,
        "workers": workers,
        "barriers": [
            f"{name}.done" for name, t in zip([*names, "sample"], tagged, strict=True) if not t
        ],
        "tensors": [
            *(
                [f"{name}.out", [1, 4096], "BF16", "activation", bool(t)]
                for name, t in zip(names, tagged[:-1], strict=True)
            ),
            ["tokens", [1, 4096], "I32", "state", False],
            ["weights", [int(size.sum()) // 8192 + 1, 4096], "BF16", "weight", False],
        ],
        "labels": [*names, "sample"],
        "metadata": {"model": "synthetic"},
        "opcodes": {
            str(opcode): {
                "name": kind,
                "help": f"{kind} of nothing",
                "fields": [
                    {
                        "name": name,
                        "word": 8 + i,
                        "kind": "tensor" if i < 3 else "float" if name == "eps" else "integer",
                    }
                    for i, name in enumerate(FIELDS)
                ],
            }
            for kind, opcode in KINDS.items()
        },
    }
    return TraceProgram(
        facts=facts,
        words=words,
        label=phase.astype(np.int32),
        bytes=size,
        load_bytes=np.where(phase == count, 0, size),
        flops=2 * size,
        channel_kind=np.where(tagged, TAGGED, BARRIER).astype(np.int32),
        channel_object=np.where(tagged, np.arange(count + 1), barrier).astype(np.int32),
        channel_target=np.where(tagged, 0, np.append(np.full(count, workers), 1)).astype(np.int32),
        channel_offsets=offsets.astype(np.int32),
        channel_producers=np.arange(n, dtype=np.int32),
        waits=waits.astype(np.int32),
    )


def synthetic_trace(
    workers: int = 8,
    steps: int = 4,
    layers: int = 2,
    seed: int = 0,
    *,
    slower: Mapping[str, float] | None = None,
    slow_worker: int | None = None,
    sms: bool = False,
    slow_sms: Sequence[int] = (),
) -> Trace:
    """A plausible trace of ``steps * (workers * (5 * layers + 1) + 1)`` records.

    ``slower`` multiplies the time of phases by label, ``slow_worker`` takes four times as long.
    With ``sms`` it knows the SMs of workers, which are others in each step; ``slow_sms`` take 1.3
    times as long.
    """
    made = program(workers, layers)
    random = np.random.default_rng(seed)
    count = len(made.facts["labels"]) - 1
    us = np.array([1.0, *[p[2] for p in PHASES] * layers, 5.0])
    size = np.array([4096, *[p[1] for p in PHASES] * layers, 0])
    shape = (steps, count + 1, workers)
    # The consumers' time once the inputs are there; now and then a worker takes longer.
    work = us[:, None] * 1e3 * random.gamma(40, 1 / 40, shape)
    work *= 1 + 2 * (random.random(shape) < 0.002)
    for label, factor in (slower or {}).items():
        work[:, 1 + LABELS.index(label) : -1 : len(LABELS)] *= factor
    if slow_worker is not None:
        work[:, :, slow_worker] *= 4
    sm = np.stack([np.random.default_rng(step).permutation(workers) for step in range(steps)])
    work *= np.where(np.isin(sm, slow_sms), 1.3, 1.0)[:, None, :]
    stream = size[:, None] / RATE * 1e9 * random.gamma(60, 1 / 60, shape)
    times = {name: np.zeros(shape) for name in EVENT_NAMES}
    now = 0.0
    slowest = np.zeros((steps, count + 1), np.int64)
    through_queue = np.zeros(shape, bool)
    for step in range(steps):
        now += GAP if step else 0
        free, loader, complete = np.full(workers, now), np.full(workers, now), now
        for phase in range(count + 1):
            t = {name: values[step, phase] for name, values in times.items()}
            t["fetched"][:] = np.maximum(free - 3000, now)
            t["load_begin"][:] = np.maximum(loader, t["fetched"] + 100)
            t["load_issued"][:] = t["load_begin"] + 0.8 * stream[step, phase]
            t["load_arrived"][:] = t["load_begin"] + stream[step, phase] + 400
            tagged = phase > 1 and PHASES[(phase - 2) % len(PHASES)][3]
            t["ready"][:] = np.maximum(t["fetched"] + 50, 0 if tagged else complete)
            t["begin"][:] = free
            t["inputs"][:] = np.maximum(free, complete)
            t["computed"][:] = np.maximum(t["inputs"] + 0.9 * work[step, phase], t["load_arrived"])
            t["end"][:] = t["computed"] + 0.1 * work[step, phase]
            t["signalled"][:] = t["end"] + 150
            through_queue[step, phase] = free >= complete
            loader = t["load_issued"].copy()
            free = t["end"].copy()
            alone = phase == count  # one worker samples, the others are done
            finish = t["end"][:1] if alone else t["end"]
            slowest[step, phase] = int(finish.argmax())
            complete = float(finish.max()) + HOP
        now = complete
    trace = _assemble(made, times, slowest, through_queue, workers, steps)
    ran_on = sm[trace.record_step, trace.record_worker].astype(np.int32)
    return dataclasses.replace(trace, record_sm=ran_on) if sms else trace


EVENT_NAMES = (
    "fetched",
    "ready",
    "load_begin",
    "load_issued",
    "load_arrived",
    "begin",
    "inputs",
    "computed",
    "end",
    "signalled",
)


def _assemble(
    made: TraceProgram,
    times: dict[str, np.ndarray[Any, Any]],
    slowest: np.ndarray[Any, Any],
    through_queue: np.ndarray[Any, Any],
    workers: int,
    steps: int,
) -> Trace:
    """The columns, records sorted by step, worker and slot."""
    _, phases, _ = through_queue.shape
    # Workers first: a worker's records follow each other. Only worker 0 has the last phase.
    present = np.ones((workers, phases), bool)
    present[1:, -1] = False

    def column(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.swapaxes(values, 1, 2)[:, present].reshape(-1)

    step, phase, worker = np.meshgrid(
        np.arange(steps), np.arange(phases), np.arange(workers), indexing="ij"
    )
    number = np.cumsum(present.reshape(-1)).reshape(present.shape) - 1  # within a step
    per_step = int(present.sum())
    before = np.maximum(phase - 1, 0)
    producer = slowest[step, before] + 0 * worker
    queue = through_queue | (phase == 0)
    cause = step * per_step + np.where(queue, number[worker, before], number[producer, before])
    cause = np.where(phase == 0, -1, cause)
    channel = np.where(queue, -1, phase - 1)

    def ints(values: np.ndarray[Any, Any]) -> Ints:
        return column(values).astype(np.int32)

    return Trace(
        machine={
            "name": "cuda",
            "device": "synthetic",
            "workers": workers,
            "bandwidth": RATE * workers,
            "flops_per_second": FLOPS * workers,
            "clock": "globaltimer",
            "clock_step": 32,
        },
        programs=(made,),
        step_program=np.zeros(steps, np.int32),
        step_number=np.arange(steps, dtype=np.int64),
        step_tokens=np.ones(steps, np.int32),
        record_step=ints(step),
        record_worker=ints(worker),
        record_slot=ints(phase),
        record_instruction=ints(phase * workers + worker),
        record_cause=ints(cause),
        record_cause_channel=ints(channel),
        times=np.stack([column(times[name]) for name in EVENT_NAMES]).astype(np.int64) // 32 * 32,
        created="2026-01-01T00:00:00+00:00",
        megavm="0",
        environment={"python": "3"},
        model={"name": "synthetic"},
        notes={"command": "synthetic"},
    )


def main() -> None:
    """Write a trace: python tests/profiler/synthetic.py FILE --workers 132 --steps 94."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--workers", type=int, default=132)
    parser.add_argument("--steps", type=int, default=94)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    trace = synthetic_trace(arguments.workers, arguments.steps, arguments.layers)
    trace.save(arguments.file)
    print(f"{arguments.file}: {trace.num_records} records")


if __name__ == "__main__":
    main()
