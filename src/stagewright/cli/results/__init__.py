"""Verbs that show results: runs, trace, report, watch."""
