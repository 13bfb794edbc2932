"""Plans that offload activations of units: every strategy and schedule passes the parity check with less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.jobs.test_compare import on
from tests.engine.support.odd_models import UNUSUAL_PLANS

from stagewright.engine.jobs.compare import run_plan
from stagewright.engine.parallel.model import capture_for
from stagewright.errors import UsageError
from stagewright.spec.activation_checkpointing import offload_windows
from stagewright.spec.plan import ModelSpec
from stagewright.spec.plan_rules import check_plan

UNITS = ("vit.layers.0", "vit.layers.2")
CUTS = ("vit.layers.0", "vit.layers.1", "vit.layers.2")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("serial", {"microbatches": 2}),
        ("data=2", {"shard": True, "microbatches": 2}),
        ("pipeline=2", {"microbatches": 4, "offload": "always"}),
        ("serial", {"recompute": ("vit.layers.1", "vit.layers.3:attention"), "offload": "always"}),
        pytest.param("serial", {"recompute": "attention", "offload": "always"}, marks=pytest.mark.slow),
        pytest.param("serial", {"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param("data=2", {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("data=2", {"zero": 2, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("tensor=2", {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2", {"shard": True, "microbatches": 3}, marks=pytest.mark.slow),
        pytest.param(
            "data=2,pipeline=2", {"shard": True, "fsdp_gather": "microbatch", "microbatches": 3}, marks=pytest.mark.slow
        ),
        *(
            pytest.param("pipeline=2", {"schedule": schedule, "microbatches": 4, "cuts": CUTS}, marks=pytest.mark.slow)
            for schedule in ("gpipe", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
        ),
    ],
    ids=str,
)
def test_parity_with_baseline(mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("schedule") == "gpipe":
        options = {name: value for name, value in options.items() if name != "cuts"}
    row = run_plan(on(mesh, **{"offload": UNITS, **options}), tmp_path)
    assert row.equal, row.parity


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), UNUSUAL_PLANS)
def test_unusual_models(name: str, mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = ModelSpec(name=f"tests.engine.support.odd_models:{name}")
    units = tuple(call.name for call in capture_for(on(mesh, model=model, **options), model.load()).calls)
    row = run_plan(on(mesh, model=model, offload=units, **options), tmp_path)
    assert row.equal, row.parity


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute": ("vit.layers.0",)}, ["'vit.layers.0'", "recompute and in offload"]),
        ({"recompute": "always"}, ["recompute = 'always'", "name the units to recompute"]),
        ({"training": False}, ["training = false", "inference saves no activations"]),
        ({"compile": "units"}, ['compile = "units"', "leave out one"]),
        ({"offload": ("a", "a")}, ["'a' twice"]),
        ({"offload": "sometimes"}, ["sometimes", "always"]),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        check_plan(on("serial", **{"offload": UNITS, **options}))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_an_unknown_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vit\.layer\.0.*vit\.layers\.0"):
        run_plan(on("serial", offload=("vit.layer.0",)), tmp_path)


def test_windows_of_copies() -> None:
    """Few copies are spread over the pass; many have the time of one unit each, and the last two none."""
    assert offload_windows([0], 6) == [(5, 5)]
    assert offload_windows([0, 1], 6) == [(3, 3), (5, 5)]
    assert offload_windows([0, 1, 2, 3], 4) == [(2, 2), (3, 2), (4, 3), (5, 3)]


def test_less_memory(tmp_path: Path) -> None:
    """Two of four blocks leave the device; the fetched one and the one before it are back in backward."""
    rows = [run_plan(on("serial", offload=offload), tmp_path) for offload in ("none", UNITS, "always")]
    none, units, always = (row.memory[0].activations for row in rows)
    assert always < units < none
