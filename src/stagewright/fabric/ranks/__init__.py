"""Coordinator, agents and ranks, and the sockets between them."""
