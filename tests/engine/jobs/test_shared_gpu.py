"""Plans for several GPUs on one GPU: every strategy and schedule over NCCL passes the parity check; needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import shared_gpu


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("about", shared_gpu.PLANS, ids=lambda about: " ".join(map(str, about.values())))
def test_parity_of_plans_for_several_gpus(about: dict[str, Any]) -> None:
    result = shared_gpu.check_plan(about, "cuda:0")
    assert result.get("equal"), result


def test_parity_check_runs_on_a_cpu() -> None:
    result = shared_gpu.check_plan(
        {"model": "digits-vit", "batch": 8, "mesh": "pipeline=2", "microbatches": 4}, "cpu:0"
    )
    assert result["equal"], result
