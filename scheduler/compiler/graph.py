"""The graph of a step: operations on whole tensors, independent of tiles and workers.

Values are matrices [rows, columns]; rows are tokens of a step. Every method of Graph that adds an
operation appends it, so the list of operations is in topological order.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.sample import segment_words
from megavm.scheduler.compiler.kinds import RESULT, check_names
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec

Range = tuple[int, int]  # half-open


@dataclass(frozen=True, eq=False)
class Value:
    """The result of an operation or, where ``spec`` is set, a tensor of the memory.

    ``capacity`` is the number of rows of its tensor, at least ``rows``: programs for steps of
    different sizes share tensors that are large enough for the largest step.

    ``shares`` > 1: each of that many ranks computes a range of the columns (TensorSpec.shares).
    """

    name: str
    rows: int
    columns: int
    dtype: DType
    capacity: int
    spec: TensorSpec | None = None
    shares: int = 1

    @property
    def own_columns(self) -> int:
        """Columns that one rank computes."""
        return self.columns // self.shares

    @classmethod
    def of(cls, spec: TensorSpec) -> Value:
        """The tensor that ``spec`` describes."""
        return cls(spec.name, spec.rows, spec.columns, spec.dtype, spec.rows, spec, spec.shares)

    @property
    def memory(self) -> TensorSpec:
        """Its tensor in memory. Raises ValueError for the result of an operation."""
        if self.spec is None:
            raise ValueError(
                f"{self.name} must be a tensor of memory, not the result of an operation"
            )
        return self.spec


class _Attributes(dict[str, float]):
    """The attributes of an operation. Raises ValueError for one that is missing."""

    def __init__(self, kind: str, label: str, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self._owner = f"{label}: {kind}"

    def __missing__(self, name: str) -> float:
        raise ValueError(f"{self._owner} needs the attribute {name}")


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation: its kind, named inputs and outputs, and plain attributes.

    ``rows``: the rows of its results that it computes, if another operation computes the others
    (rewrites/halves.py).

    ``attributes[name]`` raises ValueError when the operation lacks the attribute.
    """

    kind: str
    label: str
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    attributes: Mapping[str, float] = field(default_factory=dict)
    rows: Range | None = None

    def __post_init__(self) -> None:
        attributes = _Attributes(self.kind, self.label, self.attributes)
        object.__setattr__(self, "attributes", attributes)

    @property
    def row_range(self) -> Range:
        """The rows that it computes, of its first result."""
        return self.rows or (0, next(iter(self.outputs.values())).rows)


@dataclass(frozen=True)
class Batch:
    """The tensors through which the host describes a step; see the instructions' docstrings."""

    tokens: Value  # I32 [sequences, max length + 1]
    block_table: Value  # I32 [sequences, blocks per sequence]
    row_sequence: Value  # I32 [rows]
    row_position: Value  # I32 [rows]
    row_count: Value  # I32 [1]
    logit_row: Value  # I32 [logit rows]
    logit_count: Value  # I32 [1]
    sampling_real: Value  # F32 [sequences, REAL_COLUMNS]
    sampling_integer: Value  # I32 [sequences, INTEGER_COLUMNS]
    allowed: Value  # I32 [sequences, words], see AdjustLogits
    bias: Value  # F32 [sequences, vocabulary]
    masks_written: Value  # I32 [1]
    masks_awaited: Value  # I32 [1]


