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
    loss_bytes: tuple[int, int]
    """Bytes that cross-entropy reads and writes per logit: forward, backward."""
    bucket_bytes: float
    """Gradients are reduced in buckets of this size, each with the latency of a collective."""
    gradient_overlap: float
    """Share of the last backward with which gradient collectives overlap."""
    host_peer_s: tuple[float, float]
    """Host time of a block and micro-batch for each tensor peer: without and with pipeline ranks on other hosts."""
    host_pair_s: float
    """The same for each pair of tensor peers, with pipeline ranks on other hosts."""
    kernel_factor: float
    """Time of kernels over that of the best ones: gaps between them, and kernels that were not tuned."""
    message_neighbors: int
    """Neighbors with which a rank inside the pipeline exchanges messages one after the other."""
    tensor_adapters: float
    """Network adapters per rank that point-to-point exchanges of tensor ranks on several hosts use; 0: rings."""
    logit_bytes: float
    """Bytes held per logit at the peak: logits in both types, and their gradient."""
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
    loss_bytes=(18, 10),
    bucket_bytes=160e6,
    gradient_overlap=0.8,
    host_peer_s=(0.0, 0.0),
    host_pair_s=0.0,
    kernel_factor=1.0,
    message_neighbors=1,
    tensor_adapters=0,
    logit_bytes=6.0,
    fragmentation=0.0,
    base_bytes=1 << 30,
)

STACKS: dict[StackName, Stack] = {
    "megatron": _MEGATRON,
    # The others state what differs.
    "deepspeed": replace(_MEGATRON, tensor_overlap=0.0, step_s=10e-3, fused_attention=False, bucket_bytes=1e9),
    "nanotron": replace(
        _MEGATRON,
        host_kernel_s=100e-6,
        host_backward_s=47e-6,
        host_collective_s=64e-6,
        tensor_overlap=0.6,
        step_s=20e-3,
        eager_activations=True,
        fused_attention=False,
        loss_bytes=(30, 14),
        bucket_bytes=25e6,
        gradient_overlap=0.07,
        host_peer_s=(0.32e-3, 1.9e-3),
        host_pair_s=5e-5,
        kernel_factor=1.15,
        message_neighbors=2,
        tensor_adapters=2,
        logit_bytes=12.0,
        fragmentation=0.27,
        base_bytes=1 << 28,
    ),
    "stagewright": replace(
        _MEGATRON,
        host_kernel_s=62e-6,
        host_backward_s=41e-6,
        host_collective_s=30e-6,
        tensor_overlap=0.0,
        step_s=2e-3,
        eager_norms=True,
        eager_activations=True,
        fused_attention=False,
        loss_bytes=(24, 26),
        bucket_bytes=26.2e6,
        base_bytes=1 << 29,
    ),
}
