"""Serving many sequences: which rows the next step has, their KV blocks, and their results."""
