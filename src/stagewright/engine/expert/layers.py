"""An experts module whose experts are divided over the workers of the expert axis: dropless dispatch and combine.

    hidden states [tokens, hidden], chosen experts, routing weights: of this worker's samples, from its own router

    rows by expert ─ dispatch ─► the worker's own experts on the rows of all workers ─ combine ─► · weights, summed

The module's own forward computes the experts, on rows with one expert each and a weight of 1, so any implementation of
them works (a loop, grouped or batched matrix products). Router, shared experts and whatever else surrounds the module
run on each worker's own samples: their outputs and losses are those of a data parallel replica.

A module keeps its place (its class becomes a subclass), and its parameters keep their names:

    stacked weights [experts, …]        each worker holds a slice of the first dimension      ``ShardLayout``
    one module for each expert          its worker holds the parameters, the others none      ``OwnedLayout``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from stagewright.engine.expert.axis import ExpertAxis
from stagewright.engine.expert.dropout import DropoutDraws, run_with_baseline_dropout
from stagewright.engine.tensor.layers import LAYOUTS, ShardLayout

Routing: TypeAlias = Literal["index", "mask"]
"""How a module receives the chosen experts: [tokens, k] numbers, or a [tokens, k, experts] mask of zeros and ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPlan:
    """How one experts module is divided."""

    name: str
    num_experts: int
    stacked: bool
    """Whether weights are stacked along a first dimension of experts; otherwise each expert is a module."""
    routing: Routing
    arguments: tuple[str, ...]
    """Names of the three arguments of its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedLayout:
    """A parameter of one expert, which only the expert's worker holds; the others hold an empty tensor."""

    owner: int
    shape: torch.Size
    axis: ExpertAxis

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return what this worker holds of a full tensor."""
        return full.contiguous() if self.axis.index == self.owner else full.new_empty(0)

    def gather(self, shard: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Broadcast the full tensor from its owner; every worker of the axis must call this."""
        full = shard.contiguous() if self.axis.index == self.owner else shard.new_empty(self.shape)
        dist.broadcast(full, group=self.axis.group, group_src=self.owner)
        return full if device is None else full.to(device)


class DividedExperts(nn.Module):
    """The experts of one worker, called like the whole experts module."""

    _expert_axis: ExpertAxis
    _experts_plan: ExpertsPlan
    _dropout_draws: DropoutDraws

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        names = self._experts_plan.arguments[len(args) :]
        states, routing, weights = (*args, *(kwargs[name] for name in names))
        hidden = states.reshape(-1, states.shape[-1])
        axis, num_experts, num_slots = self._expert_axis, self._experts_plan.num_experts, weights.shape[-1]
        slots, experts = _assignments(routing, self._experts_plan)
        order = torch.argsort(experts, stable=True)
        slots = slots[order]
        counts = axis.exchange_counts(torch.bincount(experts, minlength=num_experts))
        table: list[list[list[int]]] = counts.view(axis.num_workers, axis.num_workers, -1).tolist()
        """Rows by source, worker and the worker's expert."""
        sent = [sum(of_worker) for of_worker in table[axis.index]]
        received = [sum(of_source[axis.index]) for of_source in table]
        rows = axis.dispatch(hidden[slots // num_slots], sent, received)
        rows = self._compute_rows(rows, table)
        anchor = next((parameter for parameter in self.parameters() if parameter.requires_grad), None)
        rows = axis.combine(rows, received, sent, anchor)
        rows = rows * weights.reshape(-1)[slots, None]
        filled = rows.new_zeros(len(hidden) * num_slots, hidden.shape[-1]).index_copy(0, slots, rows)
        return filled.view(len(hidden), num_slots, hidden.shape[-1]).sum(1).to(hidden.dtype).view(states.shape)

    def _compute_rows(self, rows: torch.Tensor, table: list[list[list[int]]]) -> torch.Tensor:
        """Apply this worker's experts to rows ordered by source and expert."""
        axis, plan = self._expert_axis, self._experts_plan
        num_local = plan.num_experts // axis.num_workers
        first = 0 if plan.stacked else axis.index * num_local
        if self.training and self._dropout_draws:
            return run_with_baseline_dropout(
                axis,
                rows,
                table,
                self._dropout_draws,
                lambda block, expert: self._apply_experts(block, [first + expert], [len(block)]),
            )
        counts = [count for of_source in table for count in of_source[axis.index]]
        return self._apply_experts(rows, [first + index % num_local for index in range(len(counts))], counts)

    def _apply_experts(self, rows: torch.Tensor, experts: list[int], counts: list[int]) -> torch.Tensor:
        """Run the module's own forward on rows, ``counts[i]`` of which are for ``experts[i]``."""
        if not len(rows):
            return rows  # still connected to the dispatch in backward
        device = rows.device
        index = torch.repeat_interleave(torch.tensor(experts, device=device), torch.tensor(counts, device=device))
        output: torch.Tensor = super().forward(
            rows, make_routing(index, self._experts_plan), rows.new_ones(len(rows), 1)
        )
        return output


def _assignments(routing: torch.Tensor, plan: ExpertsPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot (token · k + choice) and the expert of each assignment; a slot may have none."""
    if plan.routing == "mask":
        token, choice, expert = routing.nonzero(as_tuple=True)
        return token * routing.shape[1] + choice, expert
    expert = routing.reshape(-1).long()
    slots = torch.nonzero((expert >= 0) & (expert < plan.num_experts)).squeeze(1)
    return slots, expert[slots]


def count_assignments(routing: torch.Tensor, plan: ExpertsPlan) -> int:
    """Return how many rows go to an expert."""
    return len(_assignments(routing, plan)[0])


def make_routing(index: torch.Tensor, plan: ExpertsPlan) -> torch.Tensor:
    """Return the routing that sends each row to one expert, in the form that the module takes."""
    return index[:, None] if plan.routing == "index" else functional.one_hot(index, plan.num_experts)[:, None]


_classes: dict[type, type] = {}


def divide_experts(module: nn.Module, plan: ExpertsPlan, axis: ExpertAxis, draws: DropoutDraws) -> None:
    """Keep this worker's experts of a module, in place; parameters remain the same objects."""
    if plan.stacked:
        layouts: dict[str, Any] = {
            name: ShardLayout(dim=0, sections=(1,), axis=axis) for name, _ in module.named_parameters(recurse=False)
        }
        _shard(module, layouts)
        module.num_experts = plan.num_experts // axis.num_workers  # type: ignore[assignment]
    else:
        num_local = plan.num_experts // axis.num_workers
        for index in range(plan.num_experts):
            for part in module[f"expert_{index}"].modules():  # type: ignore[index]
                held = part.named_parameters(recurse=False)
                _shard(
                    part,
                    {name: OwnedLayout(owner=index // num_local, shape=value.shape, axis=axis) for name, value in held},
                )
    kind = type(module)
    if kind not in _classes:
        _classes[kind] = type(f"Divided{kind.__name__}", (DividedExperts, kind), {})
    module.__class__ = _classes[kind]
    module._expert_axis, module._experts_plan, module._dropout_draws = axis, plan, draws  # type: ignore[assignment]


def _shard(module: nn.Module, layouts: dict[str, Any]) -> None:
    for name, layout in layouts.items():
        parameter = module.get_parameter(name)
        parameter.grad = None
        parameter.data = layout.shard(parameter.data).clone()  # a slice would keep the whole storage alive
    setattr(module, LAYOUTS, layouts)
