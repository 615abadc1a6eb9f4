"""The profiler: records events of running machines, and reports where the time goes.

`trace.py` defines the trace and `trace_file.py` its file format. `recorder.py` records traces of a
running machine, `analysis.py` evaluates them, `perfetto.py` and `chrome.py` export them.
"""
