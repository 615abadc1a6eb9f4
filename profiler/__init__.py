"""The profiler: records what machines note while they run, and says where the time goes.

`trace.py` is the trace, `trace_file.py` its file, `recorder.py` makes one from a running machine,
`analysis.py` answers questions about it, `perfetto.py` and `chrome.py` write it for other viewers.
"""
