"""The search for an order of actions: given times of every action and a memory limit of every worker."""
