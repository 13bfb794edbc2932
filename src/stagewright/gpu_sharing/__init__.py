"""One GPU as several devices: a share of its SMs for each worker (CUDA MPS)."""
