"""Whether a model's loss depends on which samples share a batch: the loss of the whole batch, in one piece.

A plan that cuts a batch is proven against serial on the same pieces (micro-batches of replicas). For most models the
mean over pieces is the loss of the whole batch. For some it is another number, and such a plan trains another function:

    in-batch negatives         pieces        ■■■■ ■■■■ ■■■■ ■■■■     each sample has 3 others to tell apart
                               whole batch   ■■■■■■■■■■■■■■■■        each sample has 15

So do batch norm and a mean over something else than samples, such as tokens. That is told by both numbers. One forward
pass without gradients; a model that drops out is run with every value kept, its pieces too. There is no answer where
the whole batch has no room, or where random numbers are drawn in a way that is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stagewright.engine.batch.dropout import generators_of
from stagewright.engine.parity.comparison import Part
from stagewright.engine.worker.memory import held_bytes
from stagewright.graph.preserve import preserved
from stagewright.machine.cpu_offload import room_of
from stagewright.machine.host_memory import available_bytes
from stagewright.profiler.allocations import Made
from stagewright.profiler.replay import memory_rise

__all__ = ["DEPENDS", "WholeBatch", "try_whole_batch"]

DEPENDS = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-8}
"""A larger relative difference is no rounding: the loss depends on which samples share a batch."""

SMALL = 1e-2  # of losses below this, the difference counts as beside it: they are what is left of larger numbers

_Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """The loss of a batch in one piece and in those of a plan."""

    loss: float
    """Of the whole batch, in one piece."""
    loss_of_pieces: float
    """Mean over the plan's pieces, weighted by samples."""
    pieces: int
    """How many the plan makes, over all replicas."""
    samples: int
    """In the largest of them."""
    difference: float
    """Of the two losses, relative to the larger."""
    depends: bool
    """Whether that is more than rounding."""
    without_dropout: bool
    """Whether both were computed with every value kept, since dropout is drawn anew for each piece."""

    def to_dict(self) -> dict[str, Any]:
        """For a run's files."""
        return asdict(self)


def try_whole_batch(
    model: nn.Module,
    parts: Sequence[Part],
    whole: Part,
    loss: _Loss,
    *,
    known: float | None,
    dtype: str,
    device: torch.device,
    memory_bytes: int | None = None,
) -> WholeBatch | None:
    """Compare the loss of ``whole`` with that of its ``parts``; the model and its random numbers are left as they were.

    ``known`` is the parts' loss, if the plain model gave it. None where there is no room, or no answer.
    """
    try:
        with preserved(model), torch.no_grad():
            drawn, needed = _trial(model, parts[0], loss, device)
        if needed * whole.size / parts[0].size > _room(model, device, memory_bytes):
            return None
        before = _states(device)
        with preserved(model), torch.no_grad(), _NothingLeftToChance(device) if drawn else nullcontext():
            in_pieces = known
            if drawn or known is None:
                in_pieces = sum(_value(model, part, loss) * part.weight for part in parts)
        with preserved(model), torch.no_grad(), _NothingLeftToChance(device) if drawn else nullcontext():
            in_one = _value(model, whole, loss)
            if not _same(before, _states(device)):
                return None
    except Exception:  # no memory, or a model that does not take so many samples: the proof goes on without
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    assert in_pieces is not None
    if not math.isfinite(in_one) or not math.isfinite(in_pieces):
        return None
    larger, apart = max(abs(in_one), abs(in_pieces)), abs(in_one - in_pieces)
    return WholeBatch(
        loss=in_one,
        loss_of_pieces=in_pieces,
        pieces=len(parts),
        samples=max(part.size for part in parts),
        difference=apart / larger if larger else 0.0,
        depends=apart > DEPENDS[dtype] * max(larger, SMALL),
        without_dropout=drawn,
    )


def _value(model: nn.Module, part: Part, loss: _Loss) -> float:
    """The loss of one piece by the plain model, which may change its inputs."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (part.args, part.kwargs))
    return float(loss(model(*args, **kwargs), part.target))


def _trial(model: nn.Module, part: Part, loss: _Loss, device: torch.device) -> tuple[bool, int]:
    """Whether one piece draws random numbers, and by how much memory rises for it."""
    before = _states(device)
    if device.type == "cuda":
        _, needed = memory_rise(lambda: _value(model, part, loss), device)
    else:
        with Made() as made:  # not the process, which has room from a step before
            _value(model, part, loss)
        needed = made.most_bytes
    return not _same(before, _states(device)), needed


def _room(model: nn.Module, device: torch.device, limit_bytes: int | None) -> float:
    """Bytes that a forward pass may take: half of what is free, for other workers load at the same time."""
    parameters = sum(one.numel() * one.element_size() for one in model.parameters() if one.device.type == device.type)
    allowed = math.inf if limit_bytes is None else limit_bytes - parameters
    if device.type == "cuda":
        return min(allowed, room_of(device) - (held_bytes(device) or 0))
    free = available_bytes()
    return allowed if free is None else min(allowed, free / 2)


def _states(device: torch.device) -> list[torch.Tensor]:
    return [one.get_state() for one in generators_of(device)]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


_DROPOUTS = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout,
    torch.feature_alpha_dropout,
}  # fmt: skip
_PLACES = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}
_DRAWN = {torch.rand: 0.5, torch.rand_like: 0.5, torch.randn: 0.0, torch.randn_like: 0.0}


class _NothingLeftToChance(TorchFunctionMode):
    """Dropout drops nothing and random numbers are their mean, whichever module asks; batch norm still trains."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generators = generators_of(device)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = _PLACES.get(function)
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs = {**kwargs, "dropout_p": 0.0}
        if function in _DRAWN:  # by which some decide whether to skip a layer
            states = [one.get_state() for one in self._generators]
            drawn = function(*args, **kwargs).fill_(_DRAWN[function])
            for one, state in zip(self._generators, states, strict=True):
                one.set_state(state)
            return drawn
        return function(*args, **kwargs)
