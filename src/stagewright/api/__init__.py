"""The verbs of the command line as Python functions: ``sw.compare``, ``sw.plan``, ``sw.forecast`` and the others.

The command line parses arguments, calls one of these and prints what it returns. Nothing here prints: progress goes to
a ``Progress`` object, which prints nothing by default.
"""
