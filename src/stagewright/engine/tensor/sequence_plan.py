"""Find the blocks whose sequence tensor-parallel workers can divide, and where one block passes shards to the next.

A block is a unit, or else a module inside it, that holds regions and beside them only layers that treat each token by
itself: norms, dropout, linear layers, activations. What mixes tokens outside of a region stays whole, with the reason.
A layer that is captured as several units, such as one with a mixture of experts, is divided by parts
(``sequence_parts.py``).
Pure functions of the module tree and the graphs of stages; the model is not changed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from stagewright.engine.tensor.regions.region_plan import RegionPlan
from stagewright.engine.tensor.sequence_parts import find_parts, islands_in, reason_whole, regions_in
from stagewright.engine.tensor.sequence_stage import hidden_node, num_tokens
from stagewright.errors import UsageError
from stagewright.graph.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block with a divided sequence."""

    name: str
    length: int | None = None
    """Tokens of the example, where the block receives or returns shards; else None."""
    receives_shard: bool = False
    """Whether the block before passes on its shard, in the same stage."""
    returns_shard: bool = False
    """Whether the block after takes its shard, in the same stage."""
    islands: tuple[str, ...] = ()
    """Mixtures of experts in the block, which every worker computes whole."""
    is_part: bool = False
    """Whether the stage divides and joins what the block takes and returns (``sequence_stage.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """The blocks with divided sequences."""

    blocks: tuple[BlockPlan, ...]
    partial: frozenset[str]
    """Parameters of which each worker has the gradient of its own tokens: norms, biases of row-parallel layers."""
    whole: str = ""
    """Why the sequence of other blocks is not divided; "" if there are none."""

    @property
    def parts(self) -> dict[str, int]:
        """The blocks that are parts of a stage with divided values, with the tokens of the example."""
        return {block.name: block.length for block in self.blocks if block.is_part and block.length is not None}

    def without_chains(self) -> SequencePlan:
        """Return the plan with every block divided and joined by itself."""
        return replace(self, blocks=tuple(BlockPlan(name=block.name, islands=block.islands) for block in self.blocks))


def plan_sequence_parallel(
    model: nn.Module, regions: Sequence[RegionPlan], stages: Sequence[Stage], num_workers: int
) -> SequencePlan:
    """Choose the blocks of a model that is cut into stages; raise ``UsageError`` if there are none."""
    calls = Counter(call.target for stage in stages for call in stage.calls)
    found = {target: _blocks_in(model, target, regions) for target in calls}
    names = [name for blocks, _ in found.values() for name in blocks]
    parts, changed = find_parts(model, regions, stages, names)
    names += [name for name in parts if name not in names]
    reasons = [reason for target, (_, reason) in found.items() if reason and target not in parts]
    reasons = [changed, *reasons] if changed else reasons
    if not names:
        reason = reasons[0] if reasons else "no unit holds whole attention or feed-forward layers and a norm"
        raise UsageError(
            f"sequence_parallel = true can't divide the sequences of {type(model).__name__} over tensor = "
            f"{num_workers} workers: {reason}; leave it out"
        )
    once = {name for name in names if calls[name] == 1 and name not in parts}
    blocks = {name: BlockPlan(name=name, islands=tuple(islands_in(model, name, regions))) for name in names}
    for name, length in parts.items():
        blocks[name] = replace(blocks[name], length=length, receives_shard=True, returns_shard=True, is_part=True)
    for stage in stages:
        for first, second, length in _chains(stage, once):
            blocks[first] = replace(blocks[first], length=length, returns_shard=True)
            blocks[second] = replace(blocks[second], length=length, receives_shard=True)
    return SequencePlan(
        blocks=tuple(blocks.values()),
        partial=frozenset(_partial_parameters(model, names, regions)),
        whole=reasons[0] if reasons else "",
    )


def _blocks_in(model: nn.Module, target: str, regions: Sequence[RegionPlan]) -> tuple[list[str], str]:
    """Return the outermost blocks in a unit, and why the unit is not one; no reason if it holds no region."""
    if not regions_in(target, regions):
        return [], ""
    reason = reason_whole(model, target, regions)
    if not reason:
        return [target], ""
    found: list[str] = []
    for name, _ in model.get_submodule(target).named_modules(prefix=target):
        is_inside = any(name.startswith(f"{block}.") for block in found)
        if name != target and not is_inside and regions_in(name, regions) and not reason_whole(model, name, regions):
            found.append(name)
    return found, reason


def _chains(stage: Stage, blocks: set[str]) -> Iterator[tuple[str, str, int]]:
    """Yield pairs of blocks of which the second alone takes what the first returns, and the tokens of the example."""
    nodes = [node for node in stage.graph.nodes if node.op == "call_module"]
    names = {node: call.target for node, call in zip(nodes, stage.calls, strict=True)}
    for node, target in names.items():
        hidden = hidden_node(node)
        if target not in blocks or hidden is None or list(hidden.users) != [node]:
            continue
        source = hidden
        if hidden.target is operator.getitem and isinstance(hidden.args[0], fx.Node):
            source = hidden.args[0]
            used = [user for user in source.users if user.users]
            if used != [hidden]:
                continue
        tokens = num_tokens(hidden)
        if names.get(source) in blocks and tokens is not None:
            yield names[source], target, tokens


def _partial_parameters(model: nn.Module, blocks: Sequence[str], regions: Sequence[RegionPlan]) -> Iterator[str]:
    """Yield the parameters of blocks that are used on shards of the sequence."""
    whole = [name for region in regions for name, style in region.layers() if style != "row"]
    whole += [f"{name}.weight" for region in regions for name, style in region.layers() if style == "row"]
    whole += [name for region in regions for name in region.head_parameters]
    whole += [island for block in blocks for island in islands_in(model, block, regions)]
    prefixes = tuple(f"{block}." for block in blocks)
    for name, _ in model.named_parameters():
        if name.startswith(prefixes) and not any(name == layer or name.startswith(f"{layer}.") for layer in whole):
            yield name
