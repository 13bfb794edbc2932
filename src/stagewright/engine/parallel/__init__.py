"""A worker's part of the model under a plan: build it, train it, evaluate it."""
