"""The grid of parallel axes: its models, its cases, and the workers that check one case."""
