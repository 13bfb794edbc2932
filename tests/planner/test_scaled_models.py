"""A model at another size, from two measurements, has what it is measured to have there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planner.conftest import MadeSource, equal_amounts, plan_of, random_units

from made_profiles import unit
from stagewright.errors import UsageError
from stagewright.planner import scaled_models as sizing
from stagewright.planner.costs.measure import ModelCosts, measure_model
from stagewright.planner.scaled_models import scaled_models, size_limit
from stagewright.spec.plan import Mesh, ModelSpec, Plan


def test_samples_of_a_real_model(tmp_path: Path) -> None:
    plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=8)
    chosen, found = scaled_models("batch", "mlp-mnist", cache=tmp_path)(plan, 32)
    assert chosen == replace(plan, batch=32)
    real = measure_model(chosen, cache=tmp_path, repeats=1)
    assert found.profile.batch_size == real.profile.batch_size == 32
    assert equal_amounts(found.profile.units) == equal_amounts(real.profile.units)
    assert found.overheads.loss_kept_bytes == real.overheads.loss_kept_bytes


def test_what_a_model_can_be_made_to() -> None:
    plan = Plan(model=ModelSpec(name="gpt-layers:1"), batch=8)
    tokens, blocks, samples = (size_limit(what, plan) for what in ("sequence", "layers", "batch"))
    assert (tokens.size, tokens.reason) == (1024, "gpt-layers:1 takes sequences of at most 1024 tokens")
    assert (blocks.size, samples.size) == (10_000, 2**20)
    with pytest.raises(UsageError, match="at most 1024 tokens"):
        replace(plan.model, sequence_length=tokens.size + 1).load(batch=2)
    with pytest.raises(UsageError, match="from 1 to 10000"):
        replace(plan.model, name=f"gpt-layers:{blocks.size + 1}").load(batch=2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """A family of models made of numbers: blocks by its name, all of it by its tokens; and what was measured of it."""
    found = []

    def measure(plan: Plan, *, size: int, **_: object) -> ModelCosts:
        found.append((plan.model.name, size, plan.mesh.tensor))
        return family(plan).model(size, plan.mesh.tensor)

    monkeypatch.setattr(sizing, "measure_model", measure)
    return found


def family(plan: Plan) -> MadeSource:
    tokens = plan.model.sequence_length or 16
    ends = random_units(2, 0)
    one = replace(unit("block", 1.0, (1.0, 1.0)), crossing_bytes=16, output_bytes=16)
    layers = int(plan.model.name.partition(":")[2])
    blocks = [replace(one, name=f"b{at}", block=f"b{at}") for at in range(layers)]
    units = [
        replace(each, saved_bytes=replace(each.saved_bytes, total=tokens * each.saved_bytes.total))
        for each in (ends[0], *blocks, ends[1])
    ]
    return MadeSource(units=tuple(units))


BASE = replace(plan_of(batch=12, microbatches=2), model=ModelSpec(name="made:12"))


@pytest.mark.parametrize("layers", [2, 9, 40])
def test_layers(layers: int, asked: list[tuple[str, int, int]]) -> None:
    chosen, found = scaled_models("layers", "made")(BASE, layers)
    assert chosen.model.name == f"made:{layers}"
    assert chosen.batch == 12
    real = family(chosen).model(6, 1)
    assert found.profile.batch_size == 6, "a micro-batch"
    assert equal_amounts(found.profile.units) == equal_amounts(real.profile.units)
    assert found.profile.whole_forward.median_s == pytest.approx(real.profile.whole_forward.median_s)
    assert found.overheads.loss_kept_bytes == real.overheads.loss_kept_bytes
    assert asked == [("made:4", 2, 1), ("made:4", 4, 1)], "however many are asked for, few are measured"


def test_each_stage_has_a_layer(asked: list[tuple[str, int, int]]) -> None:
    sized = scaled_models("layers", "made")
    chosen, found = sized(replace(BASE, mesh=Mesh(pipeline=6), microbatches=6), 1)
    assert chosen.model.name == "made:6"
    assert len(found.profile.units) == 8
    assert asked[0][0] == "made:6"
    shared = sized(replace(BASE, mesh=Mesh(tensor=2)), 5)[1]
    assert shared.num_tensor == 2
    assert len(shared.tensor or ()) == len(shared.profile.units) == 7


@pytest.mark.parametrize("tokens", [16, 96, 1000])
def test_tokens(tokens: int, asked: list[tuple[str, int, int]]) -> None:
    plan = replace(BASE, model=ModelSpec(name="made:3"))
    chosen, found = scaled_models("sequence", "made")(plan, tokens)
    assert chosen.model.sequence_length == tokens
    real = family(chosen).model(6, 1)
    assert found.profile.batch_size == 6
    assert equal_amounts(found.profile.units) == equal_amounts(real.profile.units)
    assert len(asked) == 4, "two lengths at two sizes"


def test_a_batch_is_measured_once_for_all_strategies(asked: list[tuple[str, int, int]]) -> None:
    sized = scaled_models("batch", "made")
    for mesh, batch, largest in ((Mesh(), 7, 4), (Mesh(data=2), 7, 2), (Mesh(pipeline=2), 64, 32)):
        chosen, found = sized(replace(BASE, mesh=mesh), batch)
        assert chosen.batch == batch
        assert found.profile.batch_size == largest
        assert equal_amounts(found.profile.units) == equal_amounts(family(BASE).model(largest, 1).profile.units)
    assert sorted(asked) == [("made:12", 2, 1), ("made:12", 4, 1)]
