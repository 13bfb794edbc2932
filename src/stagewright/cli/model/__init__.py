"""Verbs about a model and this machine: models, profile, split, codecs, doctor."""
