"""Llama models: configuration, checkpoints, and the graph of a step."""
