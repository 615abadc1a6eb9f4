"""Storage: give every value a tensor; values whose lifetimes do not overlap share one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from megavm.instructions import instruction_of
from megavm.scheduler.compiler.graph import Operation, Value, readers_of
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.isa import StepShape
from megavm.vm.tensors import DType, TensorKind, TensorSpec


class Storage:
    """The program's tensor table, and the handle of every value."""

    def __init__(self) -> None:
        self.tensors: list[TensorSpec] = []
        self._handles: dict[Value, int] = {}
        self._by_name: dict[str, int] = {}

    def __contains__(self, value: Value) -> bool:
        """Whether a value has a tensor."""
        return value in self._handles

    def has_name(self, name: str) -> bool:
        """Whether a tensor has this name."""
        return name in self._by_name

    def handle(self, value: Value) -> int:
        """The handle of a value of the graph."""
        return self._handles[value]

    def add(self, spec: TensorSpec) -> int:
        """The handle of ``spec``, which is added to the table if it is new.

        Raises ValueError when another tensor has the same name.
        """
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
        """Store ``value`` in the tensor ``handle``."""
        self._handles[value] = handle


def tagged_spec(name: str, shape: tuple[int, ...], dtype: DType, shares: int = 1) -> TensorSpec:
    """A tagged activation. Its name contains the rows: steps of other sizes use other tensors."""
    name = f"{name}.tagged{shape[0]}"
    return TensorSpec(name, shape, dtype, TensorKind.ACTIVATION, tagged=True, shares=shares)


def allocate(operations: Sequence[Operation], options: CompileOptions) -> Storage:
    """Give every value a tensor.

    Activations that are exchanged as tagged words get a tensor of their own, because a word is
    written once per step. One that nothing reads is not tagged: no reader would order its words.
    Other activations reuse a tensor of the same shape and type after its last reader. barriers.py
    orders the hazards of reuse like any other dependency.
    """
    tagged = _tagged(operations, options) & readers_of(operations).keys()
    storage = Storage()
    last_use: dict[Value, int] = {}
    for i, operation in enumerate(operations):
        for value in (*operation.inputs.values(), *operation.outputs.values()):
            last_use[value] = i
            if value.spec is not None:
                storage.place(value, storage.add(value.spec))
    free: dict[_Form, list[int]] = defaultdict(list)
    counts: Counter[_Form] = Counter()
    dying: dict[int, list[Value]] = defaultdict(list)
    for value, i in last_use.items():
        if value.spec is None:
            dying[i].append(value)
    for i, operation in enumerate(operations):
        for value in operation.outputs.values():
            if value in storage:
                continue
            if value in tagged and consists_of_words(operation, value, options):
                shape = (value.rows, value.columns)
                spec = tagged_spec(value.name, shape, value.dtype, value.shares)
                storage.place(value, storage.add(spec))
                continue
            shape, key = (value.capacity, value.columns), _form(value)
            if free[key]:
                storage.place(value, free[key].pop(0))
                continue
            form = f"{value.dtype.name.lower()}.{shape[0]}x{shape[1]}"
            if value.shares > 1:
                form += f".shares{value.shares}"
            while storage.has_name(name := f"activation{counts[key]}.{form}"):
                counts[key] += 1
            spec = TensorSpec(name, shape, value.dtype, TensorKind.ACTIVATION, shares=value.shares)
            storage.place(value, storage.add(spec))
        for value in dying[i]:
            handle = storage.handle(value)
            if not storage.tensors[handle].tagged:
                free[_form(value)].append(handle)
    return storage


_Form = tuple[int, int, DType, int]


def _form(value: Value) -> _Form:
    """Values of equal forms may share a tensor."""
    return value.capacity, value.columns, value.dtype, value.shares


def _tagged(operations: Sequence[Operation], options: CompileOptions) -> set[Value]:
    """The values that ``CompileOptions.exchange`` passes as tagged words, if they may be."""
    if options.exchange == "barrier":
        return set()
    outputs = {value for operation in operations for value in operation.outputs.values()}
    for operation in operations:
        outputs.difference_update(_untaggable(operation))
    if options.exchange == "tagged":
        return outputs
    shape = StepShape(
        rows=max((value.rows for value in outputs if value.spec is None), default=0),
        columns=max(
            (o.inputs["x"].columns for o in operations if "x_squares" in o.inputs), default=0
        ),
        ranks=max((value.shares for value in outputs), default=1),
        pairs=max(
            (
                pairs_of_worker(o.inputs["q"].rows, o.inputs["k_cache"].memory, options)
                for o in operations
                if o.kind == "attention"
            ),
            default=0,
        ),
    )
    for operation in operations:
        reader = instruction_of(operation.kind)
        if reader is None:
            continue
        names = operation.inputs.keys()
        outputs.difference_update(
            value
            for name, value in operation.inputs.items()
            if not reader.prefers_words(name, names, shape)
        )
    return outputs


def pairs_of_worker(rows: int, cache: TensorSpec, options: CompileOptions) -> int:
    """The pairs of a row and a KV head that a worker attends to, at most."""
    return -(-rows * cache.shape[1] // options.workers)


def _untaggable(operation: Operation) -> Iterator[Value]:
    """The values that an operation's instruction reads or writes without tags."""
    if operation.attributes.get("scatters"):
        yield from operation.outputs.values()
    if operation.kind == "copy" and "row_index" in operation.inputs:
        yield operation.inputs["x"]
        yield operation.outputs["out"]
    cls = instruction_of(operation.kind)
    fields = {} if cls is None else {field.name: field for field in cls.fields}
    for name, value in (*operation.inputs.items(), *operation.outputs.items()):
        if name in fields and not fields[name].tagged:
            yield value


def consists_of_words(operation: Operation, value: Value, options: CompileOptions) -> bool:
    """Whether ``value``, a result of ``operation``, may be a tagged tensor and is small."""
    size = value.rows * value.own_columns * value.dtype.size
    return size <= options.tagged_bytes and has_whole_words(operation, value, options)


def has_whole_words(operation: Operation, value: Value, options: CompileOptions) -> bool:
    """Whether ``value``, a result of ``operation``, may be a tagged tensor.

    Every store must cover whole words: a tag is valid only if its word is stored at once.
    """
    share = run = value.own_columns * value.dtype.size
    producer = instruction_of(operation.kind)
    if producer is not None:
        columns = {name: v.columns for name, v in operation.inputs.items()}
        stored = producer.stored_columns(columns, options.column_unit)
        run = share if stored is None else stored * value.dtype.size
    return share % 4 == 0 and run % 4 == 0
