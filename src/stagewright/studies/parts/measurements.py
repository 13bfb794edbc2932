"""Measurements that several studies share: this machine's calibration, a model's costs, and forecasts from both.

calibration ─┐
model costs ─┴─► prepare_forecast(plan) ─► forecast, speed-up losses
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
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
        measured: list[str] = []

        def note(text: str) -> None:
            measured.append(text)
            context.note(text)

        data = load_calibration(fresh=context.fresh, if_slower=True, progress=note).to_dict()
        is_measured_here = bool(measured)
    else:  # a single GPU has no link to measure: its forecasts assume free communication
        data, is_measured_here = calibrate(devices[:1]).to_dict(), True
    links = {name: finite(data[name]) for name in ("link", "collective")}
    return {**data, **links, _MEASURED_HERE: is_measured_here}


_MEASURED_HERE = "is_measured_here"
_OTHER_LOAD = "other-load"


def with_other_load(results: Results, load: float | None) -> Results:
    """Add the share of the cores' time that other programs took, for `is_busy` and `noise_margin`."""
    return results if load is None else replace(results, data={**results.data, _OTHER_LOAD: {"share": load}})


def _noise(results: Mapping[str, Any]) -> dict[str, float]:
    """How much the machine disturbs the measurements of this study, by what shows it.

    Programs that take a share s of a core make a run on it 1 ÷ (1 − s) times as long, and spare another run. The
    calibration counts if it was measured in this study: an older one says how calm the machine was then.
    """
    saved = results.get("calibration") or {}
    varied = float(saved.get("noise") or 0.0) if saved.get(_MEASURED_HERE, True) else 0.0
    share = _other_share(results)
    return {"load": share / (1 - share), "calibration": varied, "steps": _step_variation(results)}


def _other_share(results: Mapping[str, Any]) -> float:
    """The share of the cores' time that other programs took."""
    return min(0.95, float((results.get(_OTHER_LOAD) or {}).get("share") or 0.0))


def _step_variation(results: Mapping[str, Any]) -> float:
    """Twice the interquartile range of a run's steps, relative to their throughput; the median over all timed runs."""
    runs = [row for row in results.values() if isinstance(row, Mapping) and row.get("samples_per_s")]
    spreads = [row["samples_per_s_spread"] / row["samples_per_s"] for row in runs if row.get("samples_per_s_spread")]
    return 2 * float(statistics.median(spreads)) if spreads else 0.0


def is_busy(results: Mapping[str, Any]) -> bool:
    """Whether the machine disturbed the measurements of this study."""
    return max(_noise(results).values()) > NOISY


def why_busy(results: Mapping[str, Any]) -> str:
    """What shows that the machine disturbed the measurements of this study, as a clause; "" if it did not."""
    noise = _noise(results)
    if noise["load"] > NOISY:
        return f"other programs took {percent(_other_share(results))} of the cores' time"
    if noise["calibration"] > NOISY:
        return f"repeated measurements of this machine varied by {percent(noise['calibration'])}"
    return f"the steps of one run varied by {percent(noise['steps'] / 2)}" if noise["steps"] > NOISY else ""


def why_rough(results: Mapping[str, Any]) -> str:
    """Why forecasts can't be relied on, as a clause: the machine is busy, or was when it was calibrated; or ""."""
    noise = float((results.get("calibration") or {}).get("noise") or 0.0)
    if because := why_busy(results):
        return because
    return f"the calibration of this machine varied by {percent(noise)}" if noise > NOISY else ""


def noise_margin(results: Mapping[str, Any]) -> float:
    """Relative difference between two single runs up to which they can't be told apart: more on a busy machine."""
    return max(0.05, *_noise(results).values())


def calibration_note(results: Mapping[str, Any]) -> str:
    """Say when the calibration behind the forecasts was measured and how much its rounds varied; "" if unknown."""
    saved = results.get("calibration") or {}
    if not saved.get("measured_at"):
        return ""
    noise = saved.get("noise") or 0.0
    text = f" Forecasts use a calibration of this machine of {str(saved['measured_at'])[:16].replace('T', ' ')}"
    text += f", whose rounds varied by {percent(noise)}" if noise else ""
    return text + (", so they are rough (--restart measures it again)." if noise > NOISY else ".")


def finite(content: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None, in nested dicts and lists."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def measure_costs(plan: Plan, *, repeats: int, cache: Path | None = None) -> dict[str, Any]:
    """Measure a plan's model; return its costs as JSON holds them.

    Args:
        plan: What to measure.
        repeats: Measurements of each unit.
        cache: Folder of the profiles of this study, for units that several of its plans measure alike.
    """
    from stagewright.planner.costs.measure import measure_model

    costs = measure_model(plan, repeats=repeats, cache=cache if cache is not None else False)
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
