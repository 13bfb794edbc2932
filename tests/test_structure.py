"""Flatten values of any class and rebuild them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from stagewright import structure


@dataclass(frozen=True, slots=True)
class Pair:
    first: Any
    second: Any


def test_nested_objects_are_rebuilt() -> None:
    value = {"a": [Pair(torch.ones(2), Pair(1, (torch.zeros(1),)))], "b": None}
    leaves, spec = structure.flatten(value)
    assert [type(leaf).__name__ for leaf in leaves] == ["Tensor", "int", "Tensor", "NoneType"]
    assert spec.paths() == ["['a'][0].first", "['a'][0].second.first", "['a'][0].second.second[0]", "['b']"]
    rebuilt = spec.unflatten(leaves)
    assert rebuilt["a"][0].second == value["a"][0].second
    assert structure.flatten(rebuilt)[1] == spec


def test_nothing_is_kept_alive() -> None:
    """Saved activations, and the gradient accumulators of parameters, are freed at once, without a collection."""
    gc.disable()
    try:
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        value = ({"a": Pair(tensor, 1)},)
        structure.flatten(value)
        del tensor, value
        assert alive() is None
    finally:
        gc.enable()


def test_changes_of_objects_are_found() -> None:
    @dataclass
    class Cache:
        values: Any = None

    cache = Cache()
    leaves, spec = structure.flatten((cache, [1]))
    assert structure.find_change((cache, [1]), leaves, spec) is None
    cache.values = torch.ones(1)
    assert structure.find_change((cache, [1]), leaves, spec) == "[0]"
