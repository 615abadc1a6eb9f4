"""The GPU machine, on the host: compiling kernels, launching programs, saying what went wrong."""
