"""What the five studies conclude, as values: so that two runs of a study can be compared."""
