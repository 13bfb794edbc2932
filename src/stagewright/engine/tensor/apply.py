"""Tensor parallelism: every layer of a transformer block divided among workers, derived from the model alone.

    plan = tensor_plan(model, 2)               # which layers are split how, or the reason why not
    axis = apply_tensor_parallel(model, group) # in place; ``axis.traffic`` counts what it sends

Embeddings, norms and heads are held whole by every worker, tied or not, and compute the same everywhere; so outputs and
loss are the same on every worker, and gradients of whole parameters need no further exchange. Workers of one axis must
share the state of their random numbers: dropout then drops what serial drops (``tensor_dropout.py``).
Attention weights that a model returns would be those of a worker's own heads, so a model set to return them is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from stagewright.engine.tensor.axis import TensorAxis, group_of
from stagewright.engine.tensor.dropout import SplitDropout
from stagewright.engine.tensor.families import RegionPlan, find_regions, layer_sizes
from stagewright.engine.tensor.layers import Region, shards_of, split_layer
from stagewright.errors import UsageError

__all__ = ["TensorPlan", "apply_tensor_parallel", "modules_to_close", "refuse_open_regions", "tensor_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How a model's layers are divided among workers."""

    num_workers: int
    """Workers that share each layer."""
    regions: tuple[RegionPlan, ...]
    """Attentions and feed-forwards, in the model's order."""
    split_parameters: int
    """Parameters that are divided."""
    whole_parameters: int
    """Parameters that every worker holds."""

    @property
    def styles(self) -> dict[str, str]:
        """For each layer that takes part, by name: ``column``, ``row`` or ``shared``."""
        return {name: style for region in self.regions for name, style in _layers(region)}

    @property
    def parameters_a_worker(self) -> int:
        """Parameters that one worker holds."""
        return self.whole_parameters + self.split_parameters // self.num_workers

    def payload_bytes(self, num_tokens: int, item_bytes: int, *, training: bool) -> int:
        """Bytes that a worker hands to all-reduce in one pass of ``num_tokens`` = batch × sequence.

        Exact where every input of a region needs a gradient and no layer is shared or called twice.
        """
        forward = sum(region.width_out for region in self.regions)
        backward = sum(region.width_in for region in self.regions) if training else 0
        return num_tokens * item_bytes * (forward + backward)


def tensor_plan(model: nn.Module, num_workers: int) -> TensorPlan:
    """Which layers of ``model`` are split how among ``num_workers``; an error says why where that can't be."""
    if num_workers < 1:
        raise UsageError(f"tensor={num_workers}: the number of workers must be 1 or more")
    if shards_of(model):
        raise UsageError(f"{type(model).__name__} is split among workers already; load it again to split it anew")
    if getattr(getattr(model, "config", None), "output_attentions", False):
        raise UsageError(
            f"{type(model).__name__} returns attention weights, of which each worker has only its own heads'; "
            "set output_attentions=False"
        )
    regions = find_regions(model)
    for region in regions:
        for what, number in region.divisible.items():
            if number % num_workers:
                _refuse_number(model, region, what, number, num_workers, regions)
    split = sum(_num_split(model, region) for region in regions)
    whole = sum(parameter.numel() for parameter in model.parameters()) - split
    return TensorPlan(num_workers=num_workers, regions=regions, split_parameters=split, whole_parameters=whole)


