"""What this machine's torch can't run is refused before a run begins."""

from __future__ import annotations

import pytest
import torch

from stagewright.errors import UsageError
from stagewright.spec.local_check import check_torch
from stagewright.spec.plan import Mesh, ModelSpec, Plan


@pytest.mark.parametrize(("version", "is_refused"), [("2.8.0+cpu", True), ("2.9.0", False), ("2.13.0+cpu", False)])
def test_fsdp_needs_a_new_torch(version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    sharded = Plan(model=ModelSpec(name="mlp-mnist"), batch=8, mesh=Mesh(data=2), shard=True)
    check_torch(Plan(model=ModelSpec(name="mlp-mnist"), batch=8, mesh=Mesh(data=2)))
    if is_refused:
        with pytest.raises(UsageError, match=r"FSDP needs torch 2\.9 or newer, but torch 2\.8\.0"):
            check_torch(sharded)
    else:
        check_torch(sharded)
