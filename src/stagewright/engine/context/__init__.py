"""Context parallelism: the sequence of each block divided over workers, with ring or all-to-all attention."""
