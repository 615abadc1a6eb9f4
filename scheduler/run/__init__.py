"""Compile, load, run and inspect the programs of a model, one per bucket of steps."""
