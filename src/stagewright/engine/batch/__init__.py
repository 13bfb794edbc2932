"""Batches and micro-batches; batch norm and dropout under micro-batching."""
