"""Serving many sequences: plan the rows of each step, manage KV blocks, collect results."""
