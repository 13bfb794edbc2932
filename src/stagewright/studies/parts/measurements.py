"""Measurements that several studies share: this machine's calibration, a model's costs, and forecasts from both.

calibration ─┐
model costs ─┴─► prepare_forecast(plan) ─► forecast, speed-up losses
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stagewright.spec.plan import Plan
from stagewright.studies.framework.phrases import percent
from stagewright.studies.framework.study import Part, PartContext, Results

if TYPE_CHECKING:  # these import torch, which a study needs only when it runs
    from stagewright.planner.costs.measure import ModelCosts
    from stagewright.planner.forecast import PreparedPlan


NOISY = 0.15
"""Variation between rounds of a calibration beyond which its machine counts as busy."""


def calibration(devices: Sequence[str]) -> Part:
    """Build the part `calibration`: measure what forecasts for such devices need of this machine."""
    return Part(
        name="calibration",
        about="measure this machine's links, collectives and engine overheads",
        run=partial(_calibrate, tuple(devices)),
    )


def _calibrate(devices: tuple[str, ...], context: PartContext) -> dict[str, Any]:
    from stagewright.machine.machine import default_devices
    from stagewright.planner.calibration.calibrate import calibrate, load_calibration

    def kind(device: str) -> str:
        return device.partition(":")[0]

    if kind(default_devices(2, share=True)[0]) == kind(devices[0]):
        # The study's runs share the machine's present load with the calibration, whatever that is.
        data = load_calibration(fresh=context.fresh, if_slower=True, progress=context.note).to_dict()
    else:  # a single GPU has no link to measure: its forecasts assume free communication
        data = calibrate(devices[:1]).to_dict()
    return {**data, **{name: finite(data[name]) for name in ("link", "collective")}}


_OTHER_LOAD = "other-load"


def with_other_load(results: Results, load: float | None) -> Results:
    """Add the share of the cores' time that other programs took, for `is_busy` and `noise_margin`."""
    return results if load is None else replace(results, data={**results.data, _OTHER_LOAD: {"share": load}})


def _noise(results: Mapping[str, Any]) -> float:
    """How much the machine disturbs measurements: variation of its calibration, or the load of other programs.

    Programs that take a share s of a core make a run on it 1 ÷ (1 − s) times as long, and spare another run.
    """
    varied = (results.get("calibration") or {}).get("noise") or 0.0
    share = min(0.95, float((results.get(_OTHER_LOAD) or {}).get("share") or 0.0))
    return max(float(varied), share / (1 - share))


def is_busy(results: Mapping[str, Any]) -> bool:
    """Whether the machine was busy with other programs, by its calibration or during the study."""
    return _noise(results) > NOISY


def why_busy(results: Mapping[str, Any]) -> str:
    """What shows that the machine was busy, as a clause; "" if it was not."""
    if not is_busy(results):
        return ""
    share = float((results.get(_OTHER_LOAD) or {}).get("share") or 0.0)
    if share / (1 - min(0.95, share)) > NOISY:
        return f"other programs took {percent(share)} of the cores' time"
    return f"repeated measurements of this machine varied by {percent(_noise(results))}"


def noise_margin(results: Mapping[str, Any]) -> float:
    """Relative difference between two single runs up to which they can't be told apart: more on a busy machine."""
    return max(0.05, _noise(results))


def calibration_note(results: Mapping[str, Any]) -> str:
    """Say when the calibration behind the forecasts was measured and how much its rounds varied; "" if unknown."""
    saved = results.get("calibration") or {}
    if not saved.get("measured_at"):
        return ""
    noise = saved.get("noise") or 0.0
    text = f" Forecasts use a calibration of this machine of {str(saved['measured_at'])[:16].replace('T', ' ')}"
    text += f", whose rounds varied by {percent(noise)}" if noise else ""
    return text + (", so they are rough." if noise > NOISY else ".")


def finite(content: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None, in nested dicts and lists."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def measure_costs(plan: Plan, *, repeats: int) -> dict[str, Any]:
    """Measure a plan's model; return its costs as JSON holds them."""
    from stagewright.planner.costs.measure import measure_model

    costs = measure_model(plan, repeats=repeats, cache=False)
    return {
        "profile": costs.profile.to_dict(),
        "terms": costs.overheads.to_dict(),
        "num_tensor": costs.num_tensor,
        "tensor": None
        if costs.tensor is None
        else [[list(unit.forward_bytes), list(unit.backward_bytes)] for unit in costs.tensor],
        "whole": None if costs.whole is None else costs.whole.to_dict(),
    }


def load_model_costs(data: Mapping[str, Any]) -> ModelCosts:
    """Read what `measure_costs` returned."""
    from stagewright.planner.costs.measure import ModelCosts
    from stagewright.profiler.profile import Profile
    from stagewright.simulator.costs.overheads import ModelOverheads
    from stagewright.simulator.costs.tensor_traffic import TensorTraffic

    tensor = data["tensor"]
    return ModelCosts(
        profile=Profile.from_dict(data["profile"]),
        overheads=ModelOverheads.from_dict(data["terms"]),
        num_tensor=data["num_tensor"],
        tensor=None
        if tensor is None
        else tuple(
            TensorTraffic(forward_bytes=tuple(forward), backward_bytes=tuple(backward)) for forward, backward in tensor
        ),
        whole=None if data["whole"] is None else Profile.from_dict(data["whole"]),
    )


def prepare_forecast(
    plan: Plan, costs: ModelCosts, calibration: Mapping[str, Any], cluster_file: str | None = None
) -> PreparedPlan:
    """Prepare the forecast of a plan: on this machine with as many devices as it needs, or on a cluster from a file."""
    from stagewright.cluster.file import read_cluster
    from stagewright.planner.calibration.calibrate import Calibration
    from stagewright.planner.forecast import prepare_plan

    links = {
        kind: {name: math.inf if value is None else value for name, value in calibration[kind].items()}
        for kind in ("link", "collective")
    }
    local = Calibration.from_dict({**calibration, **links})
    cluster = local.cluster(plan.mesh.num_workers) if cluster_file is None else read_cluster(cluster_file)
    return prepare_plan(replace(plan, devices=()), costs, cluster, local.overheads_on(cluster))
