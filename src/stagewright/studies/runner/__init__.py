"""Run a study: load it, check its inputs, run its parts in a folder, write its findings."""
