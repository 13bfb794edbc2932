"""Plans for several GPUs on one: every strategy and schedule over NCCL, equal to serial. Skipped without a GPU."""

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
def test_plans_for_several_gpus_are_equal_to_serial(about: dict[str, Any]) -> None:
    found = shared_gpu.prove(about, "cuda:0")
    assert found.get("equal"), found


def test_the_proof_itself_runs_on_a_core() -> None:
    found = shared_gpu.prove({"model": "digits-vit", "batch": 8, "mesh": "pipeline=2", "microbatches": 4}, "cpu:0")
    assert found["equal"], found
