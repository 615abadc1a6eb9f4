"""A plausible trace without a machine: a Llama of `layers` layers on `workers` workers, step after step.

Every operation is cut into one instruction per worker (attention: fewer), waits for all instructions of the
operation before it, and streams its weights ahead of that. The result has the columns of docs/trace-format.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

NONE = 0xFFFFFFFF
EVENTS = (
    ("fetched", "controller", "the instruction is decoded"),
    ("ready", "controller", "the waits of its header are over"),
    ("load_begin", "loader", "before its first load is issued"),
    ("load_issued", "loader", "after its last load was issued"),
    ("load_arrived", "loader", "its last load is there"),
    ("begin", "consumer", "the consumers turn to it"),
    ("inputs", "consumer", "its inputs are there, tagged words too"),
    ("computed", "consumer", "its sums are complete"),
    ("end", "consumer", "its results are stored"),
    ("signalled", "storer", "its barrier is signalled"),
)
HEADER_WORDS = 8


def _fields(*declared: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "word": HEADER_WORDS + index, "kind": kind}
        for index, (name, kind) in enumerate(declared)
    ]


_PRODUCT = (
    ("x", "tensor"),
    ("weight", "tensor"),
    ("gain", "tensor"),
    ("out", "tensor"),
    ("column_begin", "integer"),
    ("column_end", "integer"),
    ("eps", "float"),
)
OPCODES: dict[str, dict[str, Any]] = {
    "3": {
        "name": "embed",
        "help": "out[r, :] := table[token[r], :]",
        "fields": _fields(("table", "tensor"), ("out", "tensor"), ("column_begin", "integer")),
    },
    "5": {
        "name": "matmul",
        "help": "out[r, c] := norm(x[r, :]) . weight[c, :]",
        "fields": _fields(*_PRODUCT),
    },
    "6": {
        "name": "gate_up",
        "help": "out[r, c] := silu(x . G[c]) * (x . U[c])",
        "fields": _fields(*_PRODUCT),
    },
    "7": {
        "name": "qkv_rope",
        "help": "projections, rotation, append to the KV cache",
        "fields": _fields(*_PRODUCT),
    },
    "8": {
        "name": "attention",
        "help": "causal attention over KV blocks, one split of the context",
        "fields": _fields(("q", "tensor"), ("out", "tensor"), ("head", "integer"), ("scale", "float")),
    },
    "10": {
        "name": "sample",
        "help": "greedy choice from the peaks",
        "fields": _fields(("logits", "tensor"), ("out", "tensor")),
    },
}


@dataclass
class _Operation:
    label: str
    opcode: int
    count: int
    load_bytes: int
    compute_ns: float
    tensor: str


@dataclass
class _Channels:
    kind: list[int] = field(default_factory=list)
    object: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    producers: list[int] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, kind: int, object_: int, target: int, producers: range) -> int:
        self.kind.append(kind)
        self.object.append(object_)
        self.target.append(target)
        self.producers.extend(producers)
        self.offsets.append(len(self.producers))
        return len(self.kind) - 1


def _operations(layers: int, workers: int, scale: float) -> list[_Operation]:
    """The operations of a step; `scale` multiplies the bytes of the weights."""
    kib = 1024 * scale
    found = [_Operation("embed", 3, 1, 4096, 400, "hidden")]
    for layer in range(layers):
        name = f"layers.{layer}."
        found += [
            _Operation(name + "qkv_proj", 7, workers, int(47 * kib), 500, name + "qkv"),
            _Operation(name + "attention", 8, max(1, workers // 4), int(32 * kib), 900, name + "heads"),
            _Operation(name + "o_proj", 5, workers, int(63 * kib), 500, name + "attended"),
            _Operation(name + "gate_up", 6, workers, int(496 * kib), 700, name + "activation"),
            _Operation(name + "down_proj", 5, workers, int(248 * kib), 700, name + "hidden"),
        ]
    found.append(_Operation("lm_head", 5, workers, int(3900 * kib), 900, "logits"))
    found.append(_Operation("sample", 10, 1, 0, 1500, "token"))
    return found


def make_trace(
    workers: int = 132,
    layers: int = 16,
    steps: int = 4,
    *,
    seed: int = 0,
    scale: float = 1.0,
    slow_worker: int | None = None,
    name: str = "synthetic-1b",
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The columns and the header of a trace. `slow_worker` computes three times slower than the others."""
    random = np.random.default_rng(seed)
    operations = _operations(layers, workers, scale)
    tensors = ["tokens", *dict.fromkeys(o.tensor for o in operations)]
    tensors += [o.label + ".weight" for o in operations]
    handle = {t: i for i, t in enumerate(tensors)}

    # The program: instructions of one operation are neighbours.
    first = np.cumsum([0] + [o.count for o in operations])
    count = int(first[-1])
    words = np.full((count, 32), 0, np.uint32)
    words[:, 1:8] = NONE
    label = np.zeros(count, np.int32)
    loads = np.zeros(count, np.int64)
    channels = _Channels()
    barriers: list[str] = []
    for index, operation in enumerate(operations):
        rows = slice(int(first[index]), int(first[index + 1]))
        words[rows, 0] = operation.opcode
        label[rows] = index
        loads[rows] = operation.load_bytes
        declared = OPCODES[str(operation.opcode)]["fields"]
        for declaration in declared:
            value: Any = NONE
            match declaration["name"]:
                case "weight" | "table":
                    value = handle[operation.label + ".weight"]
                case "x" | "q" | "logits":
                    value = handle[operations[index - 1].tensor]
                case "out":
                    value = handle[operation.tensor]
                case "column_begin" | "head":
                    value = np.arange(operation.count) * 16
                case "column_end":
                    value = np.arange(operation.count) * 16 + 16
                case "eps" | "scale":
                    value = np.float32(1e-5).view(np.uint32)
            words[rows, declaration["word"]] = value
        if index == 0:
            continue
        producers = range(int(first[index - 1]), int(first[index]))
        tagged = operation.opcode not in (5, 10)
        if tagged:
            channel = channels.add(1, handle[operations[index - 1].tensor], 0, producers)
        else:
            barriers.append(operations[index - 1].label)
            channel = channels.add(0, len(barriers) - 1, len(producers), producers)
            words[producers.start : producers.stop, 1] = len(barriers) - 1
            words[rows, 2], words[rows, 3] = len(barriers) - 1, len(producers)
        channels.waits += [(i, channel, 0) for i in range(rows.start, rows.stop)]
    # The next step begins with what this one chose.
    barriers.append("step")
    chosen = channels.add(0, len(barriers) - 1, 1, range(count - 1, count))
    words[count - 1, 1] = len(barriers) - 1
    channels.waits.append((0, chosen, 1))

    # Time, operation by operation: vectors over the workers that take part.
    slow = np.ones(workers)
    if slow_worker is not None:
        slow[slow_worker] = 3.0
    bandwidth = 4.0e3 / workers  # bytes per ns and worker
    free = {role: np.zeros(workers) for role in ("controller", "loader", "consumer", "storer")}
    previous_record = np.full(workers, -1)
    producer_time, producer_record, channel_of = np.zeros(1), np.array([-1]), -1
    parts: dict[str, list[Any]] = {k: [] for k in ("worker", "slot", "instruction", "cause", "through")}
    times: list[npt.NDArray[np.float64]] = []
    step_of: list[npt.NDArray[np.int32]] = []
    total = 0
    waiting_for = {}
    for instruction, wait_channel, _ in channels.waits:
        waiting_for[instruction] = wait_channel
    for step in range(steps):
        slots = np.zeros(workers, np.int64)
        for index, operation in enumerate(operations):
            n = operation.count
            who = np.arange(n) if n == workers else (np.arange(n) * (workers // n) + index) % workers
            jitter = random.gamma(2.0, 0.15, (4, n))
            fetched = free["controller"][who] + 60 + 100 * jitter[0]
            fetched = np.maximum(fetched, free["consumer"][who] - 6000)
            last = int(np.argmax(producer_time))
            arrived = producer_time[last] + 900 + 700 * jitter[1]
            begin = np.maximum(free["consumer"][who] + 30, fetched + 120)
            if operation.load_bytes:
                load_begin = np.maximum(free["loader"][who] + 20, begin - 9000)
                load_begin = np.maximum(load_begin, fetched + 40)
                transfer = operation.load_bytes / bandwidth * (0.85 + 0.6 * jitter[2])
                load_issued = load_begin + 0.75 * transfer
                load_arrived = load_begin + transfer + 600
            else:
                load_begin = load_issued = load_arrived = np.full(n, -1.0)
            inputs = np.maximum(begin + 20, arrived)
            computed = np.maximum(inputs, load_arrived) + operation.compute_ns * slow[who] * (
                0.8 + jitter[3]
            )
            end = computed + 250 + 150 * jitter[0]
            signalled = end + 350 + 200 * jitter[1]
            ready = np.where(fetched > arrived, fetched + 30, np.maximum(arrived - 200, fetched + 30))
            if waiting_for.get(int(first[index])) is None or channels.kind[channel_of] == 1:
                ready = fetched + 30
            by_queue = arrived <= begin
            parts["worker"].append(who)
            parts["slot"].append(slots[who].copy())
            parts["instruction"].append(np.arange(first[index], first[index + 1]))
            parts["cause"].append(np.where(by_queue, previous_record[who], producer_record[last]))
            parts["through"].append(np.where(by_queue, -1, waiting_for.get(int(first[index]), -1)))
            times.append(
                np.stack(
                    [fetched, ready, load_begin, load_issued, load_arrived]
                    + [begin, inputs, computed, end, signalled]
                )
            )
            step_of.append(np.full(n, step, np.int32))
            record = np.arange(total, total + n)
            total += n
            slots[who] += 1
            free["controller"][who] = fetched
            free["loader"][who] = np.maximum(load_issued, free["loader"][who])
            free["consumer"][who] = end
            previous_record[who] = record
            producer_time, producer_record = signalled, record
            channel_of = waiting_for.get(int(first[min(index + 1, len(operations) - 1)]), -1)

    columns = {k: np.concatenate(v) for k, v in parts.items()}
    step_column = np.concatenate(step_of)
    all_times = np.concatenate(times, axis=1)
    order = np.lexsort((columns["slot"], columns["worker"], step_column))
    place = np.empty(total, np.int64)
    place[order] = np.arange(total)
    cause = columns["cause"][order]
    cause = np.where(cause < 0, -1, place[cause])
    all_times = all_times[:, order]
    origin = all_times[all_times >= 0].min()
    rounded = np.where(all_times < 0, -1, np.round(all_times - origin)).astype(np.int64)
    data = {
        "step.program": np.zeros(steps, np.int32),
        "step.number": np.arange(steps, dtype=np.int64) + 7,
        "step.tokens": np.ones(steps, np.int32),
        "record.step": step_column[order],
        "record.worker": columns["worker"][order].astype(np.int32),
        "record.slot": columns["slot"][order].astype(np.int32),
        "record.instruction": columns["instruction"][order].astype(np.int32),
        "record.cause": cause.astype(np.int32),
        "record.cause_channel": columns["through"][order].astype(np.int32),
        "times": rounded,
        "program.0.words": words,
        "program.0.label": label,
        "program.0.bytes": loads + 8192,
        "program.0.load_bytes": loads,
        "program.0.flops": loads * 1,
        "program.0.channel_kind": np.array(channels.kind, np.int32),
        "program.0.channel_object": np.array(channels.object, np.int32),
        "program.0.channel_target": np.array(channels.target, np.int32),
        "program.0.channel_offsets": np.array(channels.offsets, np.int32),
        "program.0.channel_producers": np.array(channels.producers, np.int32),
        "program.0.waits": np.array(channels.waits, np.int32).reshape(-1, 3),
    }
    header = {
        "created": "2026-01-01T00:00:00+00:00",
        "megavm": "0.1.0",
        "machine": {
            "name": "cuda",
            "device": "Synthetic GPU",
            "workers": workers,
            "bandwidth": 4.4e12,
            "clock": "globaltimer",
            "clock_step": 32,
        },
        "environment": {"python": "3.11", "driver": "none"},
        "model": {"name": name},
        "events": [{"name": n, "role": r, "help": h} for n, r, h in EVENTS],
        "programs": [
            {
                "fingerprint": "0" * 16,
                "dynamic": False,
                "workers": workers,
                "barriers": barriers,
                "tensors": [[t, [1, 2048], "BF16", "weight", False] for t in tensors],
                "labels": [o.label for o in operations],
                "metadata": {},
                "opcodes": OPCODES,
            }
        ],
        "notes": {"command": "synthetic", "batch": 1, "context": 250},
    }
    return data, header


def write(path: Path, data: dict[str, npt.NDArray[Any]], header: Any, version: str = "1") -> Path:
    """Write columns and header as a trace file."""
    text = header if isinstance(header, str) else json.dumps(header)
    data = {name: np.ascontiguousarray(column) for name, column in data.items()}
    save_file(data, path, {"format": "megavm-trace", "version": version, "header": text})
    return path


def main() -> None:
    """python synthetic.py OUT [STEPS]: write a trace to look at."""
    import sys

    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    write(Path(sys.argv[1]), *make_trace(steps=steps))


if __name__ == "__main__":
    main()
