"""Verbs that run: compare, train, worker."""
