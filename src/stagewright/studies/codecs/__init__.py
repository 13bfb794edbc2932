"""The study *codecs*: compressed links."""
