"""What a profile depends on, as a flat dictionary of text: the key that a cached profile is stored with.

Two models are the same when their modules, parameters, configuration and the source of their own classes are.
The weights' values are not part of it: they do not change what a unit costs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.machine import cpu_offload as hosted

if TYPE_CHECKING:
    from stagewright.cluster.device import Device
    from stagewright.graph.unit_graph import UnitGraph

__all__ = ["library_versions", "profile_key", "structure_digest"]

# How units are measured: another way gives other numbers.
_METHOD = "pinned to one thread a core, all freed memory kept, with what lies between units, tensors of an inference"
_LIBRARIES = ("stagewright", "torch", "transformers")


def library_versions() -> dict[str, str]:
    """The versions of the libraries that a profile depends on; those that are not installed are left out."""
    versions = {}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # tells builds apart: 2.13.0+cpu
    return versions


def profile_key(
    graph: UnitGraph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    device: Device,
    repeats: int,
    training: bool,
    part: str = "whole layers",
) -> dict[str, str]:
    """Everything that the profile of this graph depends on, by name; `part`: what of its layers the model holds."""
    return {
        "model": name,
        "structure": structure_digest(graph.model),
        "mode": "train" if graph.model.training else "eval",
        "units": _digest([call.name for call in graph.calls]),
        "inputs": json.dumps(_describe((tuple(args), dict(kwargs)))),
        # Where they stay on the host, the whole model is not measured.
        "weights": "on the host" if hosted.is_hosted(graph.model, device.torch_device()) else "on the device",
        "device": device.kind,
        "threads": str(device.num_threads),
        "hardware": device.hardware_name(),
        "training": str(training),
        "part": part,
        "repeats": str(repeats),
        "method": _METHOD,
        **{f"{library} version": version for library, version in library_versions().items()},
    }


def structure_digest(model: nn.Module) -> str:
    """A digest of what a model is made of, equal in every process."""
    parts: list[Any] = [_without_addresses(repr(model))]
    for name, module in model.named_modules():
        parts.append([name, type(module).__module__, type(module).__qualname__])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parts.append([name, str(tensor.dtype), list(tensor.shape), tensor.requires_grad])
    config = getattr(model, "config", None)
    parts.append(_without_addresses(repr(config)))
    classes = {type(module) for module in model.modules()}
    parts.extend(sorted(_source(one) for one in classes))
    return _digest(parts)


def _source(module_class: type) -> str:
    """The source of a class that no library's version stands for."""
    if module_class.__module__.partition(".")[0] in _LIBRARIES:
        return ""
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):  # typed in at a prompt
        return ""


def _describe(value: Any) -> list[str]:
    leaves, structure = pytree.tree_flatten(value)
    described = [_without_addresses(str(structure))]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            described.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        else:
            described.append(_without_addresses(repr(leaf)))
    return described


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
