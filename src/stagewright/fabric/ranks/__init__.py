"""Processes of a fabric run: coordinator, agents, ranks and their connections."""
