"""Planning: measured costs, forecasts, the search for the best plan, the largest model that fits, explanations."""
