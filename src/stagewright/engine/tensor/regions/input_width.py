"""Whether an attention takes the total width of its heads from the shape of its input.

    batch, length, width = hidden_states.shape        # the width of the whole model,
    output = output.view(batch, length, width)        # but one worker has only its own heads

Read from the source of ``forward``; a class without source is assumed not to.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection

from torch import nn

_LAST = (2, -1)
"""Indices of the features of an input of three dimensions."""


def read_of_input_width(owner: nn.Module, layers: Collection[str]) -> str:
    """Return the expression that reads the width of an input of ``layers`` in the owner's forward, or ""."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(owner).forward)))
    except (OSError, TypeError, SyntaxError):
        return ""
    inputs = {
        argument.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in layers
        for argument in call.args
        if isinstance(argument, ast.Name)
    }
    parameters = {argument.arg for argument in ast.walk(tree) if isinstance(argument, ast.arg)}
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if _reads_width(node, loaded) and _shape_owner(node) in inputs & parameters:
            return ast.unparse(node)
    return ""


def _reads_width(node: ast.AST, loaded: Collection[str]) -> bool:
    """Whether a node is ``x.shape[2]``, ``x.size(-1)`` or ``a, b, width = x.shape`` with a width that is used."""
    if isinstance(node, ast.Subscript):
        return _is_last(node.slice)
    if isinstance(node, ast.Call):
        return len(node.args) == 1 and _is_last(node.args[0])
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        names = node.targets[0].elts
        return len(names) == 3 and isinstance(names[2], ast.Name) and names[2].id in loaded
    return False


def _is_last(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.UnaryOp)) and ast.unparse(node) in map(str, _LAST)


def _shape_owner(node: ast.AST) -> str:
    """Return the name of the variable whose shape a node reads, or ""."""
    value: ast.AST = node.value if isinstance(node, (ast.Subscript, ast.Assign)) else node
    if isinstance(value, ast.Call):
        value = value.func
    if not isinstance(value, ast.Attribute) or value.attr not in ("shape", "size"):
        return ""
    return value.value.id if isinstance(value.value, ast.Name) else ""
