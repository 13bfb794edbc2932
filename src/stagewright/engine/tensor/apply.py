"""Tensor parallelism: split linear layers and convolutions over workers, derived from the model alone.

    plan = plan_tensor_parallel(model, 2)      # which layers are column- or row-parallel, or an error with the reason
    axis = apply_tensor_parallel(model, group) # in place; ``axis.payload_bytes`` counts the all-reduces

Norms and layers that can't be split are replicated, embeddings and output heads too unless the vocabulary is divided
(``vocabulary.py``). So outputs and loss are identical on every worker, and gradients of replicated parameters need no
further all-reduce. Workers of one tensor axis must share their random state: dropout masks then match the
single-device baseline (``dropout.py``).
A model that returns attention weights is rejected, because each worker has only the weights of its own heads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from stagewright.engine.tensor.axis import TensorAxis, process_group_of
from stagewright.engine.tensor.dropout import ShardedDropout
from stagewright.engine.tensor.layers import Region, shard_head_parameter, shard_layer, shard_layouts
from stagewright.engine.tensor.regions.by_name import find_regions
from stagewright.engine.tensor.regions.region_plan import RegionPlan, layer_sizes
from stagewright.engine.tensor.sequence import DividedBlock
from stagewright.engine.tensor.sequence_plan import SequencePlan
from stagewright.engine.tensor.vocabulary import VocabularyPlan, find_vocabulary, shard_vocabulary
from stagewright.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How a model's layers are split over the workers of a tensor axis."""

    num_workers: int
    regions: tuple[RegionPlan, ...]
    """Attention and feed-forward regions, in the model's order."""
    replicated: str = ""
    """Why some attentions or feed-forward layers are not split, but computed by every worker; "" if there are none."""
    vocabulary: VocabularyPlan | None = None
    """Embeddings and heads that are divided; None: they are replicated."""


def plan_tensor_parallel(model: nn.Module, num_workers: int, *, vocab_parallel: bool = False) -> TensorPlan:
    """Choose the parallel style of each layer of ``model``; raise ``UsageError`` if the model can't be split.

    ``vocab_parallel``: divide embeddings and heads over the vocabulary.
    """
    if num_workers < 1:
        raise UsageError(f"tensor={num_workers}: the number of workers must be 1 or more")
    if shard_layouts(model):
        raise UsageError(f"{type(model).__name__} is already tensor parallel; load the model again to split it")
    if getattr(getattr(model, "config", None), "output_attentions", False):
        raise UsageError(
            f"{type(model).__name__} returns attention weights, but each worker has only those of its own heads; "
            "set output_attentions=False"
        )
    regions, replicated = find_regions(model)
    uneven = [region for region in regions if _indivisible(region, num_workers)]
    if len(uneven) == len(regions) or not all(region.by_flow for region in uneven):
        region = next(region for region in uneven if len(uneven) == len(regions) or not region.by_flow)
        raise _not_divisible(model, region, *_indivisible(region, num_workers)[0], num_workers, regions)
    if uneven:
        regions = tuple(region for region in regions if region not in uneven)
        replicated = replicated or f"{uneven[0].column_layers[0]!r}, because {num_workers} does not divide its channels"
    vocabulary = None
    if vocab_parallel:
        in_regions = [name for region in regions for name, _ in region.layers()]
        vocabulary = find_vocabulary(model, num_workers, in_regions)
        replicated = replicated or vocabulary.replicated
    return TensorPlan(num_workers=num_workers, regions=regions, replicated=replicated, vocabulary=vocabulary)


