"""Results of a fabric run: distributions, diagnosis, comparison, run folder."""
