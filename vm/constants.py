"""Constants that GPU kernels are compiled for, and how those of a program's instructions become one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Join(Enum):
    """How the values that a program's instructions declare become one constant of a kernel."""

    SAME = "same"  # all instructions of a class must agree
    LARGEST = "largest"  # maximum, within a class and over the program
    UNION = "union"  # bitwise or, within a class and over the program


@dataclass(frozen=True)
class Constant:
    """A number that a GPU kernel is compiled for; see specialisation.py."""

    value: int
    join: Join


def same(value: int) -> Constant:
    """A constant on which all instructions of a class must agree."""
    return Constant(int(value), Join.SAME)


def largest(value: int) -> Constant:
    """A constant whose largest value counts."""
    return Constant(value, Join.LARGEST)


def union(bits: int) -> Constant:
    """A set of bits, or a boolean: the bitwise or over all instructions."""
    return Constant(int(bits), Join.UNION)
