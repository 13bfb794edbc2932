"""Compare a plan with the single-device baseline: outputs, loss, gradients, buffers, optimizer step."""
