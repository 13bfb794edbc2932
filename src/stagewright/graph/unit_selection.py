"""Choose the units: the submodules that are placed as a whole. A module that is *opened* is split into its children.

    auto   whole blocks: a repeated layer list is opened, its members are units, and so are the modules around it
    leaf   the finest granularity: opens every module that calls children and has no direct parameters
    names  the named modules are units, their ancestors are opened, the rest follows ``auto``

The choice uses the tree of observed calls with their costs, not the nesting of attributes, so containers that are never
called (``nn.ModuleList``) do not matter.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from stagewright.errors import UnknownName, UsageError
from stagewright.graph.cut import UnitCall
from stagewright.graph.tracing.observation import CallSpec, Observation, TensorSpec

NUM_PIECES = 16  # a module is opened if it costs more than 1 / NUM_PIECES of the model …
CHILDREN_SHARE = 0.8  # … and its children account for at least this share of its cost


@dataclass(frozen=True, kw_only=True)
class UnitSelection:
    """Which modules are units and which are opened."""

    units: frozenset[str]
    """Names of the modules that are placed as a whole."""
    opened: frozenset[str]
    """Names of the modules whose forward is traced; always includes the root ``""``."""


@dataclass(kw_only=True)
class _CallTree:
    """Costs and children of each module, summed over its calls."""

    observation: Observation
    modules: dict[str, nn.Module]
    children: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    parents: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    cost: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        has_macs = self.observation.macs > 0
        for call in self.observation.calls:
            self.num_calls[call.name] += 1
            self.cost[call.name] += call.macs if has_macs else _num_parameters(self.modules[call.name])
            if call.parent is not None:
                parent = self.observation.calls[call.parent].name
                self.parents[call.name].add(parent)
                if call.name not in self.children[parent]:
                    self.children[parent].append(call.name)

    @cached_property
    def total(self) -> float:
        return max(self.cost[""], 1.0)

    def kind(self, name: str) -> type[nn.Module]:
        return type(self.modules[name])

    def typical_cost(self, name: str) -> float:
        """Return the median cost per call over the siblings of the same class."""
        siblings = {child for parent in self.parents[name] for child in self.children[parent]} or {name}
        peers = [sibling for sibling in siblings if self.kind(sibling) is self.kind(name)]
        costs = [self.cost[peer] / self.num_calls[peer] for peer in peers]
        return statistics.median(costs)

    def children_cost(self, name: str) -> float:
        """Return the cost of the calls made directly by ``name``."""
        calls = self.observation.calls
        if self.observation.macs == 0:
            return sum(self.cost[child] for child in self.children[name])
        return sum(call.macs for call in calls if call.parent is not None and calls[call.parent].name == name)

    def descendants(self, name: str) -> list[str]:
        """Return all modules called from ``name``, at any depth."""
        descendants: list[str] = []
        todo = list(self.children[name])
        while todo:
            child = todo.pop()
            if child not in descendants:
                descendants.append(child)
                todo.extend(self.children[child])
        return descendants

    def holds_repeats(self, name: str) -> bool:
        """Whether ``name`` contains a list of composite modules of one class, or a module that it calls repeatedly."""
        descendants = self.descendants(name)
        for parent in [name, *descendants]:
            kinds = [self.kind(child) for child in self.children[parent] if self.children[child]]
            if any(kinds.count(kind) >= 2 for kind in kinds):
                return True
        return any(
            self.num_calls[module] > self.num_calls[name] and _num_parameters(self.modules[module]) > 0
            for module in descendants
        )

    def collected_from(self) -> set[str]:
        """Return the modules whose results the model collects by hooks; their callers must be opened."""
        calls = self.observation.calls
        direct = [call.num_collected for call in calls]
        for call in calls:
            if call.parent is not None:
                direct[call.parent] -= call.num_collected
        return {call.name for call, count in zip(calls, direct, strict=True) if count > 0}

    def rebuilds(self, name: str) -> bool:
        """Whether a module only derives values (rotary tables, masks) that are cheaper to recompute than to send."""
        module = self.modules[name]
        if self.cost[name] or type(module).__module__.startswith("torch.nn") or _num_parameters(module):
            return False
        call = next(call for call in self.observation.calls if call.name == name)
        inputs = [leaf for leaf in call.in_leaves if isinstance(leaf, TensorSpec)]
        outputs = [leaf for leaf in call.out_leaves if isinstance(leaf, TensorSpec)]
        return len(inputs) != 1 or [inputs[0].shape] != [output.shape for output in outputs]


def choose_units(
    model: nn.Module, observation: Observation, units: str | Sequence[str] = "auto", closed: Collection[str] = ()
) -> UnitSelection:
    """Decide for every called module whether it is opened or a unit; modules in ``closed`` are never opened."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tree = _CallTree(observation=observation, modules=modules)
    named = _named_units(units, tree)
    visible = named | tree.collected_from()
    ancestors = {ancestor for name in visible for ancestor in _ancestors(name, tree)} - named

    def is_opened(name: str) -> bool:
        if name == "" or name in ancestors:
            return True
        if name in closed or name in named or has_backward_hooks(modules[name]):
            return False
        if tree.rebuilds(name):
            return True
        has_parameters = bool(modules[name]._parameters)
        if not tree.children[name] or tree.children_cost(name) < CHILDREN_SHARE * tree.cost[name]:
            return False
        if units == "leaf":
            return not has_parameters
        typical = tree.typical_cost(name)
        large = typical > tree.total / 2
        return (
            typical > tree.total / NUM_PIECES and (not has_parameters or large) and (large or tree.holds_repeats(name))
        )

    opened: set[str] = set()
    chosen: set[str] = set()
    todo = [""]
    while todo:
        name = todo.pop()
        if name in opened or name in chosen:
            continue
        if is_opened(name):
            opened.add(name)
            todo.extend(tree.children[name])
        else:
            chosen.add(name)
    return UnitSelection(units=frozenset(chosen), opened=frozenset(opened))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks, which only a call of that module sets up."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def outermost_calls(observation: Observation, units: Collection[str]) -> list[CallSpec]:
    """Return the calls of units that are not inside another unit's call, in order."""
    inside: set[int] = set()
    chosen: list[CallSpec] = []
    for index, call in enumerate(observation.calls):
        if call.parent in inside:
            inside.add(index)
        elif call.name in units:
            inside.add(index)
            chosen.append(call)
    return chosen