def apply_tensor_parallel(
    model: nn.Module,
    group: Any,
    *,
    plan: TensorPlan | None = None,
    gather_logits: bool = False,
    sequence: SequencePlan | None = None,
) -> TensorAxis:
    """Shard ``model`` in place over ``group``, a process group or a one-dimensional device mesh.

    Every worker must hold the same full weights before, and keeps its shard. Parameters remain the same objects under
    the same names; ``full_state.full_tensors`` gathers the full values. ``gather_logits``: see ``shard_vocabulary``.
    ``sequence``: the blocks whose sequence is divided; the gradients of its ``partial`` parameters are left to sum.
    """
    axis = TensorAxis(process_group_of(group))
    plan = plan or plan_tensor_parallel(model, axis.num_workers)
    if plan.num_workers != axis.num_workers:
        raise UsageError(f"the plan splits over {plan.num_workers} workers, but the group has {axis.num_workers}")
    if axis.num_workers > 1:
        shard_layers(model, plan, axis, shard_dropout=True, gather_logits=gather_logits, sequence=sequence)
    return axis


def shard_layers(
    model: nn.Module,
    plan: TensorPlan,
    axis: TensorAxis,
    *,
    shard_dropout: bool,
    gather_logits: bool = False,
    sequence: SequencePlan | None = None,
) -> None:
    """Shard all regions and the vocabulary in place; ``shard_dropout``: draw the dropout masks of the whole model."""
    if plan.vocabulary is not None:
        shard_vocabulary(model, plan.vocabulary, axis, gather=gather_logits)
    blocks = _divide_blocks(model, sequence, axis, shard_dropout) if sequence is not None else {}
    islands = tuple(f"{name}." for block in sequence.blocks for name in block.islands) if sequence is not None else ()
    for region_plan in plan.regions:
        owner = model.get_submodule(region_plan.owner)
        has_dropout = shard_dropout and (region_plan.calls_dropout or _has_dropout(owner))
        dropout = _dropout(model, region_plan, axis) if has_dropout else None
        region = Region(axis, dropout, copies_latents=region_plan.latent_keys is not None)
        for name, style in region_plan.layers():
            sections = region_plan.sections if style == "column" else (1,)
            if style != "latent":
                shard_layer(model.get_submodule(name), style, region, sections)
        if region_plan.latent_keys is not None:
            keys, latent_features = region_plan.latent_keys
            model.get_submodule(keys)._latent_features = latent_features  # type: ignore[assignment]
        for name in region_plan.head_parameters:
            shard_head_parameter(owner, name.rpartition(".")[2], axis)
        for attribute in region_plan.attributes:
            setattr(owner, attribute, getattr(owner, attribute) // axis.num_workers)
        if region_plan.config_attributes:  # the configuration is shared with the whole model
            config = copy.copy(owner.config)
            for attribute in region_plan.config_attributes:
                setattr(config, attribute, getattr(config, attribute) // axis.num_workers)
            owner.config = config
        owner.register_forward_pre_hook(region.begin)
        if not region_plan.row_layer.startswith(islands):
            around = (name for name in blocks if region_plan.row_layer.startswith(f"{name}."))
            region.block = next((blocks[name] for name in around), None)
        if region.block is not None and region_plan.is_attention:
            owner.register_forward_pre_hook(region.gather_input, with_kwargs=True)
        owner.register_forward_hook(region.end, always_call=True)
    for name, block in blocks.items():  # after the regions' hooks, because a block may be the owner of a region
        module = model.get_submodule(name)
        module.register_forward_pre_hook(block.begin, prepend=True, with_kwargs=True)
        module.register_forward_hook(block.end, always_call=True)
    for plan_of_block in sequence.blocks if sequence is not None else ():
        for name in plan_of_block.islands:
            block, island = blocks[plan_of_block.name], model.get_submodule(name)
            island.register_forward_pre_hook(block.begin_island, with_kwargs=True)
            island.register_forward_hook(block.end_island, always_call=True)


def _divide_blocks(
    model: nn.Module, sequence: SequencePlan, axis: TensorAxis, shard_dropout: bool
) -> dict[str, DividedBlock]:
    """Return the blocks whose sequence is divided, by name."""
    return {
        block.name: DividedBlock(
            axis,
            block.name,
            length=block.length,
            receives_shard=block.receives_shard,
            returns_shard=block.returns_shard,
            draws_masks=shard_dropout and any(map(_has_dropout, model.get_submodule(block.name).modules())),
        )
        for block in sequence.blocks
    }


def require_whole_regions(plan: TensorPlan, targets: Iterable[str]) -> None:
    """Raise if a unit (given by module name) holds only part of a region: its crossing would be one worker's shard."""
    divided = _divided_regions(plan, targets)
    if not divided:
        return
    region, units = divided[0]
    owners = _outermost_owners([region for region, _ in divided])
    fix = f"keep each whole with --units {','.join(owners)}" if all(owners) else "use data or pipeline instead"
    raise UsageError(
        f"tensor parallelism needs {region.column_layers[0]} … {region.row_layer} in one unit, but they are in "
        f"{len(units)} units ({', '.join(sorted(str(unit) for unit in units))}); {fix}"
    )


def modules_to_keep_whole(plan: TensorPlan, targets: Iterable[str]) -> list[str]:
    """Return the modules that must each be one unit, where the given units divide regions.

    Empty if that would be the whole model.
    """
    owners = _outermost_owners([region for region, _ in _divided_regions(plan, targets)])
    return owners if all(owners) else []


def divides_regions(plan: TensorPlan, targets: Iterable[str]) -> bool:
    """Whether the given units divide a region."""
    return bool(_divided_regions(plan, targets))


def _divided_regions(plan: TensorPlan, targets: Iterable[str]) -> list[tuple[RegionPlan, set[str | None]]]:
    """Return the regions whose layers lie in several units or outside of all units, with those units."""
    units = set(targets)
    holders = [(region, {_unit_of(name, units) for name, _ in region.layers()}) for region in plan.regions]
    return [(region, holding) for region, holding in holders if len(holding) > 1 or None in holding]


def _outermost_owners(regions: Iterable[RegionPlan]) -> list[str]:
    """Return the owners of regions, without those inside another owner."""
    owners = list(dict.fromkeys(region.owner for region in regions))
    return [name for name in owners if not any(name.startswith(f"{outer}.") for outer in owners)]


def _unit_of(name: str, units: set[str]) -> str | None:
    """Return the unit that holds a layer."""
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts) + 1)]
    return next((prefix for prefix in prefixes if prefix in units), None)


