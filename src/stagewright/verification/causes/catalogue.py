"""The causes that can be named, each with its fix."""

from __future__ import annotations

from stagewright.verification.verdict import Cause

FIXES = {
    "different batch": "give the ranks together the batch of the baseline: check the sampler, its seed and drop_last",
    "different initial weights": "load the same checkpoint, or seed before building the model on every rank",
    "module names differ": "map the names of a pipeline stage to the plain model's: sw.verify(stage, names=…)",
    "wrong shard order": "shard each fused projection by itself, and load shard r of the weight on rank r",
    "stale buffer": "update or broadcast the buffer on every rank that uses it (broadcast_buffers=True in DDP)",
    "mask or position shifted": "index masks and positions by the global position of a token, not the local one",
    "missing all-reduce": "all-reduce the tensor over its group, or let DDP, FSDP or the parallel style do it",
    "all-reduce twice": "reduce once: divide by the group size after a sum, or drop the second reduction",
    "bias added on every rank": "add the bias of a row-parallel layer after the all-reduce, or on one rank only",
    "batch norm per replica": "convert to SyncBatchNorm, use statistics of the whole batch, or accept the difference",
    "dropout seed per rank": "use the same random state on all ranks of a tensor-parallel group for replicated tensors",
    "dropout masks differ": "pass dropout=False to sw.verify on both sides: data parallelism draws other masks",
    "train or eval mode": "call model.train() or model.eval() on the distributed model as in the baseline",
    "rows corrupted between stages": "give every pipeline step the batch shape that its stages were built for",
    "reentrant checkpoint in a split backward": "pass use_reentrant=False to torch.utils.checkpoint",
    "schedule without forward-only mode": "evaluate with another schedule of torch, like GPipe or 1F1B",
    "DDP around stages without static shapes": "give PipelineStage its input_args and output_args",
    "exception in the step": "fix what the message says; other ranks may only have lost their connection",
    "rank did not finish": "look for a collective or P2P operation that not all ranks reach",
    "loss scaled": "divide the loss once by the number of micro-batches, and average over ranks once",
    "padding counted": "divide the summed loss by the number of valid tokens of the global batch, not of each rank",
    "tied weights not summed": "all-reduce the gradient of the shared weight over the stages that hold a copy",
    "gradient clipped before reduction": "reduce gradients first, then clip by the norm over all shards",
    "wrong clipping norm": "clip by the norm over all parameters of all ranks, not of the local shard",
    "missing gradient": "check that the parameter takes part in the forward pass and is not detached",
    "micro-batch lost": "accumulate gradients over all micro-batches: call zero_grad once a step",
    "weight decay on the wrong group": "build the optimizer's groups from the names of the plain model's parameters",
    "learning rate scaled": "use the baseline's learning rate, or scale it in both",
    "parameter not updated": "build the optimizer after wrapping or sharding, from the parameters that are trained",
    "replicas diverge": "apply the same gradient and optimizer step on every replica",
}


def cause(name: str, evidence: str) -> Cause:
    """Return a cause of the catalogue with its evidence."""
    return Cause(name=name, evidence=evidence, fix=f"{FIXES[name]}.")
