"""The built-in codecs, one kind a file."""
