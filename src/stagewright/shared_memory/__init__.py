"""Process groups of workers that share memory: of the host between CPU workers, of a GPU between its shares."""
