"""The study *fabric*: a model's collectives on emulated networks."""
