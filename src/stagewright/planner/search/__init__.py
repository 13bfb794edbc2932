"""Search for the best plan, prune with lower bounds, verify the winners by running them."""
