"""The key of a cached profile: everything that a profile depends on, as a flat dictionary of strings.

Two models are the same if their modules, parameters, configuration and the source of their classes are. The values of
the weights are not part of the key, because they do not change the cost of a unit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagewright import structure
from stagewright.graph.compilation import backend_name
from stagewright.machine.cpu_offload import is_offloaded
from stagewright.machine.machine import installed_versions

if TYPE_CHECKING:
    from stagewright.cluster.device import Device
    from stagewright.graph.unit_graph import UnitGraph

# How units are measured: a different method gives different numbers. Changing this text invalidates cached profiles.
_METHOD = (
    "pinned to one thread a core, all freed memory kept, with what lies between units, tensors of an inference, "
    "recomputed attention, passes in sequence"
)
_LIBRARIES = ("stagewright", "torch", "transformers")


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that a profile depends on."""
    return {**installed_versions(_LIBRARIES), "torch": torch.__version__}  # torch with its build: 2.13.0+cpu


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
    compile: str = "none",
    autocast: torch.dtype | None = None,
) -> dict[str, str]:
    """Return everything that the profile depends on; `part` says which part of its layers the model holds."""
    compiled = {} if compile == "none" else {"compile": f"{compile} with {backend_name()}"}
    mixed = {} if autocast is None else {"autocast": str(autocast)}
    return {
        **compiled,
        **mixed,
        "model": name,
        "structure": structure_digest(graph.model),
        "mode": "train" if graph.model.training else "eval",
        "units": _digest([call.name for call in graph.calls]),
        "inputs": json.dumps(_describe((tuple(args), dict(kwargs)))),
        # With offloaded weights the whole model is not measured.
        "weights": "on the host" if is_offloaded(graph.model, device.torch_device()) else "on the device",
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
    """Digest a model's structure; equal in every process."""
    parts: list[Any] = [_without_addresses(repr(model))]
    for name, module in model.named_modules():
        parts.append([name, type(module).__module__, type(module).__qualname__])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parts.append([name, str(tensor.dtype), list(tensor.shape), tensor.requires_grad])
    config = getattr(model, "config", None)
    parts.append(_without_addresses(repr(config)))
    classes = {type(module) for module in model.modules()}
    parts.extend(sorted(_source(module_class) or "" for module_class in classes))
    return _digest(parts)


def class_without_source(model: nn.Module) -> str | None:
    """Name a class of the model whose source can't be read, so that its structure digest may be ambiguous."""
    classes = {type(module) for module in model.modules()}
    return min((module_class.__qualname__ for module_class in classes if _source(module_class) is None), default=None)


def _source(module_class: type) -> str | None:
    """Return the source of a class; "" if a library version identifies it, None if it can't be read."""
    if module_class.__module__.partition(".")[0] in _LIBRARIES:
        return ""
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):  # defined at a prompt
        return None


def _describe(value: Any) -> list[str]:
    leaves, spec = structure.flatten(value)
    described = [_without_addresses(str(spec))]
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
