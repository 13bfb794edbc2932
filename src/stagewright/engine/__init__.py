"""The engine: launch, workers, strategies and stages on torch.distributed; equality with serial.

Importing this package does not import torch, so that a worker can be pinned first.
"""
