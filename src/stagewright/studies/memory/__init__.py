"""The study *memory*: strategies with and without activation checkpointing."""
