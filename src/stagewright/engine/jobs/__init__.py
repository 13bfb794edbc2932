"""What the workers of a run do: measure, train, record operators; and comparisons of several plans."""
