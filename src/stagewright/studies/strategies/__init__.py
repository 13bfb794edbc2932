"""The study *strategies*: pipeline against data parallel."""
