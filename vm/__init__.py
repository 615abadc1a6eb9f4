"""The machine as the host sees it: instruction set, program, memory, machines, verifier."""
