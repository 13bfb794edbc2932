"""Compare a training step that Stagewright did not start with the same step of the plain model.

    user's script ─► recorder ─► record (safetensors + JSON) ─► assembly ─► comparison ─► causes ─► verdict

Not the parity check of our own runs: that is `stagewright.engine.parity`, which has the plan. Here only the tensors
are known, in whatever layout the script holds them.
"""
