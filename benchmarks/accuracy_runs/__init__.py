"""Trainings of `accuracy_tables`: cases, packed data, workers, and groups of workers that train one case at a time."""
