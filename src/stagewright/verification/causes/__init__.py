"""The likely cause of a difference: patterns in the wrong tensors, matched against a catalogue of known mistakes."""
