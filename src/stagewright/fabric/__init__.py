"""Collectives over real sockets: what they cost on this network, the network lab, and who is slow."""
