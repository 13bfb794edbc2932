"""Logs of NCCL Inspector (a profiler plug-in of NCCL): bandwidth, time and waiting of each collective, rank by rank."""
