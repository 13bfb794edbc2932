"""Expert parallelism in a forecast: all-to-alls, divided parameters, gradients that fewer replicas all-reduce."""

from __future__ import annotations

import pytest

from made_profiles import equal_units, make_costs
from stagewright.cluster.cluster import Link, Links
from stagewright.profiler.profile import Amount
from stagewright.simulator.costs.expert_traffic import ExpertTraffic
from stagewright.simulator.costs.plan_costs import PlanCosts
from stagewright.simulator.simulate import predict, step_seconds
from stagewright.spec.plan import Mesh

EXPERTS = ExpertTraffic(num_experts=4, parameter_bytes=800, row_bytes=(600, 400))


def costs_of(mesh: Mesh, links: Links | None = None, **fields: object) -> PlanCosts:
    """Two units with 1000 bytes of parameters each, 800 of them of experts."""
    profile = equal_units(2, parameter_bytes=Amount(total=1000))
    return make_costs(profile, mesh=mesh, links=links, microbatches=3, terms={"experts": [EXPERTS] * 2}, **fields)  # type: ignore[arg-type]


def test_bytes_of_all_to_alls_and_gradients() -> None:
    forecast = predict(costs_of(Mesh(data=4, expert=2)))
    uses = {use.axis: use for use in forecast.collectives}
    rows = 2 * (600 + 400) * 3  # units, layers, micro-batches
    assert uses["expert"].num_bytes == 4 * rows  # dispatch and combine, forward and backward
    assert uses["expert"].sent_bytes == 2 * rows  # half of the rows stay
    assert uses["data"].num_bytes == 2 * (200 + 400)
    assert predict(costs_of(Mesh(data=2, expert=2))).data_bytes == 2 * 200


def test_recomputation_and_inference_exchange_rows_of_each_forward() -> None:
    def sent(**fields: object) -> int:
        return next(use.num_bytes for use in predict(costs_of(Mesh(data=2, expert=2), **fields)).collectives)

    assert sent(recompute="always") == 6 * 2 * 1000 * 3
    assert sent(training=False) == 2 * 2 * 1000 * 3


def test_experts_are_divided_in_memory() -> None:
    held = [predict(costs_of(Mesh(data=4, expert=size))).workers[0].memory.parameters_bytes for size in (1, 2, 4)]
    assert held == [2000, 1200, 800]


def test_all_to_alls_take_time() -> None:
    links = Links(intra_host=Link(latency_s=0.5, bandwidth_bytes_per_s=100.0))
    free, slow = step_seconds(costs_of(Mesh(data=2, expert=2))), step_seconds(costs_of(Mesh(data=2, expert=2), links))
    layer_s = 0.5 + 2 * 0.5 + (600 + 400) / 100  # for each unit: counts, dispatch and combine of half of the rows
    inside = 2 * 3 * 2 * (layer_s + 1.5)  # units, micro-batches, forward and backward; two layers
    gradients = 2 * 0.5 + 400 / 100 + 2 * 0.5 + 8 / 100  # all-reduces of gradients and of the loss
    assert slow - free == pytest.approx(inside + gradients, rel=0.05)
