"""Costs of a plan: what each action, send, receive and collective takes, from profiles and measured overheads."""
