"""The CPU machine: the interpreter of programs in C++, and its binding."""
