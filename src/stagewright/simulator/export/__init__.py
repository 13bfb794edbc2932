"""Export a forecast: Chakra execution traces, Chrome and Perfetto timelines."""
