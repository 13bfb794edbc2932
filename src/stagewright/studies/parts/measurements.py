"""Parts that several studies share: this machine's calibration, a model's measurement, and forecasts from both.

calibration ─┐
measurement ─┴─► prepared(plan) ─► forecast, parts of the distance to the ideal
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stagewright.spec.plan import Plan
from stagewright.studies.framework.study import Bench, Part

if TYPE_CHECKING:  # these import torch, which a study needs only when it runs
    from stagewright.planner.costs.measure import ModelCosts
    from stagewright.planner.forecast import Prepared

__all__ = ["calibration", "measured_data", "measured_of", "prepared_for"]


def calibration(devices: Sequence[str]) -> Part:
    """The part called `calibration`: what forecasts need of this machine, for devices like these."""
    return Part(
        name="calibration",
        about="this machine's links, collectives and the engine's own work",
        run=partial(_calibrate, tuple(devices)),
    )


def _calibrate(devices: tuple[str, ...], bench: Bench) -> dict[str, Any]:
    from stagewright.machine.machine import default_devices
    from stagewright.planner.calibration.calibrate import calibrate, load_calibration

    def kind(device: str) -> str:
        return device.partition(":")[0]

    if kind(default_devices(2, share=True)[0]) == kind(devices[0]):
        found = load_calibration(progress=bench.tell)
    else:  # a single GPU: there is no link to measure, so that its forecasts have free ones
        found = calibrate(devices[:1])
    data = found.to_dict()
    return {**data, **{name: _finite(data[name]) for name in ("link", "collective")}}


def measured_data(plan: Plan, *, repeats: int) -> dict[str, Any]:
    """Measure a plan's model; as JSON has it."""
    from stagewright.planner.costs.measure import measure_model

    found = measure_model(plan, repeats=repeats, cache=False)
    return {
        "profile": found.profile.to_dict(),
        "terms": found.terms.to_dict(),
        "num_tensor": found.num_tensor,
        "tensor": None
        if found.tensor is None
        else [[list(one.forward_bytes), list(one.backward_bytes)] for one in found.tensor],
        "whole": None if found.whole is None else found.whole.to_dict(),
    }


def measured_of(data: Mapping[str, Any]) -> ModelCosts:
    """What `measured_data` saved."""
    from stagewright.planner.costs.measure import ModelCosts
    from stagewright.profiler.profile import Profile
    from stagewright.simulator.costs import TensorTraffic
    from stagewright.simulator.overheads import ModelOverheads

    tensor = data["tensor"]
    return ModelCosts(
        profile=Profile.from_dict(data["profile"]),
        terms=ModelOverheads.from_dict(data["terms"]),
        num_tensor=data["num_tensor"],
        tensor=None
        if tensor is None
        else tuple(
            TensorTraffic(forward_bytes=tuple(forward), backward_bytes=tuple(backward)) for forward, backward in tensor
        ),
        whole=None if data["whole"] is None else Profile.from_dict(data["whole"]),
    )


def prepared_for(
    plan: Plan, measured: ModelCosts, calibration: Mapping[str, Any], cluster_file: str | None = None
) -> Prepared:
    """A plan ready to be forecast: on this machine with as many devices as it needs, or on a cluster from a file."""
    from stagewright.cluster.file import read_cluster
    from stagewright.planner.calibration.calibrate import Calibration
    from stagewright.planner.forecast import prepare
    from stagewright.simulator.overheads import EngineOverheads

    links = {name: _endless(calibration[name]) for name in ("link", "collective")}
    here = Calibration.from_dict({**calibration, **links})
    cluster = here.cluster(plan.mesh.num_workers) if cluster_file is None else read_cluster(cluster_file)
    alike = here.kind == cluster.devices[0].kind
    # The executor's work is the same everywhere; how cores slow each other down is this machine's.
    terms = here.terms if alike else EngineOverheads(action_s=here.terms.action_s)
    return prepare(replace(plan, devices=()), measured, cluster, terms)


def _finite(link: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity: null instead."""
    return {name: value if math.isfinite(value) else None for name, value in link.items()}


def _endless(link: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.inf if value is None else value for name, value in link.items()}
