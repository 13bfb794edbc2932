"""Choose the units: the submodules that are placed as a whole.

    auto   whole blocks: a repeated layer list is opened, its members are units; so is what stands before and after it
    leaf   the finest cut: everything is opened that has called children and no parameters in its own code
    names  the named modules are units, their ancestors are opened, the rest follows ``auto``

Works on the tree of observed calls (who called whom, at what cost), not on how modules are nested in attributes, so
containers that are never called (``nn.ModuleList``) are looked through.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from stagewright.errors import UnknownName, UsageError
from stagewright.graph.tracing.observe import CallForm, Observation, TensorForm

__all__ = ["UnitChoice", "choose_units", "has_backward_hooks", "outermost_calls", "repeated_blocks"]

NUM_PIECES = 16  # a module is opened while it costs more than this fraction of the model
OWN_CODE = 0.8  # … and if its children account for at least this share of its cost


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """Which modules are units and which are opened."""

    units: frozenset[str]
    """Names of the modules that are placed as a whole."""
    opened: frozenset[str]
    """Names of the modules whose own code is traced; the root ``""`` is always among them."""


@dataclass(kw_only=True)
class _CallTree:
    """Costs and children of each module name, gathered over its calls."""

    observation: Observation
    modules: dict[str, nn.Module]
    kids: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    parents: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    cost: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        weigh = self.observation.macs > 0
        for call in self.observation.calls:
            self.num_calls[call.name] += 1
            self.cost[call.name] += call.macs if weigh else _num_parameters(self.modules[call.name])
            if call.parent is not None:
                parent = self.observation.calls[call.parent].name
                self.parents[call.name].add(parent)
                if call.name not in self.kids[parent]:
                    self.kids[parent].append(call.name)

    @cached_property
    def total(self) -> float:
        return max(self.cost[""], 1.0)

    def kind(self, name: str) -> type[nn.Module]:
        return type(self.modules[name])

    def typical_cost(self, name: str) -> float:
        """Median cost a call over the siblings of the same class."""
        siblings = {kid for parent in self.parents[name] for kid in self.kids[parent]} or {name}
        costs = [self.cost[one] / self.num_calls[one] for one in siblings if self.kind(one) is self.kind(name)]
        return statistics.median(costs)

    def kids_cost(self, name: str) -> float:
        """Cost of the calls made directly from ``name``."""
        calls = self.observation.calls
        if self.observation.macs == 0:
            return sum(self.cost[kid] for kid in self.kids[name])
        return sum(one.macs for one in calls if one.parent is not None and calls[one.parent].name == name)

    def below(self, name: str) -> list[str]:
        """All modules called from ``name``, at any depth."""
        found: list[str] = []
        todo = list(self.kids[name])
        while todo:
            one = todo.pop()
            if one not in found:
                found.append(one)
                todo.extend(self.kids[one])
        return found

    def holds_repeats(self, name: str) -> bool:
        """Whether a list of composite modules of one class, or a module called over and over, lies below."""
        below = self.below(name)
        for parent in [name, *below]:
            kinds = [self.kind(kid) for kid in self.kids[parent] if self.kids[kid]]
            if any(kinds.count(kind) >= 2 for kind in kinds):
                return True
        return any(
            self.num_calls[one] > self.num_calls[name] and _num_parameters(self.modules[one]) > 0 for one in below
        )

    def collected_from(self) -> set[str]:
        """Modules whose results the model collects by hooks: what calls them has to be opened."""
        calls = self.observation.calls
        left = [call.num_collected for call in calls]
        for call in calls:
            if call.parent is not None:
                left[call.parent] -= call.num_collected
        return {call.name for call, own in zip(calls, left, strict=True) if own > 0}

    def rebuilds(self, name: str) -> bool:
        """Whether a module only derives values (rotary tables, masks) that are cheaper to rebuild than to send."""
        module = self.modules[name]
        if self.cost[name] or type(module).__module__.startswith("torch.nn") or _num_parameters(module):
            return False
        call = next(one for one in self.observation.calls if one.name == name)
        inputs = [leaf for leaf in call.in_leaves if isinstance(leaf, TensorForm)]
        outputs = [leaf for leaf in call.out_leaves if isinstance(leaf, TensorForm)]
        return len(inputs) != 1 or [inputs[0].shape] != [one.shape for one in outputs]


def choose_units(
    model: nn.Module,
    observation: Observation,
    units: str | Sequence[str] = "auto",
    closed: Collection[str] = (),
) -> UnitChoice:
    """Decide for every called module whether it is opened or a unit; those in ``closed`` are never opened."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tree = _CallTree(observation=observation, modules=modules)
    named = _named_units(units, tree)
    seen_outside = named | tree.collected_from()
    ancestors = {ancestor for name in seen_outside for ancestor in _ancestors(name, tree)} - named
    fine = units == "leaf"

    def opens(name: str) -> bool:
        if name == "" or name in ancestors:
            return True
        if name in closed or name in named or has_backward_hooks(modules[name]):
            return False
        if tree.rebuilds(name):
            return True
        own_parameters = bool(modules[name]._parameters)
        if not tree.kids[name] or tree.kids_cost(name) < OWN_CODE * tree.cost[name]:
            return False
        if fine:
            return not own_parameters
        typical = tree.typical_cost(name)
        large = typical > tree.total / 2
        return (
            typical > tree.total / NUM_PIECES and (not own_parameters or large) and (large or tree.holds_repeats(name))
        )

    opened: set[str] = set()
    chosen: set[str] = set()
    todo = [""]
    while todo:
        name = todo.pop()
        if name in opened or name in chosen:
            continue
        if opens(name):
            opened.add(name)
            todo.extend(tree.kids[name])
        else:
            chosen.add(name)
    return UnitChoice(units=frozenset(chosen), opened=frozenset(opened))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its backward, which only its own call sets up."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def outermost_calls(observation: Observation, units: Collection[str]) -> list[CallForm]:
    """The calls of units that do not happen inside another unit's call, in order."""
    inside: set[int] = set()
    chosen: list[CallForm] = []
    for index, call in enumerate(observation.calls):
        if call.parent in inside:
            inside.add(index)
        elif call.name in units:
            inside.add(index)
            chosen.append(call)
    return chosen


