"""From a graph of operations to a program: rewrites, storage, lowering, barriers, queues."""
