"""``sw.attach()``: measure a training loop that we did not start, through hooks of torch, and write a run folder."""
