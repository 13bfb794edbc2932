"""The private names of torch by which hooks of saved tensors are taken off and put back."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from stagewright.machine.saved_tensor_hooks import innermost_hooks, remove_innermost, restore, without_innermost


def test_hooks_around_the_innermost() -> None:
    seen: dict[str, int] = {"outer": 0, "inner": 0}

    def counting(name: str) -> saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[name] += 1
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    weight = torch.ones(3, requires_grad=True)
    assert innermost_hooks() is None
    with counting("outer"), counting("inner"):
        weight.exp()
        assert seen == {"outer": 0, "inner": 1}
        with without_innermost():
            weight.exp()
        assert seen == {"outer": 1, "inner": 1}
        removed = remove_innermost()
        result = weight.exp()
        restore(removed)
        weight.exp()
    assert seen == {"outer": 2, "inner": 2}
    assert innermost_hooks() is None
    result.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3).exp())  # type: ignore[arg-type]
