"""A hollow copy of a model: the same modules with parameters that have a shape but no memory.

Each parameter is one element, expanded. So the copy can run, slowly and with meaningless values, on a worker that holds
only a part of the weights, and capture can trace it for inputs of another shape. Buffers are shared with the model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def hollow_copy(model: nn.Module) -> nn.Module:
    """Copy a model without its parameters' memory; tied parameters stay tied."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        element = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
        memo[id(parameter)] = nn.Parameter(element.expand(parameter.shape), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
