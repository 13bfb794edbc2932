"""What recomputation of the attention inside units costs: `recompute = "attention"`.

Saved activations are counted in a run of the whole graph with recomputed attention. The recomputation itself is timed
inside the backward of each kind of unit, and the activations that it adds are counted there.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagewright.errors import UsageError
from stagewright.graph.attention.checkpointing import AttentionCall, checkpointed_attentions
from stagewright.graph.attention.structure import find_attentions
from stagewright.machine.cpu_offload import offloaded, resident
from stagewright.machine.saved_tensor_hooks import innermost_hooks
from stagewright.profiler.profile import AttentionProfile, Time
from stagewright.profiler.replay import Replay, summarize
from stagewright.profiler.saved_activations import measure_saved_activations
from stagewright.profiler.storage import model_storages, storage_of

if TYPE_CHECKING:
    from stagewright.graph.unit_graph import UnitGraph


def profile_attention(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    replays: Sequence[Replay],
    device: torch.device,
    *,
    repeats: int,
) -> list[AttentionProfile | None]:
    """Measure the recomputation of attention in each unit call; None for those without attention."""
    has_attention = [bool(find_attentions(replay.module)) for replay in replays]
    if not any(has_attention):
        return [None] * len(replays)
    try:
        with offloaded(graph.model, device):
            saved = measure_saved_activations(graph, args, kwargs, attention=True)
    except UsageError:  # an attention that can't be recomputed, which a run with it explains
        return [None] * len(replays)
    excluded = model_storages(graph.model)
    measured: dict[Hashable, tuple[int, int, Time]] = {}
    profiles: list[AttentionProfile | None] = []
    for replay, activations, is_attention in zip(replays, saved, has_attention, strict=True):
        if not is_attention:
            profiles.append(None)
            continue
        if replay.cost_key not in measured:
            with resident(replay.module, device):
                measured[replay.cost_key] = _measure(replay, device, excluded, repeats)
        recomputed_bytes, earlier_bytes, seconds = measured[replay.cost_key]
        profiles.append(
            AttentionProfile(
                saved_bytes=activations.saved_bytes,
                recomputed_bytes=recomputed_bytes,
                later_bytes=activations.later_bytes,
                earlier_parameter_bytes=earlier_bytes,
                recompute=seconds,
            )
        )
    return profiles


def _measure(
    replay: Replay, device: torch.device, excluded: frozenset[Hashable], repeats: int
) -> tuple[int, int, Time]:
    """Return the bytes that recomputation adds, those of parameters before attention, and its time."""
    meter = _Meter(device, excluded)
    samples = []
    with checkpointed_attentions([replay.module], contexts=meter.contexts, on_reuse=meter.reused.add):
        for _ in range(repeats + 1):
            meter.spans.clear()
            replay.run_once()
            samples.append(meter.seconds())
    parameters = [parameter for layer in meter.reused for parameter in layer.parameters()]
    earlier_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return meter.most_bytes, earlier_bytes, summarize(samples[1:])


class _Meter:
    """Times recomputations and counts what they save."""

    def __init__(self, device: torch.device, excluded: frozenset[Hashable]) -> None:
        self.most_bytes = 0
        self.reused: set[nn.Module] = set()
        self.spans: list[tuple[Any, Any]] = []
        self._device, self._excluded = device, excluded

    def contexts(
        self, attention: nn.Module, call: AttentionCall
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the first and the recomputed forward."""
        return nullcontext(), self._recomputation(call)

    def seconds(self) -> float:
        """Return the time of the recomputations."""
        if self._device.type != "cuda":
            return float(sum(end - start for start, end in self.spans))
        torch.cuda.synchronize(self._device)
        return float(sum(start.elapsed_time(end) for start, end in self.spans)) / 1e3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def _recomputation(self, call: AttentionCall) -> Iterator[None]:
        hooks = innermost_hooks()
        assert hooks is not None, "checkpointing has hooks during a recomputation"
        pack, unpack = hooks
        sizes: dict[Hashable, int] = {}
        held = call.held_storages()
        alive: list[object] = []

        def count(tensor: torch.Tensor) -> Any:
            key, num_bytes, storage = storage_of(tensor)
            if key not in self._excluded and tensor.untyped_storage().data_ptr() not in held:
                sizes[key] = num_bytes
                alive.append(storage)
            return pack(tensor)

        start = self._now()
        try:
            with torch.autograd.graph.saved_tensors_hooks(count, unpack):
                yield
        finally:
            self.spans.append((start, self._now()))
            self.most_bytes = max(self.most_bytes, sum(sizes.values()))
