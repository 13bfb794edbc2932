"""Start the workers of a plan on this machine."""
