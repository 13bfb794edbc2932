"""This machine: cores, memory and GPUs, measured links, CPU offload, out-of-memory errors."""
