"""Programs of a model on a machine: compiled for buckets of steps, loaded, run, inspected."""
