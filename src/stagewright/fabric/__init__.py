"""Benchmarks of collectives over a real or emulated network: latency distributions, bandwidth, slow links and hosts."""
