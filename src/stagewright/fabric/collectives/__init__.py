"""Collective algorithms as data: moves, the program of each rank, simulation without a network."""
