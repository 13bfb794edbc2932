"""What every worker of a run did: events on one clock, where a step's time went, operators, memory, Perfetto."""