class Graph:
    """Operations in topological order, and the tensors in memory that they use.

    ``rows``: the largest number of rows of a step. ``row_count``: the tensor that holds the number
    of live rows; without it all rows are live. ``capacity``: rows of the activation tensors.
    ``ranks``: number of ranks that run the step together. All of them run this graph, each with its
    own tensors; they meet in ``all_gather``, ``all_reduce`` and ``reduce_scatter``.

    The methods raise ValueError when shapes or types of an operation's inputs do not fit, when an
    input is neither a tensor of memory nor a result of this graph, and when two results have the
    same name. The constructor raises ValueError for ``rows`` and ``ranks`` below 1, and for a
    ``capacity`` below ``rows``.
    """

    def __init__(
        self,
        rows: int,
        row_count: TensorSpec | None = None,
        capacity: int | None = None,
        ranks: int = 1,
    ) -> None:
        capacity = rows if capacity is None else capacity
        for name, value, least in (
            ("rows", rows, 1),
            ("ranks", ranks, 1),
            ("capacity", capacity, rows),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"a graph has {name} {value}: expected an integer from {least} on")
        self.rows = rows
        self.ranks = ranks
        self.row_count = row_count
        self.capacity = capacity
        self.operations: list[Operation] = []
        self._results: dict[str, Value] = {}  # by name
        self._kept: dict[Value, Value] = {}  # results that are outputs -> the same in memory

    # Tensors in memory.

    def tensor(self, name: str, shape: tuple[int, ...], dtype: DType, kind: TensorKind) -> Value:
        """A tensor that the host binds or allocates in memory under this name.

        A weight may become a part of a joined one (rewrites/gate_up.py): memory is then allocated
        for that, and read and written under this name (Memory).
        """
        spec = TensorSpec(name, shape, dtype, kind)
        return Value.of(spec)

    def weight(self, name: str, shape: tuple[int, ...], dtype: DType) -> Value:
        """A read-only tensor, bound by the host."""
        return self.tensor(name, shape, dtype, TensorKind.WEIGHT)

    def joined(self, name: str, *weights: Value) -> Value:
        """The weights one below the other, as one tensor; the host binds its parts."""
        return Value.of(TensorSpec.joined(name, [weight.memory for weight in weights]))

    # Operations.

    def embed(self, label: str, table: Value, batch: Batch) -> Value:
        """Rows of ``table`` for the step's tokens: float32 [rows, hidden]."""
        inputs = {
            "table": table,
            "tokens": batch.tokens,
            "row_sequence": batch.row_sequence,
            "row_position": batch.row_position,
        }
        return self.append("embed", label, inputs, table.columns, F32)

    def rms_norm(self, label: str, x: Value, gain: Value, eps: float) -> Value:
        """x / rms(x) * gain, in float32: [rows of x, columns of x].

        If ranks gather x, ``gain`` may be that of the rank's share: then the operation that
        computes the share must be one that RMSNorm fuses with.
        """
        if gain.rows != x.own_columns:
            self._fits(label, x, gain.rows, "gain", gain)
        return self.append(
            "rms_norm", label, {"x": x, "gain": gain}, x.columns, F32, {"eps": eps}, like=x
        )

    def gather(self, label: str, x: Value, index: Value, count: Value | None, rows: int) -> Value:
        """The rows of x that the first ``count`` entries of ``index`` name, at most ``rows``.

        Without ``count``: those that the first ``rows`` entries name.
        """
        inputs = {"x": x, "index": index} | ({} if count is None else {"count": count})
        like = Value(f"{label}.rows", rows, x.columns, x.dtype, index.rows)
        return self.append("gather", label, inputs, x.columns, x.dtype, like=like)

    def linear(
        self, label: str, x: Value, weight: Value, bias: Value | None = None, dtype: DType = BF16
    ) -> Value:
        """x . weight^T + bias as ``dtype``: [rows of x, rows of weight]."""
        self._fits(label, x, weight.columns, "weight", weight)
        inputs = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
        return self.append("matmul", label, inputs, weight.rows, dtype, like=x)

    def add(self, label: str, x: Value, residual: Value) -> Value:
        """x + residual, as the residual's type."""
        if (x.rows, x.columns) != (residual.rows, residual.columns):
            raise ValueError(
                f"{label}: {x.rows} x {x.columns} and {residual.rows} x {residual.columns}"
                " cannot be added"
            )
        inputs = {"x": x, "residual": residual}
        return self.append("add", label, inputs, x.columns, residual.dtype, like=x)

    def silu_mul(self, label: str, gate: Value, up: Value) -> Value:
        """silu(gate) * up."""
        if (gate.rows, gate.columns) != (up.rows, up.columns):
            raise ValueError(
                f"{label}: gate is {gate.rows} x {gate.columns}, up {up.rows} x {up.columns}"
            )
        inputs = {"gate": gate, "up": up}
        return self.append("silu_mul", label, inputs, gate.columns, up.dtype, like=gate)

    def qkv_rope(
        self,
        label: str,
        x: Value,
        weight: Value,
        caches: tuple[Value, Value],
        rope: Value,
        batch: Batch,
        dtype: DType,
        bias: Value | None = None,
        *,
        decode: bool = False,
    ) -> Value:
        """Rotated queries of x; rotated keys and values are written to the KV caches. See QkvRope.

        ``weight`` and ``bias`` have the rows of the queries, then of the keys, then of the values.
        ``decode``: all rows of a step belong to different sequences.
        """
        self._fits(label, x, weight.columns, "weight", weight)
        inputs = {
            "x": x,
            "weight": weight,
            **({} if bias is None else {"bias": bias}),
            "rope": rope,
            "row_sequence": batch.row_sequence,
            "row_position": batch.row_position,
            "block_table": batch.block_table,
        }
        columns = weight.rows - 2 * QkvRope.k_cache.entry_columns(caches[0].memory)
        q = Value(f"{label}.q", x.rows, columns, dtype, x.capacity)
        outputs = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}
        attributes = {"decode": decode}
        self._add(Operation("qkv_rope", label, inputs, outputs, attributes))
        return q

    def attention(
        self,
        label: str,
        q: Value,
        caches: tuple[Value, Value],
        batch: Batch,
        *,
        scale: float,
        context: int,
    ) -> Value:
        """Causal attention over the KV caches: [rows, columns of q].

        ``context``: upper bound of the tokens that a row attends to.
        """
        inputs = {
            "q": q,
            "k_cache": caches[0],
            "v_cache": caches[1],
            "row_sequence": batch.row_sequence,
            "row_position": batch.row_position,
            "block_table": batch.block_table,
        }
        attributes = {"scale": scale, "context": context}
        return self.append("attention", label, inputs, q.columns, q.dtype, attributes, like=q)

    def sample(self, label: str, logits: Value, batch: Batch, *, sampled: bool = True) -> None:
        """Choose the next token of every logit row, append it to ``batch.tokens``. See Sample.

        ``sampled``: as the sequences' parameters say (AdjustLogits); else the largest logit.
        """
        names = ("sampling_real", "sampling_integer", "logit_row", "logit_count")
        rows = {n: getattr(batch, n) for n in (*names, "row_sequence", "row_position")}
        outputs = {"tokens": batch.tokens}
        inputs = {"logits": logits}
        if sampled:
            masks = ("allowed", "bias", "masks_written", "masks_awaited")
            sources = {n: getattr(batch, n) for n in ("tokens", *masks)}
            inputs = {
                name: Value(f"{label}.{name}", logits.rows, columns, F32, logits.capacity)
                for name, columns in (
                    ("adjusted", logits.columns),
                    ("segments", segment_words(logits.columns)),
                )
            }
            adjust = {"logits": logits, **rows, **sources}
            self._add(Operation("adjust_logits", f"{label}.adjust", adjust, inputs))
        self._add(Operation("sample", label, {**inputs, **rows}, outputs))

    # Ranks.

    def all_gather(self, label: str, x: Value) -> Value:
        """x of all ranks side by side, in order of rank: [rows of x, ranks * columns of x].

        With one rank it is x.
        """
        if self.ranks == 1:
            return x
        out = Value(label, x.rows, self.ranks * x.columns, x.dtype, x.capacity, shares=self.ranks)
        self._add(Operation("all_gather", label, {"x": x}, {"out": out}))
        return out

    def all_reduce(self, label: str, x: Value, bias: Value | None, dtype: DType) -> Value:
        """The sum of x, float32, over all ranks, + bias, as ``dtype``: [rows of x, columns of x].

        Sums are added in order of rank, so all ranks get the same bits.
        """
        _require_f32(label, x)
        parts = self.all_gather(f"{label}.parts", x)
        return self._reduce(label, parts, bias, x.columns, dtype)

    def reduce_scatter(self, label: str, x: Value, bias: Value | None, dtype: DType) -> Value:
        """The rank's share of the sum of x, float32, over all ranks, + bias, as ``dtype``.

        Rank r gets the r-th of as many equal ranges of the columns as there are ranks: [rows of x,
        columns of x / ranks]. ``bias`` is of its share. Sums are added in order of rank, so that a
        gather of all shares has the bits of ``all_reduce``.
        """
        _require_f32(label, x)
        columns, rest = divmod(x.columns, self.ranks)
        if rest:
            raise ValueError(
                f"{label}: x has {x.columns} columns, which {self.ranks} ranks cannot share equally"
            )
        parts, name = x, f"{label}.parts"
        if self.ranks > 1:
            parts = Value(name, x.rows, x.columns, F32, x.capacity, shares=self.ranks)
            self._add(scatter(name, x, parts))
        return self._reduce(label, parts, bias, columns, dtype)

    def output(self, value: Value, name: str) -> Value:
        """Keep ``value`` in memory under ``name``, so that the host can read it after a launch.

        Later operations may read ``value`` or what is returned: it is the same tensor.

        Raises ValueError when no operation of this graph produces ``value``, and when it is an
        output already, or another one has the name.
        """
        kept = self._kept.get(value, value)
        if kept in self._kept.values():
            raise ValueError(f"{value.name} is an output already, under the name {kept.name}")
        if self._results.get(value.name) is not value:
            raise ValueError(f"{value.name} is not the result of an operation of this graph")
        for other, named in self._kept.items():
            if named.name == name:
                raise ValueError(f"{value.name} and {other.name} cannot both be the output {name}")
        shape = (value.capacity, value.columns)
        spec = TensorSpec(name, shape, value.dtype, TensorKind.ACTIVATION, shares=value.shares)
        kept = self._kept[value] = dataclasses.replace(value, name=name, spec=spec)
        self.operations = [with_values(o, self._kept) for o in self.operations]
        return kept

    # Helpers.

    def _reduce(
        self, label: str, parts: Value, bias: Value | None, columns: int, dtype: DType
    ) -> Value:
        inputs = {"parts": parts} | ({} if bias is None else {"bias": bias})
        return self.append("reduce", label, inputs, columns, dtype, like=parts)

    def _fits(self, label: str, x: Value, columns: int, name: str, other: Value) -> None:
        if x.columns != columns:
            raise ValueError(
                f"{label}: x has {x.columns} columns, {name} {other.name} is "
                f"{other.rows} x {other.columns}"
            )

    def _add(self, operation: Operation) -> None:
        operation = with_values(operation, self._kept)
        for key, value in operation.inputs.items():
            if value.spec is None and self._results.get(value.name) is not value:
                raise ValueError(
                    f"{operation.label}: {key} is {value.name}, which is neither a tensor of memory"
                    " nor the result of an operation of this graph"
                )
        results = {v.name: v for v in operation.outputs.values() if v.spec is None}
        for name in results.keys() & self._results.keys():
            raise ValueError(f"two operations are called {name}")
        self._results |= results
        self.operations.append(operation)

    def append(
        self,
        kind: str,
        label: str,
        inputs: dict[str, Value],
        columns: int,
        dtype: DType,
        attributes: Mapping[str, float] | None = None,
        like: Value | None = None,
    ) -> Value:
        """Append an operation with one result: [rows of ``like``, ``columns``] of type ``dtype``.

        ``kind`` names an instruction with a result ``out`` whose folder has a lower.py, or an
        operation that a rewrite fuses with others (kinds.py). ``inputs`` are tensor operands of the
        instruction, ``attributes`` other operands. Without ``like`` the result has the rows of the
        step.

        Raises ValueError when the kind is unknown, when it lacks one of the inputs or attributes,
        and when an input that it needs is missing; TypeError when an input or ``like`` is no Value.
        """
        attributes = attributes or {}
        for name, value in (*inputs.items(), *([] if like is None else [("like", like)])):
            if not isinstance(value, Value):
                raise TypeError(f"{label}: {name} is {value!r}, not a Value of the graph")
        check_names(label, kind, inputs, attributes)
        rows, capacity = (like.rows, like.capacity) if like else (self.rows, self.capacity)
        out = Value(label, rows, columns, dtype, capacity)
        self._add(Operation(kind, label, inputs, {RESULT: out}, attributes))
        return out


