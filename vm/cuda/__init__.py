"""The host side of the GPU machine: compiles kernels, launches programs, reports faults."""
