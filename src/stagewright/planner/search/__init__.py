"""The search for the best plan: enumeration, lower bounds, ranking, and verification by running."""
