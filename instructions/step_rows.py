"""Sentences of faults that instructions share which look up the rows of a step (step_rows.cuh)."""

from __future__ import annotations


def position_fault(holder: str) -> str:
    """The sentence about a position that ``holder`` does not have."""
    return f"row {{row}} is at position {{value}}, {holder} holds [0, {{target}})"


def row_faults(table: str, positions: str = "") -> dict[str, str]:
    """The faults of looking up a row's sequence and position.

    ``table``: the operand with a row for each sequence. ``positions``: what has a place for each position, if
    that is not the table.
    """
    return {
        "ROW_SEQUENCE": f"row_sequence of row {{row}} is {{value}}, {table} has {{target}} sequences",
        "POSITION": position_fault(positions or table),
    }


KV_FAULTS = {
    **row_faults("block_table"),
    "KV_BLOCK": "block table entry [{row}, {word}] is {value}, the KV cache has {target} blocks",
}
ROW_INDEX_FAULT = {"ROW_INDEX": "row_index of row {row} is {value}, expected below {target}"}
TOKEN_FAULT = {
    "TOKEN": "token {value} at position {word} of sequence {row} is outside the vocabulary of {target}"
}
