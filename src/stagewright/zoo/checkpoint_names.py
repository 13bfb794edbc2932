"""Where the tensors of a module are in the files of a checkpoint, whose names and shapes may be older than its code.

transformers renames tensors as it loads them, and joins those of experts:

    experts.0.w1.weight  experts.0.w3.weight  experts.1.w1.weight  …  ─►  experts.gate_up_proj
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from stagewright.files.stored_tensor import StoredExperts, StoredTensor

Shape: TypeAlias = tuple[int, ...]
Found: TypeAlias = Mapping[str, tuple[Path, Shape]]
"""The file and the shape of each tensor, by its name in the files."""
Located: TypeAlias = dict[str, tuple[StoredTensor | StoredExperts, Shape]]
"""Where each tensor is stored, and its shape, by its name in the module."""


@dataclass(frozen=True, slots=True)
class _Experts:
    """The stored tensors that one of the module joins."""

    patterns: tuple[str, ...]
    """Names of the tensors of an expert, with * for its number, by position."""
    keys: dict[int, dict[int, str]] = field(default_factory=dict)
    """Names in the files, by expert and position."""


def locate_tensors(module: nn.Module, found: Found) -> Located | None:
    """Return where the module's tensors are stored; None if transformers would compute some of them otherwise."""
    sources = _sort(module, found)
    if sources is None:
        return None
    plain, joined_experts = sources
    located: Located = {name: (StoredTensor(found[key][0], key), found[key][1]) for name, key in plain.items()}
    for target, experts in joined_experts.items():
        joined = _join(experts.keys, found)
        if joined is not None:
            located[target] = joined
    return located


def missing_experts(module: nn.Module, found: Found) -> list[str]:
    """Return the names that the missing tensors of experts would have in the files."""
    sources = _sort(module, found)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict(keep_vars=True).items()}
    missing = []
    for target, experts in (sources[1] if sources is not None else {}).items():
        count = max(shapes.get(target, (0,))[0], max(experts.keys) + 1)
        for position, pattern in enumerate(experts.patterns):
            present = {number: row[position] for number, row in experts.keys.items() if position in row}
            if not present:
                missing.append(pattern)
                continue
            known, example = next(iter(present.items()))
            head, _, tail = example.rpartition(f".{known}.")
            missing += [f"{head}.{number}.{tail}" for number in range(count) if number not in present]
    return sorted(missing)


def _sort(module: nn.Module, found: Found) -> tuple[dict[str, str], dict[str, _Experts]] | None:
    """Return the stored name of each plain tensor, and those of experts; None where another conversion is needed."""
    plain: dict[str, str] = {}
    experts: dict[str, _Experts] = {}
    renamings, converters = _transforms(module)
    for key in found:
        name = key
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is None:
                continue
            number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
            if not _joins_experts(converter) or number is None:
                return None
            position = list(converter.source_patterns).index(pattern)
            names = tuple(name.replace(number[0], other) for other in converter.source_patterns)
            row = experts.setdefault(target, _Experts(names)).keys.setdefault(int(number[1]), {})
            row[position] = key
            break
        else:
            plain[name] = key
    return plain, experts


def _join(numbered: Mapping[int, Mapping[int, str]], found: Found) -> tuple[StoredExperts, Shape] | None:
    """Join the tensors of all experts; None if one is missing, or their shapes differ."""
    rows = [[numbered[number][position] for position in sorted(numbered[number])] for number in sorted(numbered)]
    shapes = {tuple(found[key][1] for key in row) for row in rows}
    if sorted(numbered) != list(range(len(numbered))) or len(shapes) != 1:
        return None
    (parts,) = shapes
    if len({part[1:] for part in parts}) != 1:
        return None
    stored = StoredExperts(tuple(tuple(StoredTensor(found[key][0], key) for key in row) for row in rows))
    return stored, (len(rows), sum(part[0] for part in parts), *parts[0][1:])


def _transforms(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return what transformers renames, and what it converts, as it loads such a module."""
    if not hasattr(module, "config"):
        return [], []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # a version that loads tensors as they are stored
        return [], []
    if not isinstance(module, PreTrainedModel):
        return [], []
    transforms = get_model_conversion_mapping(module)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return [transform for transform in transforms if transform not in converters], converters


def _joins_experts(converter: Any) -> bool:
    """Whether a conversion stacks the tensors of experts, joined by rows if each has several."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    known = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    return steps in known and len(converter.target_patterns) == 1
