from __future__ import annotations

import torch
from torch import nn

from stagewright.profiler.storage import copy_with_tensors, model_storages, storages_of, tensor_bytes, tensors_in


def test_views_share_a_storage() -> None:
    base = torch.zeros(4, 8)
    found, _ = storages_of([base, base[:1], base.t()])
    assert list(found.values()) == [128]


def test_storages_of_a_model_are_left_out() -> None:
    model = nn.Linear(3, 2)
    found, _ = storages_of([model.weight.t(), torch.zeros(2)], model_storages(model))
    assert list(found.values()) == [8]


def test_expanded_tensor_counts_its_storage() -> None:
    assert tensor_bytes([torch.zeros(1, 8).expand(100, 8)]) == 32
    assert tensor_bytes([torch.zeros(100, 8)[:2]]) == 64
    same = torch.zeros(2)
    assert tensor_bytes([same, same]) == 8


def test_tensors_are_replaced_in_order() -> None:
    value = (torch.zeros(1), {"mask": None, "pair": [torch.ones(1), 3]})
    assert [float(tensor) for tensor in tensors_in(value)] == [0.0, 1.0]
    first, rest = copy_with_tensors(value, [torch.full((1,), 5.0), torch.full((1,), 6.0)])
    assert (float(first), rest["mask"], float(rest["pair"][0]), rest["pair"][1]) == (5.0, None, 6.0, 3)
