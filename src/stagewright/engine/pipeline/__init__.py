"""Run the stages of one worker: executor, backward, P2P transport, link codecs, activation checkpointing."""
