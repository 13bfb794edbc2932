"""Dropout inside experts: the masks of the single-device baseline, although rows are computed elsewhere.

The baseline draws, for each micro-batch, the masks of its experts one after the other, from that micro-batch's random
state. Under expert parallelism the rows of one micro-batch are spread over workers:

    rows of worker 0     expert 0  expert 1 │ expert 2  expert 3      worker 1 draws and discards the masks of experts
    random state ────────────────────────────────────────────►        0 and 1, then applies 2 and 3

So every worker receives the random state of every source and draws all masks of each, which costs as much as in the
baseline for each source. Experts without dropout, or in eval mode, take no part in this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stagewright.engine.expert.axis import ExpertAxis

DropoutDraws: TypeAlias = tuple[tuple[tuple[int, ...], float], ...]
"""Shape of one row's mask and rate of each dropout that an expert applies, in order."""


def run_with_baseline_dropout(
    axis: ExpertAxis,
    rows: torch.Tensor,
    table: list[list[list[int]]],
    draws: DropoutDraws,
    compute: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Apply ``compute(rows, expert)`` to the rows of each source and expert, with that source's random state."""
    states = axis.all_gather(_random_state(rows.device))
    outputs: list[torch.Tensor] = []
    own_end, position = states[axis.index], 0
    for source, state in enumerate(states):
        _set_random_state(state, rows.device)
        for worker, counts in enumerate(table[source]):
            for expert, count in enumerate(counts):
                if worker == axis.index:
                    if count:
                        outputs.append(compute(rows[position : position + count], expert))
                    position += count
                elif count:
                    _discard(draws, count, rows)
        if source == axis.index:
            own_end = _random_state(rows.device)
    _set_random_state(own_end, rows.device)
    return torch.cat(outputs) if outputs else rows


def record_draws(module: nn.Module, run: Callable[[], object], device: torch.device) -> DropoutDraws:
    """Call ``run``, which sends one row through one expert of a module, and return the dropouts of training."""
    if not any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
        return ()
    modes = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), _Recording() as draws:
            run()
    finally:
        for part, training in modes:
            part.training = training
    return tuple(draws.draws)


class _Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[tuple[int, ...], float]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            value = args[0] if args else kwargs["input"]
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if rate > 0:
                self.draws.append((tuple(value.shape[1:]), float(rate)))
        return func(*args, **kwargs)


def _discard(draws: DropoutDraws, count: int, rows: torch.Tensor) -> None:
    with torch.no_grad():
        for shape, rate in draws:
            functional.dropout(rows.new_empty((count, *shape)), rate, training=True)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
