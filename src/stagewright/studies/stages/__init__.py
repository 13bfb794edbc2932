"""The study *stages*: where to cut a model into pipeline stages."""
