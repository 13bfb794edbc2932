"""One worker process: context, process group, faults, watchdog, events, clock, memory."""
