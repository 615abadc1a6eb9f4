"""The CPU machine: the C++ interpreter of programs, and its binding."""
