"""Which layers of a model tensor parallelism splits, and how."""
