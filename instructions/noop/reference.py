"""Noop in torch."""

from megavm.instructions.noop import Noop
from megavm.vm.reference import View


def execute(inst: Noop, m: View) -> None:
    """Do nothing."""
