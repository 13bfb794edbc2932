"""Forecasts from formulas, for ``sw.forecast(..., analytic=True)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagewright.analytic.forecast import AnalyticForecast, forecast_layout, forecast_plan
from stagewright.analytic.hardware.devices import efficient_device
from stagewright.analytic.layout import Layout
from stagewright.analytic.models import load_shape
from stagewright.analytic.shape import TransformerShape
from stagewright.api.inputs import check_names, load_cluster, load_plan
from stagewright.cluster.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.spec.plan import AXES, Plan


def forecast_analytic(
    plan: Plan | Layout | str | Path,
    cluster: Cluster | str | Path | None,
    model: TransformerShape | Mapping[str, Any] | str | Path | None = None,
    sequence_length: int | None = None,
    innermost: str = "pipeline",
    efficiency: float | None = None,
) -> AnalyticForecast:
    """Forecast a step from formulas; nothing is built or measured.

    Args:
        plan: A plan, the path of its file, a layout, or its text such as ``"tp=8,pp=8,mbs=1,m=64,sp"``.
        cluster: A cluster, the path of its file, or a name such as ``32x8xa100``.
        model: A configuration, a folder with one, or a name such as ``gpt3-175b``; None: the plan's.
        sequence_length: Tokens of a sample; None: the plan's, or the model's longest.
        innermost: For a plan, the axis with neighboring ranks: pipeline (the engine's) or tensor.
        efficiency: Share of the peak that large matrix products reach; None: the device's.
    """
    if cluster is None:
        raise UsageError("an analytic forecast needs the hardware: give a cluster, like 8xh100 or a cluster file")
    where = load_cluster(cluster)
    assert where is not None
    check_names("axis", [innermost], AXES)
    layout = _layout(plan)
    device = efficient_device(where, efficiency)
    if isinstance(layout, Plan):
        name = layout.model.name if model is None else model
        shape = load_shape(name, sequence_length or layout.model.sequence_length)
        return forecast_plan(layout, shape, where, innermost=innermost, device=device)
    if innermost != "pipeline":
        raise UsageError(
            f"innermost = {innermost} belongs to a plan; a layout states the order of its ranks: order=tp-cp-dp-pp, "
            "innermost first"
        )
    if model is None:
        raise UsageError(
            "a layout says nothing of the model: give model, like gpt3-175b or a folder with a config.json"
        )
    return forecast_layout(load_shape(model, sequence_length), layout, where, device)


def _layout(plan: Plan | Layout | str | Path) -> Plan | Layout:
    if isinstance(plan, Plan | Layout):
        return plan
    if isinstance(plan, str) and not plan.endswith(".toml") and not Path(plan).exists():
        return Layout.parse(plan)
    return load_plan(plan)