def _dropout(model: nn.Module, region: RegionPlan, axis: TensorAxis) -> ShardedDropout:
    features, _ = layer_sizes(model.get_submodule(region.row_layer))
    return ShardedDropout(
        index=axis.index,
        num_workers=axis.num_workers,
        heads=region.divisible.get("attention heads", 0) // axis.num_workers,
        features=features // axis.num_workers,
    )


def _has_dropout(owner: nn.Module) -> bool:
    """Return whether the owner's code may apply dropout: by a submodule or by a rate in one of its attributes."""
    rates = [module.p for module in owner.modules() if isinstance(module, nn.Dropout)]
    rates += [value for name, value in vars(owner).items() if "drop" in name and isinstance(value, float | int)]
    return any(rate > 0 for rate in rates)


def _indivisible(region: RegionPlan, num_workers: int) -> list[tuple[str, int]]:
    """Return the sizes of a region that the number of workers does not divide, with their names."""
    return [(what, number) for what, number in region.divisible.items() if number % num_workers]


def _not_divisible(
    model: nn.Module, region: RegionPlan, what: str, number: int, num_workers: int, regions: tuple[RegionPlan, ...]
) -> UsageError:
    numbers = [size for other in regions for size in other.divisible.values()]
    fitting = [count for count in range(2, num_workers + 1) if all(size % count == 0 for size in numbers)]
    fix = f"use tensor={max(fitting)}" if fitting else "use data or pipeline instead"
    rest = num_workers / max(fitting) if fitting else 0
    if fitting and rest == int(rest):
        fix += f" with data={int(rest)} or pipeline={int(rest)}"
    return UsageError(
        f"tensor={num_workers} does not divide the {number} {what} of {region.owner} in {type(model).__name__}; {fix}"
    )
