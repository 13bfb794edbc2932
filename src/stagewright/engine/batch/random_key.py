"""Random numbers that depend on what is computed, not on where or when.

Before every unit call the device's generator is seeded from the key (seed, step, first sample of the micro-batch, index
of the unit call). So one seed gives the same dropout masks for every split into stages, every schedule, every worker
and every recomputation; only the split into micro-batches matters. Random operations of the glue follow the unit call
before them; those before the first unit have their own key.

    with random_key(seed=0, step=7, first_sample=16, device=device):    around the forward of a micro-batch
        stage(*inputs)            reseed(0) · glue · reseed(1) · unit 0 · glue · reseed(2) · unit 1 · …

``key_stage`` writes the ``reseed`` calls into the stage's code: hooks would also fire for a unit that another unit
calls, and would be compiled into units. Generator states are restored when the key is left.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stagewright.graph.stage import Stage
from stagewright.graph.symbolic_shapes import memory_order

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomKey:
    """What the random numbers of one micro-batch depend on, besides the unit call."""

    base: int
    """64-bit hash of seed, step and first sample."""
    generators: tuple[torch.Generator, ...]
    """The generators of the CPU and, if different, of the device."""

    def seed_of(self, call: int) -> int:
        """Return the seed of a unit call: one round of splitmix64."""
        mixed = (self.base + call * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)


class _Current(threading.local):
    """The key of this thread; autograd recomputes on threads of its own."""

    key: RandomKey | None = None


_current = _Current()


def current_key() -> RandomKey | None:
    """Return the current key, if any."""
    return _current.key


def random_key(*, seed: int, step: int, first_sample: int, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which keyed stages draw the random numbers of one micro-batch of one step."""
    return use_key(make_key(seed=seed, step=step, first_sample=first_sample, device=device))


def make_key(*, seed: int, step: int, first_sample: int, device: torch.device) -> RandomKey:
    """Make the key of one micro-batch of one step."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, first_sample), digest_size=8).digest()
    return RandomKey(base=int.from_bytes(digest, "little"), generators=device_generators(device))


@contextmanager
def use_key(key: RandomKey) -> Iterator[None]:
    """Use a key inside the block; restore the generators and the previous key afterwards."""
    with preserve_generators(key.generators):
        set_key(key)
        yield


@contextmanager
def preserve_generators(generators: tuple[torch.Generator, ...]) -> Iterator[None]:
    """Restore the generators and the current key after the block."""
    before = _current.key
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        _current.key = before
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def set_key(key: RandomKey) -> None:
    """Use a key from now on; call it inside ``preserve_generators`` with the key's generators."""
    _current.key = key


@contextmanager
def without_key() -> Iterator[None]:
    """Let keyed stages draw random numbers without a key inside the block, and leave the generators alone."""
    before = _current.key
    _current.key = None
    try:
        yield
    finally:
        _current.key = before


def key_stage(stage: Stage) -> None:
    """Make a stage reseed before each of its unit calls if there is a current key."""
    if is_keyed(stage):
        return
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    graph.output(graph.graph_copy(stage.graph, copies))
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    if stage.calls[0].index > 0:
        _restore_layouts(graph, nodes[0])
    calls = [node for node in nodes if node.op == "call_module"]
    assert len(calls) == len(stage.calls), "every call of a module in a stage is a unit call"
    if stage.calls[0].index == 0:  # before the loop, because the first node may be a unit call
        with graph.inserting_before(nodes[0]):
            graph.call_function(reseed, (0,))
    for node, call in zip(calls, stage.calls, strict=True):
        with graph.inserting_before(node):
            graph.call_function(reseed, (call.index + 1,))
    # A stage generates its code when it is created: take the code of a stage of the changed graph.
    stage._run = Stage(graph, calls=stage.calls, inputs=stage.inputs, outputs=stage.outputs)._run
    stage.__dict__["stagewright_keyed"] = True


def _restore_layouts(graph: fx.Graph, first: fx.Node) -> None:
    """Lay out received tensors in memory as they were sent: dropout draws its mask in the order of the memory."""
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        order = memory_order(node.meta.get("val"))
        if order is not None:
            with graph.inserting_before(first):
                restored = graph.call_function(laid_out, (node, order))
            node.replace_all_uses_with(restored, delete_user_cb=lambda user, new=restored: user is not new)


def laid_out(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose dimensions follow each other in memory in this order."""
    return tensor.permute(order).contiguous().permute(tuple(map(order.index, range(len(order)))))


def is_keyed(stage: Stage) -> bool:
    """Return whether ``key_stage`` was applied to a stage."""
    return "stagewright_keyed" in stage.__dict__


def reseed(call: int) -> None:
    """Seed the generators for a unit call (counted from 1; 0 is everything before the first)."""
    key = _current.key
    if key is not None:
        seed = key.seed_of(call)
        for generator in key.generators:
            generator.manual_seed(seed)


def random_state(device: torch.device) -> list[bytes]:
    """Return the state of the generators that a model on this device uses."""
    return [generator.get_state().numpy().tobytes() for generator in device_generators(device)]


def device_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that a model on this device uses: the CPU's and the GPU's."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return (torch.default_generator, torch.cuda.default_generators[index])