def repeated_blocks(model: nn.Module, observation: Observation) -> frozenset[str]:
    """Names of the units of ``auto`` that repeat: composite ones of one class; without such, any with parameters."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tree = _CallTree(observation=observation, modules=modules)
    calls = outermost_calls(observation, choose_units(model, observation).units)
    composite = [call.name for call in calls if tree.kids[call.name]]
    weighty = [call.name for call in calls if _num_parameters(modules[call.name]) > 0]
    for names in (composite, weighty):
        kinds = [tree.kind(name) for name in names]
        repeated = frozenset(name for name in names if kinds.count(tree.kind(name)) >= 2)
        if repeated:
            return repeated
    return frozenset()


def _named_units(units: str | Sequence[str], tree: _CallTree) -> set[str]:
    """The names given by the user, checked."""
    if isinstance(units, str):
        if units not in ("auto", "leaf"):
            raise UnknownName("choice of units", units, ["auto", "leaf"], "or give a list of module names")
        return set()
    called = {name for name in tree.num_calls if name}
    for name in units:
        if name == "":
            raise UsageError("units=[''] names the whole model, which leaves no place to cut; name submodules instead")
        if name not in called:
            raise UnknownName("unit", name, sorted(called), "(only modules that the forward pass calls can be units)")
    return set(units)


def _ancestors(name: str, tree: _CallTree) -> set[str]:
    """Every module that calls ``name``, directly or through others."""
    found: set[str] = set()
    todo = list(tree.parents[name])
    while todo:
        parent = todo.pop()
        if parent not in found:
            found.add(parent)
            todo.extend(tree.parents[parent])
    return found


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
