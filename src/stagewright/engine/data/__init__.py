"""Data parallelism: DDP, FSDP2, gradient all-reduce, clipping."""
