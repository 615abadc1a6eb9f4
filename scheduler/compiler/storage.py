"""Storage: give every value a tensor; values that are never alive together share one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megavm.scheduler.compiler.graph import Operation, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.isa import DType, TensorKind, TensorSpec


class Storage:
    """The program's tensor table, and the handle of every value."""

    def __init__(self) -> None:
        self.tensors: list[TensorSpec] = []
        self._handles: dict[Value, int] = {}
        self._by_name: dict[str, int] = {}

    def handle(self, value: Value) -> int:
        """The handle of a value of the graph."""
        return self._handles[value]

    def spec(self, value: Value) -> TensorSpec:
        """The tensor of a value of the graph."""
        return self.tensors[self._handles[value]]

    def add(self, spec: TensorSpec) -> int:
        """The handle of ``spec``, entered into the table if it is new."""
        known = self._by_name.get(spec.name)
        if known is not None:
            if self.tensors[known] != spec:
                raise ValueError(
                    f"two tensors are called {spec.name}: {self.tensors[known]}, {spec}"
                )
            return known
        self._by_name[spec.name] = len(self.tensors)
        self.tensors.append(spec)
        return len(self.tensors) - 1

    def place(self, value: Value, handle: int) -> None:
        """Let ``value`` live in a tensor."""
        self._handles[value] = handle


def tagged_spec(name: str, shape: tuple[int, ...], dtype: DType) -> TensorSpec:
    """A tagged activation; those of steps of other sizes have other names."""
    name = f"{name}.tagged{shape[0]}"
    return TensorSpec(name, shape, dtype, TensorKind.ACTIVATION, tagged=True)


def allocate(operations: Sequence[Operation], options: CompileOptions) -> Storage:
    """Give every value a tensor.

    Small activations that are exchanged as tagged words get a tensor each: a word is written once
    per step. Others take a tensor of the same size whose last reader came before; hazards that this
    makes are the business of barriers.py, which orders them like any other dependency.
    """
    storage = Storage()
    last_use: dict[Value, int] = {}
    for i, operation in enumerate(operations):
        for value in (*operation.inputs.values(), *operation.outputs.values()):
            last_use[value] = i
            if value.spec is not None:
                storage.place(value, storage.add(value.spec))
    free: dict[tuple[int, int, DType], list[int]] = defaultdict(list)
    made: Counter[tuple[int, int, DType]] = Counter()
    dying: dict[int, list[Value]] = defaultdict(list)
    for value, i in last_use.items():
        if value.spec is None:
            dying[i].append(value)
    for i, operation in enumerate(operations):
        for value in operation.outputs.values():
            if value.spec is not None:
                continue
            if last_use[value] > i and may_be_tagged(operation, value, options):
                shape = (value.rows, value.columns)
                spec = tagged_spec(value.name, shape, value.dtype)
                storage.place(value, storage.add(spec))
                continue
            shape = (value.capacity, value.columns)
            key = (*shape, value.dtype)
            if free[key]:
                storage.place(value, free[key].pop(0))
                continue
            name = f"activation{made[key]}.{value.dtype.name.lower()}.{shape[0]}x{shape[1]}"
            made[key] += 1
            spec = TensorSpec(name, shape, value.dtype, TensorKind.ACTIVATION)
            storage.place(value, storage.add(spec))
        for value in dying[i]:
            handle = storage.handle(value)
            if not storage.tensors[handle].tagged:
                free[(value.capacity, value.columns, value.dtype)].append(handle)
    return storage


def may_be_tagged(operation: Operation, value: Value, options: CompileOptions) -> bool:
    """Small, and made of whole words: a word is stored at once, or its tag would speak too soon.

    ``value`` is a result of ``operation``. See ``CompileOptions.exchange``.
    """
    for_heads = operation.kind == "qkv_rope" and operation.attributes["decode"]
    if options.exchange == "barrier" or (options.exchange == "heads" and not for_heads):
        return False
    row = value.columns * value.dtype.size
    run = row
    if operation.kind == "qkv_rope":  # stores the two halves of a head apart
        run = options.pair_unit(operation.inputs["rope"].columns) * value.dtype.size
    return row % 4 == 0 and run % 4 == 0 and value.rows * row <= options.tagged_bytes
