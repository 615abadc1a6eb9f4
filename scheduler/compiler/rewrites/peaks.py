"""Store the largest logit of each tile of the LM head, so that a greedy choice reads few words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from megavm.instructions.matmul import Matmul
from megavm.instructions.matmul.lower import tiles_of_part
from megavm.scheduler.compiler.graph import Operation, Value, producers_of, readers_of
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.tensors import F32, TensorKind, TensorSpec


def keep_peaks(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Give products whose largest result is chosen, and the sample operations, ``peaks``.

    ``peaks`` is float32 [rows, 2 * column tiles]: the largest result of each tile and its column.

    If ranks gather the results, they gather the peaks as well. If nothing but choices of the
    largest reads the results, not even the host, they gather the peaks alone: results stay where
    they are computed, and sample operations do not read them.
    """
    producers, readers = producers_of(operations), readers_of(operations)
    choices: dict[Value, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind == "sample" and "logits" in operation.inputs:
            choices[operation.inputs["logits"]].append(operation)
    changed: dict[Operation, Operation | None] = {}  # None: nothing takes its place
    for logits, samples in choices.items():
        product, gather = _product_of(logits, producers)
        if product is None or product in changed:
            continue
        stays = logits.shares > 1 and logits.spec is None and len(samples) == len(readers[logits])
        out = product.outputs["out"]
        if stays and gather is not None:
            changed[gather] = None
        elif stays:
            out = replace(out, columns=out.own_columns, shares=1)
        peaks = _peaks(product, logits, stays, options)
        changed[product] = replace(product, outputs={**product.outputs, "out": out, "peaks": peaks})
        for sample in samples:
            inputs = {**sample.inputs, "peaks": peaks}
            if stays:
                del inputs["logits"]
            changed[sample] = replace(sample, inputs=inputs)
    result = (changed.get(operation, operation) for operation in operations)
    return [operation for operation in result if operation is not None]


def _peaks(product: Operation, logits: Value, alone: bool, options: CompileOptions) -> Value:
    """The peaks of a product; ``alone``: sample operations do not read the logits as well.

    If they do, they wait for barriers in any case, and the peaks are not tagged.
    """
    tiles = {columns for columns, _ in tiles_of_part(product, options, 0)}
    rows, columns = logits.rows, 2 * len(tiles) * logits.shares
    if alone:
        name = f"{product.label}.peaks.{columns}"
        return Value(name, rows, columns, F32, logits.capacity, shares=logits.shares)
    name, shape = f"{product.label}.peaks.{rows}x{columns}", (rows, columns)
    spec = TensorSpec(name, shape, F32, TensorKind.ACTIVATION, shares=logits.shares)
    return Value.of(spec)


def _product_of(
    logits: Value, producers: Mapping[Value, Operation]
) -> tuple[Operation | None, Operation | None]:
    """The product that computes logits, if it may have peaks, and the copy that gathers them."""
    product, gather, out = producers.get(logits), None, logits
    if product is not None and product.kind == "copy" and not product.attributes.get("scatters"):
        gather, out = product, product.inputs["x"]
        product = producers.get(out) if out.shares == 1 else None
    if product is None or product.kind != "matmul" or product.outputs["out"] is not out:
        return None, None
    if not Matmul.may_have_peaks(out.dtype, logits.columns):
        return None, None
    return product, gather
