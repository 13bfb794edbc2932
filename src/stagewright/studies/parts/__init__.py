"""Work that the parts of several studies share: measurements, training, traces."""
