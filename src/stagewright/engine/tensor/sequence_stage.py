"""Divide the sequence between the units of a stage, for blocks that are captured as several units.

    embed ─ divide ─┬─► norm ─► attention ─► + ─┬─► norm ─ join ─► router, experts ─ divide ─► + ─► …
                    └───────────────────────►   └───────────────────────────────────────────►
                      shard of the sequence                        whole sequence

A value between units is divided or whole. Parts (norms, attention, dropout) take and return shards, and element-wise
operations on shards return shards. Everything else, such as a mixture of experts, is an island: it takes whole values
and computes them on every worker, as without sequence parallelism. Backward of ``join`` keeps this worker's tokens of a
gradient, that of ``divide`` gathers them; so the gradients of an island are whole and need no all-reduce.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set

import torch
from torch import fx

from stagewright.engine.tensor.axis import SEQUENCE_DIM, TensorAxis
from stagewright.engine.tensor.sequence import sizes_of_shards
from stagewright.graph.stage import Stage

_ELEMENTWISE = ("aten::to", "aten::contiguous", "aten::detach")
"""Operations that treat each element by itself, beside those that torch tags as such."""


def divide_stage(stage: Stage, parts: Mapping[str, int], axis: TensorAxis) -> None:
    """Let a stage pass shards between its parts; ``parts``: the tokens of the example, by unit."""
    divided = find_divided(stage.graph, parts.keys())
    if not divided:
        return
    tokens = {node: num_tokens(node) for node in stage.graph.nodes}
    for target in parts.keys() & {str(node.target) for node in divided}:
        _check_length(divided, tokens, target, parts[target], axis)
    other: dict[fx.Node, fx.Node] = {}

    def convert(value: fx.Node) -> fx.Node:
        """Return the whole of a divided value, or the shard of a whole one."""
        if value not in other:
            sizes = sizes_of_shards(tokens[value] or 0, axis.num_workers)
            run = axis.join_sequence if value in divided else axis.divide_sequence
            with stage.graph.inserting_after(_last_before(value)):
                other[value] = stage.graph.call_function(_named(run, sizes), (value,))
            other[value].meta = dict(value.meta)
        return other[value]

    for node in list(stage.graph.nodes):
        inputs = divided_inputs(node, divided, parts.keys())
        for value in node.all_input_nodes:
            if (value in inputs) != (value in divided):
                node.replace_input_with(value, convert(value))
    stage.write_forward()


def find_divided(graph: fx.Graph, parts: Set[str]) -> dict[fx.Node, None]:
    """Return the values of a stage that are shards: those of its parts, and element-wise results of them."""
    divided: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            is_divided = str(node.target) in parts
        elif node.target is operator.getitem:
            is_divided = node.args[0] in divided
        else:
            is_divided = any(value in divided for value in node.all_input_nodes) and _is_elementwise(node)
        if is_divided:
            divided[node] = None
    return divided


def divided_inputs(node: fx.Node, divided: Mapping[fx.Node, None], parts: Set[str]) -> list[fx.Node]:
    """Return the inputs of which a node takes shards."""
    if node not in divided:
        return []
    if str(node.target) in parts and node.op == "call_module":
        hidden = hidden_node(node)
        return [] if hidden is None else [hidden]
    return [
        value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor) or value in divided
    ]


def changed_in_place(graph: fx.Graph, divided: Mapping[fx.Node, None]) -> fx.Node | None:
    """Return a divided value of which whole and divided uses would differ, because an operation changes it in place."""
    for node in graph.nodes:
        for source in node.all_input_nodes if node.meta.get("mutates") else ():
            value: fx.Node = source
            while value not in divided and value.op == "call_function" and value.all_input_nodes:
                value = value.all_input_nodes[0]
            if value in divided and any(user in divided for user in value.users):
                return value
    return None


def num_tokens(node: fx.Node) -> int | None:
    """Return the tokens of hidden states [samples, tokens, features]; None for other values."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 3 or not value.is_floating_point():
        return None
    tokens = value.shape[SEQUENCE_DIM]
    return tokens if type(tokens) is int else None  # the same at every batch size


def hidden_node(node: fx.Node) -> fx.Node | None:
    """Return the node of a unit's hidden states, as ``find_hidden`` finds them among its arguments."""
    named = node.kwargs.get("hidden_states")
    if isinstance(named, fx.Node):
        return named
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return argument
    return None


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether an operation treats each token by itself, and each of its tensors has all tokens."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.meta.get("mutates"):
        return False
    schema, tags = node.target._schema, node.target.tags
    is_named = torch.Tag.pointwise in tags or schema.name in _ELEMENTWISE
    if not is_named or schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
        return False
    tokens = num_tokens(node)
    tensors = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
    return tokens is not None and all(num_tokens(value) == tokens for value in tensors)


def _check_length(
    divided: Mapping[fx.Node, None], tokens: Mapping[fx.Node, int | None], target: str, known: int, axis: TensorAxis
) -> None:
    """Raise if a stage for another length has sequences that can't be divided as the example's are."""
    node = next(node for node in divided if str(node.target) == target)
    hidden = hidden_node(node)
    length = tokens[hidden] if hidden is not None else None
    sizes_of_shards(known if length is None else length, axis.num_workers, known)


def _last_before(value: fx.Node) -> fx.Node:
    """Return the node after which a conversion of a value goes: placeholders come first."""
    while value.op == "placeholder" and value.next.op == "placeholder":
        value = value.next
    return value


def _named(run: Callable[..., torch.Tensor], sizes: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function for generated code, which takes no methods."""

    def convert(value: torch.Tensor) -> torch.Tensor:
        return run(value, sizes)

    convert.__name__ = f"stagewright_{run.__name__}"
    return convert
