"""Traces of the PyTorch profiler (Kineto, Chrome trace format), one file for each rank, read as a ``Trace``."""