def apply_tensor_parallel(model: nn.Module, axis: Any, *, plan: TensorPlan | None = None) -> TensorAxis:
    """Split ``model`` in place among the workers of ``axis``, a process group or a mesh of one dimension.

    Every worker must hold the same full weights before, and keeps its part. Parameters stay the same objects under the
    same names; ``full_state.full_state_dict`` gives the plain model's values back.
    """
    ends = TensorAxis(group_of(axis))
    plan = plan or tensor_plan(model, ends.num_workers)
    if plan.num_workers != ends.num_workers:
        raise UsageError(f"the plan splits among {plan.num_workers} workers, but the group has {ends.num_workers}")
    for one in plan.regions if ends.num_workers > 1 else ():
        owner = model.get_submodule(one.owner)
        region = Region(ends, _dropout(model, one, ends) if _has_dropout(owner) else None)
        for name, style in _layers(one):
            split_layer(model.get_submodule(name), style, region, one.num_sections if style == "column" else 1)
        for attribute in one.attributes:
            setattr(owner, attribute, getattr(owner, attribute) // ends.num_workers)
        owner.register_forward_pre_hook(region.begin)
        owner.register_forward_hook(region.end, always_call=True)
    return ends


def refuse_open_regions(plan: TensorPlan, targets: Iterable[str]) -> None:
    """Refuse units (names of their modules) that hold a part of a region: glue and cuts would see one worker's part."""
    divided = _divided(plan, targets)
    if not divided:
        return
    first, apart = divided[0]
    owners = _owners([region for region, _ in divided])
    fix = f"keep each whole with --units {','.join(owners)}" if all(owners) else "use data or pipeline instead"
    raise UsageError(
        f"tensor parallelism keeps {first.columns[0]} … {first.row} together, but they are in {len(apart)} units "
        f"({', '.join(sorted(str(one) for one in apart))}); {fix}"
    )


def modules_to_close(plan: TensorPlan, targets: Iterable[str]) -> list[str]:
    """Modules that must be units of their own, where units (names of their modules) hold parts of regions.

    None where that would be the whole model.
    """
    owners = _owners([region for region, _ in _divided(plan, targets)])
    return owners if all(owners) else []


def _divided(plan: TensorPlan, targets: Iterable[str]) -> list[tuple[RegionPlan, set[str | None]]]:
    """Regions that are in several units or in none, and those."""
    units = set(targets)
    homes = [(region, {_home(name, units) for name, _ in _layers(region)}) for region in plan.regions]
    return [(region, found) for region, found in homes if len(found) > 1 or None in found]


def _owners(regions: Iterable[RegionPlan]) -> list[str]:
    """The modules that regions are in, none inside another."""
    owners = list(dict.fromkeys(region.owner for region in regions))
    return [one for one in owners if not any(one.startswith(f"{other}.") for other in owners)]


def _home(name: str, units: set[str]) -> str | None:
    """The unit that holds a layer."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts) + 1)]
    return next((prefix for prefix in prefixes if prefix in units), None)


def _layers(region: RegionPlan) -> Iterator[tuple[str, str]]:
    yield from ((name, "column") for name in region.columns)
    yield from ((name, "shared") for name in region.shared)
    yield region.row, "row"


def _num_split(model: nn.Module, region: RegionPlan) -> int:
    columns = sum(value.numel() for name in region.columns for value in model.get_submodule(name).parameters())
    return columns + model.get_submodule(region.row).get_parameter("weight").numel()


def _dropout(model: nn.Module, region: RegionPlan, axis: TensorAxis) -> SplitDropout:
    features, _ = layer_sizes(model.get_submodule(region.row))
    return SplitDropout(
        index=axis.index,
        num_workers=axis.num_workers,
        heads=region.divisible.get("attention heads", 0) // axis.num_workers,
        features=features // axis.num_workers,
    )


def _has_dropout(owner: nn.Module) -> bool:
    """Whether the owner's code may drop anything: by a module below it or by a rate that it keeps."""
    rates = [module.p for module in owner.modules() if isinstance(module, nn.Dropout)]
    rates += [value for name, value in vars(owner).items() if "drop" in name and isinstance(value, float | int)]
    return any(rate > 0 for rate in rates)


def _refuse_number(
    model: nn.Module, region: RegionPlan, what: str, number: int, num_workers: int, regions: tuple[RegionPlan, ...]
) -> None:
    every = [one for other in regions for one in other.divisible.values()]
    fitting = [count for count in range(2, num_workers + 1) if all(one % count == 0 for one in every)]
    fix = f"use tensor={max(fitting)}" if fitting else "use data or pipeline instead"
    rest = num_workers / max(fitting) if fitting else 0
    if fitting and rest == int(rest):
        fix += f" with data={int(rest)} or pipeline={int(rest)}"
    raise UsageError(
        f"tensor={num_workers} does not divide the {number} {what} of {region.owner} in {type(model).__name__}; {fix}"
    )
