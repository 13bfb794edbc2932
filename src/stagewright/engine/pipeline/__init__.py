"""Run the stages of one worker: executor, backward, transport, link codecs, activation checkpointing."""