def scatter(label: str, x: Value, out: Value) -> Operation:
    """Each rank gives every rank that rank's share of the columns of x; ``out`` has shares."""
    return Operation("copy", label, {"x": x}, {"out": out}, {"scatters": True})


def _require_f32(label: str, x: Value) -> None:
    if x.dtype is not F32:
        raise ValueError(f"{label}: x is {x.dtype.name}, but sums over ranks are added in F32")


def readers_of(operations: Iterable[Operation]) -> dict[Value, list[Operation]]:
    """The operations that read each value."""
    readers: dict[Value, list[Operation]] = defaultdict(list)
    for operation in operations:
        for value in operation.inputs.values():
            readers[value].append(operation)
    return readers


def has_one_reader(value: Value, readers: Mapping[Value, list[Operation]]) -> bool:
    """Whether nothing but one operation reads a value, not even the host (``Graph.output``).

    Then a rewrite may fuse that operation with the one that produces the value.
    """
    return value.spec is None and len(readers[value]) == 1


def producers_of(operations: Iterable[Operation]) -> dict[Value, Operation]:
    """The operation that produces each value."""
    return {value: o for o in operations for value in o.outputs.values()}


def with_values(operation: Operation, new: Mapping[Value, Value]) -> Operation:
    """The operation with other values: ``new`` has those that take the place of values."""
    inputs, outputs = (
        {name: new.get(value, value) for name, value in values.items()}
        for values in (operation.inputs, operation.outputs)
    )
    return dataclasses.replace(operation, inputs=inputs, outputs=outputs)
