"""Full state of the model under its own names, and checkpoints."""
