"""The engine behind a server: in a thread, or in a process of its own.

Requests are read and answered by one asyncio event loop, and tokens are made by one thread that
drives the engine. Between the two there are messages only (messages.py)::

    EngineClient    in the event loop: generations in, tokens out
      a transport   EngineThread or EngineProcess: carries messages
    EngineCore      loads the model and answers questions about it
      EngineLoop    the thread that drives the engine

`megavm serve` uses a process: what the event loop does for requests then never takes Python's
interpreter from the thread that a GPU waits for.
"""