def repeated_blocks(model: nn.Module, observation: Observation) -> frozenset[str]:
    """Name the repeated units of ``auto``: composite ones of one class, or else any with parameters."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tree = _CallTree(observation=observation, modules=modules)
    calls = outermost_calls(observation, choose_units(model, observation).units)
    composite = [call.name for call in calls if tree.children[call.name]]
    parametric = [call.name for call in calls if _num_parameters(modules[call.name]) > 0]
    for names in (composite, parametric):
        kinds = [tree.kind(name) for name in names]
        repeated = frozenset(name for name in names if kinds.count(tree.kind(name)) >= 2)
        if repeated:
            return repeated
    return frozenset()


def _named_units(units: str | Sequence[str], tree: _CallTree) -> set[str]:
    """Check the names given by the user."""
    if isinstance(units, str):
        if units not in ("auto", "leaf"):
            raise UnknownName("choice of units", units, ["auto", "leaf"], "or give a list of module names")
        return set()
    called = {name for name in tree.num_calls if name}
    for name in units:
        if name == "":
            raise UsageError("units=[''] names the whole model, which leaves nothing to cut; name submodules instead")
        if name not in called:
            raise UnknownName("unit", name, sorted(called), "(only modules that the forward pass calls can be units)")
    return set(units)


def _ancestors(name: str, tree: _CallTree) -> set[str]:
    """Return every module that calls ``name``, directly or indirectly."""
    ancestors: set[str] = set()
    todo = list(tree.parents[name])
    while todo:
        parent = todo.pop()
        if parent not in ancestors:
            ancestors.add(parent)
            todo.extend(tree.parents[parent])
    return ancestors


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def name_calls(model: nn.Module, observation: Observation, selection: UnitSelection) -> tuple[UnitCall, ...]:
    """Name every unit call and the repeated block that contains it."""
    blocks = _enclosing_blocks(observation, repeated_blocks(model, observation))
    counts: Counter[str] = Counter()
    calls: list[UnitCall] = []
    for call in outermost_calls(observation, selection.units):
        counts[call.name] += 1
        calls.append(
            UnitCall(
                index=len(calls),
                name=_numbered(call.name, counts[call.name]),
                target=call.name,
                kind=type(model.get_submodule(call.name)).__name__,
                block=blocks.get(id(call)),
            )
        )
    return tuple(calls)


def _enclosing_blocks(observation: Observation, blocks: frozenset[str]) -> dict[int, str]:
    """Map each call (by id) to the name of the repeated block call that it is or is part of."""
    counts: Counter[str] = Counter()
    block_by_index: list[str | None] = []
    block_by_call: dict[int, str] = {}
    for call in observation.calls:
        block = block_by_index[call.parent] if call.parent is not None else None
        if block is None and call.name in blocks:
            counts[call.name] += 1
            block = _numbered(call.name, counts[call.name])
        block_by_index.append(block)
        if block is not None:
            block_by_call[id(call)] = block
    return block_by_call


def _numbered(name: str, nth: int) -> str:
    return name if nth == 1 else f"{name}@{nth}"
