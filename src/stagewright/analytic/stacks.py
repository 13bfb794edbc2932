"""What a training system adds to the kernels: host time, overlap, memory habits.

The device waits where the host enqueues kernels more slowly than they run, so a step takes the longer of both,
micro-batch by micro-batch. Each constant names its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.analytic.layout import StackName


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Constants of a training system."""

    host_kernel_s: float
    """Host time to enqueue a kernel of forward, with the module code around it."""
    host_backward_s: float
    """Host time to enqueue a kernel of backward."""
    host_collective_s: float
    """Host time to enqueue a collective."""
    tensor_overlap: float
    """Share of backward's tensor collectives that overlap with weight gradients."""
    step_s: float
    """Host time of a step: data, gradient norm, logging."""
    eager_norms: bool
    """Whether norms and rotary embeddings are chains of elementwise kernels instead of fused ones."""
    eager_activations: bool
    """Whether a gated activation is two kernels (activation, product)."""
    fused_attention: bool
    """Whether attention is the vendor's newest kernel (cuDNN, FlashAttention-3) instead of FlashAttention-2."""
    engine_ring: bool
    """Whether a ring of context ranks is the engine's: gradients of keys and values are sent in 32 bits, one step
    behind, and attention in 32 bits or with dropout has no fused kernels; else Megatron-LM's (--cp-comm-type p2p)."""
    fused_accumulation: bool
    """Whether products of weight gradients add to the accumulated ones; else a kernel of its own does."""
    host_checkpoint_s: float
    """Host time of checkpointing a block: saving and restoring the state of random numbers, hooks on tensors."""
    loss_bytes: tuple[int, int]
    """Bytes that cross-entropy reads and writes per logit: forward, backward."""
    bucket_bytes: float
    """Gradients are reduced in buckets of this size, each with the latency of a collective."""
    gradient_overlap: float
    """Share of the last backward with which gradient collectives overlap."""
    host_tensor_s: float
    """Host time of a block and pass for tensor parallelism, whatever the number of ranks."""
    host_peer_s: tuple[float, float]
    """Host time of a block and pass for each tensor rank, with pipeline ranks on other hosts: tensor groups inside a
    host, and across hosts."""
    peer_latency_s: tuple[float, float]
    """Time of a block and pass for each rank of a tensor group that spans hosts, without and with such a pipeline; the
    device waits for it."""
    kernel_factor: float
    """Time of kernels over that of the best ones: gaps between them, and kernels that were not tuned."""
    message_neighbors: int
    """Neighbors with which a rank inside the pipeline exchanges messages one after the other."""
    logit_bytes: float
    """Bytes held per logit at the peak: logits in both types, and their gradient."""
    gradient_buffer_bytes: float
    """Bytes per parameter that gradients take beside the accumulated ones where replicas reduce them."""
    blocks_ahead: float
    """Blocks that the host enqueues ahead of the device: their gathered inputs stay allocated (`ahead_bytes`)."""
    fragmentation: float
    """Memory that the allocator holds beyond live tensors, as a share of activations."""
    base_bytes: int
    """Memory of the CUDA context's workspaces and communicators that the allocator reports or the device loses."""


# Host times: H200 grid, `host` rows (benchmarks/kernel_grid.py). Overlap: Megatron-LM's asynchronous tensor
# collectives (--async-tensor-model-parallel-allreduce, on by default with CUDA_DEVICE_MAX_CONNECTIONS=1).
_MEGATRON = Stack(
    host_kernel_s=9e-6,
    host_backward_s=6e-6,
    host_collective_s=25e-6,
    tensor_overlap=0.5,
    step_s=5e-3,
    eager_norms=False,
    eager_activations=False,
    fused_attention=True,
    engine_ring=False,
    fused_accumulation=True,
    host_checkpoint_s=0.0,
    loss_bytes=(18, 10),
    bucket_bytes=160e6,
    gradient_overlap=0.8,
    host_tensor_s=0.0,
    host_peer_s=(0.0, 0.0),
    peer_latency_s=(0.0, 0.0),
    kernel_factor=1.0,
    message_neighbors=1,
    logit_bytes=6.0,
    gradient_buffer_bytes=0.0,
    blocks_ahead=0.0,
    fragmentation=0.0,
    base_bytes=1 << 30,
)

STACKS: dict[StackName, Stack] = {
    "megatron": _MEGATRON,
    # The others state what differs. nanotron's constants were fitted on half of the open runs (benchmarks/league.py);
    # host_peer_s was read off all of them and is at the minimum of that half's error. Those of stagewright's host were
    # fitted on two own steps that the host bounds.
    "deepspeed": replace(_MEGATRON, tensor_overlap=0.0, step_s=10e-3, fused_attention=False, bucket_bytes=1e9),
    "nanotron": replace(
        _MEGATRON,
        host_kernel_s=80e-6,
        host_backward_s=60e-6,
        host_collective_s=30e-6,
        tensor_overlap=0.35,
        step_s=60e-3,
        eager_activations=True,
        fused_attention=False,
        fused_accumulation=False,
        loss_bytes=(30, 14),
        bucket_bytes=30e6,
        gradient_overlap=0.01,
        host_tensor_s=0.7e-3,
        host_peer_s=(1.04e-3, 1.31e-3),
        peer_latency_s=(0.2e-3, 0.33e-3),
        kernel_factor=1.1,
        message_neighbors=2,
        logit_bytes=7.5,
        gradient_buffer_bytes=2.65,
        blocks_ahead=25.0,
        fragmentation=0.15,
        base_bytes=140 << 20,
    ),
    "stagewright": replace(
        _MEGATRON,
        host_kernel_s=49.5e-6,
        host_backward_s=32.7e-6,
        host_collective_s=30e-6,
        tensor_overlap=0.0,
        step_s=2e-3,
        eager_norms=True,
        eager_activations=True,
        fused_attention=False,
        engine_ring=True,
        fused_accumulation=False,
        host_checkpoint_s=2.3e-3,
        loss_bytes=(24, 26),
        bucket_bytes=26.2e6,
        base_bytes=1 << 29,
    ),
}
