"""Every optimizer of the table can be planned, made and counted; the default is AdamW everywhere."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from stagewright.api.fit import fit
from stagewright.api.plan import plan as find_plan
from stagewright.engine.parallel.optimizer import make_optimizer
from stagewright.simulator.memory import num_optimizer_states
from stagewright.spec.optimizers import OPTIMIZERS
from stagewright.spec.plan import OptimizerSpec, Plan
from stagewright.spec.plan_file import plan_from_table


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_number_of_states_is_what_torch_allocates(name: str, momentum: float) -> None:
    if momentum and not OPTIMIZERS[name].has_momentum:
        pytest.skip("has none")
    table = {"batch": 2, "model": {"name": "mlp-mnist"}, "optimizer": {"name": name, "momentum": momentum}}
    plan = plan_from_table(table)
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = make_optimizer(plan.optimizer, [parameter])
    parameter.grad = torch.ones(3, 5)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if getattr(value, "shape", None) == (3, 5)]
    assert len(states) == num_optimizer_states(plan)
    assert not torch.equal(parameter, torch.ones(3, 5))


def test_the_default_is_the_same_everywhere() -> None:
    assert Plan.of("mlp-mnist", 2).optimizer == OptimizerSpec(name="adamw", learning_rate=1e-3)
    for verb in (fit, find_plan):
        assert inspect.signature(verb).parameters["optimizer"].default == "adamw"
