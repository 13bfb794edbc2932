"""Collectives as data: algorithms, the program of each rank, a simulation without a network."""
