"""What operations of each kind take: for most kinds, what the instruction of that name declares."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

from megavm.instructions import instruction_of, instruction_set
from megavm.vm.operands import FieldKind

RESULT = "out"  # the one result of an operation that ``Graph.append`` makes


@dataclass(frozen=True)
class Kind:
    """The names of the operands of an operation, apart from its result, and of its attributes.

    ``optional``: operands that may be left out.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


# Kinds that no instruction executes: rewrites fuse them with other operations, or replace them.
FUSED = {
    "add": Kind(("x", "residual")),
    "gather": Kind(("x", "index"), ("count",)),
    "silu_mul": Kind(("gate", "up")),
}


def check_names(
    label: str, kind: str, operands: Collection[str], attributes: Collection[str]
) -> None:
    """Compare the names of an operation's operands and attributes with those of its kind.

    Raises ValueError when the kind is unknown or has no result ``out``, when it lacks one of the
    operands or attributes, and when a required operand is missing.
    """
    known = _kind(kind)
    if known is None:
        declared = (cls.name() for cls in instruction_set().values())
        kinds = ", ".join(sorted([*FUSED, *filter(_kind, declared)]))
        raise ValueError(f"{label}: append has no kind {kind}; it has {kinds}")
    unknown = [name for name in operands if name not in (*known.required, *known.optional)]
    if unknown:
        raise ValueError(f"{label}: {kind} has no operand {', '.join(unknown)}; {_operands(known)}")
    missing = [name for name in known.required if name not in operands]
    if missing:
        raise ValueError(
            f"{label}: {kind} lacks its operand {', '.join(missing)}; {_operands(known)}"
        )
    unknown = [name for name in attributes if name not in known.attributes]
    if unknown:
        names = ", ".join(known.attributes)
        which = f"its attributes are {names}" if names else "it has none"
        raise ValueError(f"{label}: {kind} has no attribute {', '.join(unknown)}; {which}")


@functools.cache
def _kind(name: str) -> Kind | None:
    """What operations of a kind take; None for an unknown kind, and for one without ``out``."""
    if name in FUSED:
        return FUSED[name]
    cls = instruction_of(name)
    if cls is None or all(field.name != RESULT for field in cls.fields):
        return None
    tensors = [f for f in cls.fields if f.kind is FieldKind.TENSOR and f.name != RESULT]
    return Kind(
        required=tuple(f.name for f in tensors if not f.optional),
        optional=tuple(f.name for f in tensors if f.optional),
        attributes=tuple(f.name for f in cls.fields if f.kind is not FieldKind.TENSOR),
    )


def _operands(kind: Kind) -> str:
    optional = f", and may have {', '.join(kind.optional)}" if kind.optional else ""
    return f"it needs {', '.join(kind.required)}{optional}"
