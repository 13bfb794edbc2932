"""Time of each kind of action on each stage, split by how it scales with the micro-batch.

forward    units + tensor all-reduces (+ loss on the last stage)           + executor overhead, encoding and
backward   units + tensor all-reduces (+ recomputation) (+ accumulation)     decoding, device time of P2P
both       at least as long as the copies of offloaded activations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stagewright.simulator.action_graph import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Floats
from stagewright.simulator.costs.link_codec import LinkCodec
from stagewright.simulator.costs.overheads import EngineOverheads, ModelOverheads
from stagewright.simulator.costs.stage_costs import StageCosts

# Fields of StageCosts that `action_times` reads.
_STAGE_TIMES = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "tensor_forward_s",
    "tensor_backward_s",
    "gather_s",
    "scatter_s",
    "accumulate_s",
    "expert_s",
    "offload_s",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionTimes:
    """Times of actions: [0 without, 1 with recomputation; stage; kind, by its index in `action_graph.KINDS`]."""

    compute_s: Floats
    """Compute that scales with the samples, for one micro-batch of the profiled size."""
    tensor_s: Floats
    """All-reduces of the tensor axis and all-to-alls of the expert axis, which scale the same way."""
    fixed_s: Floats
    """Time independent of the samples."""
    accumulate_s: Floats
    """Gradient accumulation, if gradients exist already."""


def action_times(
    stages: Sequence[StageCosts],
    codecs: Sequence[LinkCodec],
    recomputed: npt.NDArray[np.bool_],
    loss: ModelOverheads,
    engine: EngineOverheads,
    contention: float,
) -> ActionTimes:
    """Compute the times of every stage's actions; ``recomputed``: the stages with activation checkpointing."""
    forward, inputs, weights, tensor_forward, tensor_backward, gather, scatter, accumulate, experts, offload = np.array(
        [[getattr(stage, name) for stage in stages] for name in _STAGE_TIMES]
    )
    forward_again, tensor_again, expert_again = np.array(
        [
            (stage.recomputation.forward_share, stage.recomputation.tensor_share, stage.recomputation.expert_share)
            for stage in stages
        ]
    ).T
    repeated_s, repeated_tensor_s = forward_again * forward, tensor_again * tensor_forward + expert_again * experts
    tensor_forward, tensor_backward = tensor_forward + experts, tensor_backward + experts
    compute, tensor, fixed, accumulation = (np.zeros((2, len(stages), 4)) for _ in range(4))
    compute[..., FORWARD], tensor[..., FORWARD] = forward, tensor_forward
    compute[..., BACKWARD], tensor[..., BACKWARD] = inputs + weights, tensor_backward
    # A split backward takes longer. A recomputed stage runs it unsplit; only the bookkeeping here is split.
    compute[..., BACKWARD_INPUT] = inputs * np.where(recomputed, 1.0, loss.split_input)
    compute[..., BACKWARD_WEIGHT] = weights * np.where(recomputed, 1.0, loss.split_weight)
    tensor[..., BACKWARD_INPUT] = tensor_backward
    # The first stage's inputs need no gradient: its whole backward is in the second half.
    for times in (compute, tensor):
        times[:, 0, BACKWARD_WEIGHT], times[:, 0, BACKWARD_INPUT] = times[:, 0, BACKWARD], 0.0
    compute[:, -1, FORWARD] += loss.loss_forward_s * contention
    compute[:, -1, BACKWARD : BACKWARD_INPUT + 1] += loss.loss_backward_s * contention
    fixed[:] = engine.action_s
    fixed[..., :BACKWARD_WEIGHT] += gather[:, None]
    fixed[..., BACKWARD] += scatter
    _add_p2p(stages, codecs, engine, compute, fixed)
    accumulation[..., [BACKWARD, BACKWARD_WEIGHT]] = accumulate[:, None]
    # Recomputation runs in the backward; of a split one in the first half, which then does all of the backward.
    for kind, which in ((BACKWARD, slice(None)), (BACKWARD_INPUT, slice(1, None)), (BACKWARD_WEIGHT, slice(1))):
        compute[1, which, kind] += repeated_s[which]
        tensor[1, which, kind] += repeated_tensor_s[which]  # FSDP gathers parameters for the backward anyway
    compute[1, 1:, BACKWARD_INPUT] += weights[1:]
    accumulation[1, 1:, BACKWARD_INPUT] = accumulate[1:]
    compute[1, 1:, BACKWARD_WEIGHT] = accumulation[1, 1:, BACKWARD_WEIGHT] = 0.0
    # Copies of offloaded activations overlap with compute: what is longer counts. A stage has all of a split backward
    # in one half.
    is_working = compute + tensor > 0
    compute += np.where(is_working, np.maximum(0.0, offload[:, None] - compute - tensor), 0.0)
    return ActionTimes(compute_s=compute, tensor_s=tensor, fixed_s=fixed, accumulate_s=accumulation)


def _add_p2p(
    stages: Sequence[StageCosts], codecs: Sequence[LinkCodec], engine: EngineOverheads, compute: Floats, fixed: Floats
) -> None:
    """Add the device time of sends, receives and codecs to the actions at both ends of each edge."""
    for edge, codec in enumerate(codecs):
        before, behind = stages[edge], stages[edge + 1]
        if before.worker == behind.worker:
            continue
        transfer_s = engine.message_s_per_byte * codec.ratio
        encode_s, gradient_s = (
            before.sent_bytes * (codec.encode_s_per_byte + transfer_s * copies) for copies in before.copies
        )
        decode_s = before.sent_bytes * (codec.decode_s_per_byte + transfer_s)
        compute[:, edge, :BACKWARD_WEIGHT] += encode_s, decode_s, decode_s
        compute[:, edge + 1, :BACKWARD_WEIGHT] += decode_s, gradient_s, gradient_s
        fixed[:, edge : edge + 2, :BACKWARD_WEIGHT] += engine.message_s
