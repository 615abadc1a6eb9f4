"""Lowering: cut every operation into instructions, each a tile that fits a worker.

Instructions leave here without waits and signals; barriers.py adds those from the regions they
declare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megavm.instructions.attention import Attention
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.embed import Embed
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.rms_norm import RmsNorm
from megavm.instructions.sample import Sample
from megavm.instructions.tiles import INPUT_BYTES, SCALED, SPLIT_COLUMNS
from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import Storage, may_be_tagged
from megavm.vm.config import BLOCK_UNITS, NONE, UNIT_ROWS
from megavm.vm.isa import F32, Instruction, TensorKind, TensorSpec

MOST_PARTS = 8  # of a product: who adds them up has a pair of each in registers
SUMS_BYTES = 128 * 1024  # of the sums that a CPU's product keeps when slices of the input pass by
SUMMED_COLUMNS = BLOCK_UNITS * UNIT_ROWS  # of which a GPU's worker finishes the sums at a time
MANY_SPLITS = 8  # of which one less costs less than merges that begin late


@dataclass(frozen=True)
class Tiles:
    """The instructions of one operation."""

    label: str
    instructions: tuple[Instruction, ...]


def lower(
    operations: Sequence[Operation],
    storage: Storage,
    row_count: TensorSpec | None,
    options: CompileOptions,
) -> list[Tiles]:
    """Instructions of every operation, in topological order.

    Raises ValueError for a kind of operation that has no instruction.
    """
    lowering = Lowering(operations, storage, row_count, options)
    return [tiles for operation in operations for tiles in lowering.lower(operation)]


class Lowering:
    """Cuts operations into tiles for the workers of ``options``."""

    def __init__(
        self,
        operations: Sequence[Operation],
        storage: Storage,
        row_count: TensorSpec | None,
        options: CompileOptions,
    ) -> None:
        self.storage = storage
        self.options = options
        self.row_count = NONE if row_count is None else storage.add(row_count)
        self.sampled = {o.inputs["logits"] for o in operations if o.kind == "sample"}
        self.peaks: dict[Value, int] = {}  # of logits
        self.newest: dict[int, dict[str, int]] = {}  # k_new and v_new, by k_cache

    def lower(self, operation: Operation) -> Iterator[Tiles]:
        """The instructions of one operation; attention that is split yields two."""
        kinds: dict[str, Callable[[Operation], Iterator[Instruction]]] = {
            "embed": self._embed,
            "rms_norm": self._rms_norm,
            "linear": self._linear,
            "gate_up": self._gate_up,
            "qkv_rope": self._qkv_rope,
            "sample": self._sample,
        }
        if operation.kind == "attention":
            yield from self._attention(operation)
            return
        if operation.kind not in kinds:
            raise ValueError(f"{operation.label}: no instruction does {operation.kind}")
        yield Tiles(operation.label, tuple(kinds[operation.kind](operation)))

    # Operands.

    def _handles(self, operation: Operation, *names: str) -> dict[str, Any]:
        """Handles of those inputs and outputs that the operation has."""
        values = {**operation.inputs, **operation.outputs}
        return {name: self.storage.handle(values[name]) for name in names if name in values}

    def _columns(
        self, size: int, unit: int, workers: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """[0, size) cut into equal tiles, ``waves`` for each worker, at multiples of ``unit``.

        ``workers``: how many, if not all.
        """
        units = -(-size // unit)
        tiles = min(units, (workers or self.options.workers) * self.options.waves)
        for i in range(tiles):
            yield units * i // tiles * unit, min(units * (i + 1) // tiles * unit, size)

    def _product_tiles(
        self,
        rows: int,
        columns: int,
        k: int,
        itemsize: int,
        unit: int,
        width: int,
        workers: int | None = None,
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """(columns, rows) of the tiles of a matrix product, tiles of the same weights side by side.

        ``width`` is how many sums an element of ``columns`` has; ``workers``: see ``_columns``.
        When all input rows fit into ``INPUT_BYTES`` they stay there while weights stream; otherwise
        the sums stay, and input and weights stream.
        """
        if rows * k * itemsize <= INPUT_BYTES:
            row_tile, column_tile = rows, columns
        else:
            fitting = INPUT_BYTES // (min(k, SPLIT_COLUMNS) * itemsize)
            row_tile = min(rows, 1 << (fitting.bit_length() - 1))
            column_tile = SUMS_BYTES // (4 * row_tile * width) // unit * unit
        for begin, end in self._columns(columns, unit, workers):
            pieces = -(-(end - begin) // column_tile)
            step = -(-(end - begin) // (pieces * unit)) * unit
            for left in range(begin, end, step):
                for top in range(0, rows, row_tile):
                    yield (left, min(left + step, end)), (top, min(top + row_tile, rows))

    # Operations.

    def _embed(self, operation: Operation) -> Iterator[Instruction]:
        out = operation.outputs["out"]
        names = ("table", "tokens", "row_sequence", "row_position", "out", *SCALED)
        handles = self._handles(operation, *names)
        if out.rows >= self.options.workers:
            tiles = [((0, out.columns), rows) for rows in _cut(out.rows, self.options.workers)]
        else:
            tiles = [(columns, (0, out.rows)) for columns in self._columns(out.columns, 64)]
        for columns, rows in tiles:
            yield Embed(
                **handles,
                row_count=self.row_count,
                row_begin=rows[0],
                row_end=rows[1],
                column_begin=columns[0],
                column_end=columns[1],
            )

    def _rms_norm(self, operation: Operation) -> Iterator[Instruction]:
        handles = self._handles(operation, "x", "gain", "out")
        for begin, end in _cut(operation.outputs["out"].rows, self.options.workers):
            yield RmsNorm(
                **handles,
                row_count=self.row_count,
                row_begin=begin,
                row_end=end,
                eps=operation.attributes["eps"],
            )

    def _linear(self, operation: Operation) -> Iterator[Instruction]:
        weight, out = operation.inputs["weight"], operation.outputs["out"]
        names = ("x", "weight", "bias", "x_squares", "residual", "row_index", "row_count", "out")
        handles: dict[str, Any] = {"row_count": self.row_count}
        handles |= self._handles(operation, *names, *SCALED)
        gathered = operation.inputs["x"].rows if "row_index" in operation.inputs else None
        size, unit = weight.dtype.size, self.options.column_unit
        if "out_squares" in handles:
            unit = math.lcm(unit, UNIT_ROWS)
        parts = self._parts_of_k(operation)
        # Parts have workers by their share of the columns.
        workers = [self.options.workers * begin // weight.columns for begin, _ in parts]
        workers += [self.options.workers]
        part: dict[str, Any] = {name: handles[name] for name in ("x", "weight", "row_count")}
        if len(parts) > 1:
            shape = (out.rows, (len(parts) - 1) * out.columns)
            # However large it is: only one worker reads a word of it.
            addends = self.storage.add_tagged(f"{operation.label}.parts", shape, F32)
            part["out"] = handles["addends"] = addends
        # The first part adds up the others, and comes last, as it waits for them.
        for number, (begin, end) in reversed(list(enumerate(parts))):
            share = max(1, workers[number + 1] - workers[number])
            tiles = list(
                self._product_tiles(out.rows, out.columns, end - begin, size, unit, 1, share)
            )
            tile_numbers: dict[tuple[int, int], int] = {}
            if number == 0 and out in self.sampled:
                tile_numbers = self._number_peaks(out, tiles, handles)
            for columns, rows in tiles:
                yield Matmul(
                    **(part if number else handles),
                    row_begin=rows[0],
                    row_end=rows[1],
                    column_begin=columns[0],
                    column_end=columns[1],
                    part=number,
                    part_k=parts[0][1],
                    x_rows=rows[1] if gathered is None else gathered,
                    tile=tile_numbers.get(columns, 0),
                    eps=operation.attributes.get("eps", 0.0),
                )

    def _number_peaks(
        self,
        out: Value,
        tiles: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        handles: dict[str, Any],
    ) -> dict[tuple[int, int], int]:
        """Give logits a tensor of peaks, if they may have one; numbers of the column tiles."""
        if not Matmul.may_have_peaks(self.storage.spec(out)):
            return {}
        numbers = {columns: n for n, columns in enumerate(sorted({c for c, _ in tiles}))}
        shape = (out.rows, 2 * len(numbers))
        spec = TensorSpec(f"peaks.{shape[0]}x{shape[1]}", shape, F32, TensorKind.ACTIVATION)
        handles["peaks"] = self.peaks[out] = self.storage.add(spec)
        return numbers

    def _parts_of_k(self, operation: Operation) -> list[tuple[int, int]]:
        """The parts of the columns of x that different workers multiply; one if it is not split.

        At most so many that no worker has more than SUMMED_COLUMNS columns of the result: whoever
        adds up the parts waits for the others each time that it finishes as many.
        """
        k, width = operation.inputs["weight"].columns, self.options.part_of_k
        if not width or operation.inputs.keys() & {"x_squares", "row_index"}:
            return [(0, k)]
        most = SUMMED_COLUMNS * self.options.workers // operation.outputs["out"].columns
        count = max(1, min(-(-k // width), most, MOST_PARTS))
        step = -(-k // (count * width)) * width
        return [(begin, min(begin + step, k)) for begin in range(0, k, step)]

    def _gate_up(self, operation: Operation) -> Iterator[Instruction]:
        gate, out = operation.inputs["gate"], operation.outputs["out"]
        handles = self._handles(
            operation, "x", "gate", "up", "gate_bias", "up_bias", "x_squares", "out"
        )
        size, unit = gate.dtype.size, self.options.column_unit
        for columns, rows in self._product_tiles(
            out.rows, out.columns, gate.columns, size, unit, 2
        ):
            yield GateUp(
                **handles,
                row_count=self.row_count,
                row_begin=rows[0],
                row_end=rows[1],
                column_begin=columns[0],
                column_end=columns[1],
                eps=operation.attributes.get("eps", 0.0),
            )

    def _qkv_rope(self, operation: Operation) -> Iterator[Instruction]:
        x, q = operation.inputs["x"], operation.outputs["q"]
        names: tuple[str, ...] = (
            "x",
            "q_weight",
            "k_weight",
            "v_weight",
            "q_bias",
            "k_bias",
            "v_bias",
            "x_squares",
            "q",
        )
        names += ("k_cache", "v_cache", "rope", "row_sequence", "row_position", "block_table")
        handles = self._handles(operation, *names)
        weight = operation.inputs["q_weight"]
        kv_columns = operation.inputs["k_weight"].rows
        pairs = q.columns // 2 + kv_columns
        handles |= self._newest(operation)
        unit = self.options.pair_unit(operation.inputs["rope"].columns)
        for columns, rows in self._product_tiles(
            x.rows, pairs, weight.columns, weight.dtype.size, unit, 2
        ):
            yield QkvRope(
                **handles,
                row_count=self.row_count,
                row_begin=rows[0],
                row_end=rows[1],
                pair_begin=columns[0],
                pair_end=columns[1],
                eps=operation.attributes.get("eps", 0.0),
            )

    def _newest(self, operation: Operation) -> dict[str, int]:
        """k_new and v_new, tagged, of a decode step.

        Attention then needs nothing of the caches that the step itself writes. Rows of one sequence
        do need each other's keys and values: those of other steps go through the caches.
        """
        if not operation.attributes["decode"]:
            return {}
        made: dict[str, int] = {}
        rows, columns = operation.inputs["x"].rows, operation.inputs["k_weight"].rows
        for part in "kv":
            dtype = operation.outputs[f"{part}_cache"].dtype
            value = Value(f"{operation.label}.{part}_new", rows, columns, dtype, rows)
            if not may_be_tagged(operation, value, self.options):
                return {}
            made[f"{part}_new"] = self.storage.add_tagged(value.name, (rows, columns), dtype)
        self.newest[self.storage.handle(operation.outputs["k_cache"])] = made
        return made

    def _attention(self, operation: Operation) -> Iterator[Tiles]:
        q = operation.inputs["q"]
        cache = _spec(operation.inputs["k_cache"])
        _, kv_heads, block_size, head_dim = cache.shape
        context = int(operation.attributes["context"])
        tiling = attention_tiling(q.rows, kv_heads, block_size, context, self.options)
        head_tiles, row_tile, splits, chunk = tiling
        row_tiles = -(-q.rows // row_tile)
        handles = self._handles(
            operation, "q", "k_cache", "v_cache", "row_sequence", "row_position", "block_table"
        )
        newest = self.newest.get(handles["k_cache"], {})
        handles |= newest
        merge: dict[str, Any] = {}
        if splits == 1:
            handles |= self._handles(operation, "out")
        else:
            heads = q.columns // head_dim
            shape = (q.rows, splits, heads, head_dim + 2)
            name = f"partial.{'x'.join(map(str, shape))}"
            if newest:
                # However large it is: only one worker reads a word of it.
                partial = self.storage.add_tagged(f"{operation.label}.{name}", shape, F32)
            else:
                partial = self.storage.add(TensorSpec(name, shape, F32, TensorKind.ACTIVATION))
            handles["partial"] = partial
            merge = {"partial": partial} | self._handles(operation, "out")
        instructions = [
            Attention(
                **handles,
                row_count=self.row_count,
                row_begin=top,
                row_end=min(top + row_tile, q.rows),
                head_begin=heads_begin,
                head_end=heads_end,
                split=split,
                num_splits=splits,
                chunk=chunk,
                context=context,
                step_rows=q.rows,
                scale=operation.attributes["scale"],
            )
            for top in range(0, q.rows, row_tile)
            for heads_begin, heads_end in _cut(kv_heads, head_tiles)
            for split in range(splits)
        ]
        yield Tiles(operation.label, tuple(instructions))
        if splits > 1:
            heads = q.columns // head_dim
            merges = [
                AttentionMerge(
                    **merge,
                    row_count=self.row_count,
                    row_begin=top,
                    row_end=min(top + row_tile, q.rows),
                    head_begin=begin * heads // kv_heads,
                    head_end=end * heads // kv_heads,
                    head_dim=head_dim,
                    num_splits=splits,
                )
                for top in range(0, q.rows, row_tile)
                for begin, end in _cut(kv_heads, max(1, self.options.workers // row_tiles))
            ]
            yield Tiles(f"{operation.label}.merge", tuple(merges))

    def _sample(self, operation: Operation) -> Iterator[Instruction]:
        logits = operation.inputs["logits"]
        names: tuple[str, ...] = (
            "logits",
            "adjusted",
            "tokens",
            "sampling_real",
            "sampling_integer",
        )
        names += ("logit_row", "logit_count", "row_sequence", "row_position")
        handles = self._handles(operation, *names)
        if logits in self.peaks:
            handles["peaks"] = self.peaks[logits]
        for begin, end in _cut(logits.rows, self.options.workers):
            yield Sample(**handles, row_begin=begin, row_end=end)


def attention_tiling(
    rows: int, kv_heads: int, block_size: int, context: int, options: CompileOptions
) -> tuple[int, int, int, int]:
    """(head tiles, rows per tile, splits of the context, tokens per chunk) of an attention.

    Heads are cut first: they cost the same, while the rows of a prompt do not. The context is split
    only when that gives work to workers that would have none, in three pieces or more of at least
    ``min_chunk`` tokens: two are not worth a merge. Where it costs few of many splits, workers are
    left free for the merges: those wait there already when the last split ends.
    """
    wanted = options.workers * options.waves
    head_tiles = min(kv_heads, wanted)
    row_tile = -(-rows // -(-wanted // head_tiles))
    items = -(-rows // row_tile) * head_tiles
    most = options.workers // items
    if most >= MANY_SPLITS:
        most = (options.workers - items) // items
    pieces = -(-context // options.min_chunk)
    splits = max(1, min(most, pieces)) if pieces > 2 else 1
    return head_tiles, row_tile, splits, block_size


def _spec(value: Value) -> TensorSpec:
    if value.spec is None:
        raise ValueError(f"{value.name} must be a tensor of memory, not the result of an operation")
    return value.spec


def _cut(size: int, pieces: int) -> Iterator[tuple[int, int]]:
    """[0, size) in at most ``pieces`` nearly equal ranges."""
    pieces = min(size, pieces)
    for i in range(pieces):
        yield size * i // pieces, size * (i + 1) // pieces
