"""Kernels of the block codecs: numba on CPUs, Triton on GPUs, plain torch elsewhere."""
