"""The engine's own costs on this machine, measured once and kept: links, collectives, crowding, the executor's work.

    calibration_job   two workers: messages, sums, work alone, beside each other and beside traffic
    a tiny model      one worker, many micro-batches: what passes between two actions, and around a step

Kept in the cache folder for as long as hardware and torch stay the same.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stagewright.cluster.atomic_file import save_text
from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.cluster.device import Device
from stagewright.cluster.link_fit import LinkPoint, fit_link
from stagewright.cluster.machine import default_devices
from stagewright.engine.compare import run_plan
from stagewright.engine.launch import launch
from stagewright.errors import UsageError
from stagewright.forecast.terms import EngineTerms
from stagewright.plan.value import Mesh, ModelSpec, Plan
from stagewright.profile.cache import default_cache_folder
from stagewright.store.run import RunFolder

__all__ = ["Calibration", "calibrate", "load_calibration"]

_METHOD = "over weights that no cache holds"  # in short; what another way gave is measured anew
_JOB = "stagewright.planner.calibration_job:run"
_ACTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What this machine's workers were measured to take."""

    # Between two of its devices.
    link: Link
    # What a step of a collective among them gets.
    collective: Link
    # The engine's own costs.
    terms: EngineTerms
    # The kind of device that was measured.
    kind: str
    # The hardware and the version of torch that it is of.
    hardware: str

    def cluster(self, num_devices: int, memory_bytes: int | None = None) -> Cluster:
        """As many devices like these on one host."""
        group = DeviceGroup(
            kind=self.kind,  # type: ignore[arg-type]
            count=num_devices,
            memory_bytes=memory_bytes,
            hardware=self.hardware,
        )
        return Cluster(devices=(group,), links=Links(intra_host=self.link, collective=self.collective))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        return cls(
            link=Link(**data["link"]),
            collective=Link(**data["collective"]),
            terms=EngineTerms.from_dict(data["terms"]),
            kind=data["kind"],
            hardware=data["hardware"],
        )


def load_calibration(
    cache: str | Path | None = None, *, fresh: bool = False, progress: Callable[[str], None] | None = None
) -> Calibration:
    """This machine's calibration, from the cache or measured now (about 20 s)."""
    devices = default_devices(2, share=True)
    hardware = _hardware(devices[0])
    path = (default_cache_folder() if cache is None else Path(cache)) / "calibration.json"
    if not fresh and path.is_file():
        try:
            found = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
            if found.hardware == hardware:
                return found
        except (ValueError, KeyError, TypeError, UsageError):
            pass  # of another version: measured anew
    if progress is not None:
        progress("measuring this machine's links, collectives and the engine's own work, once (about 20 s) …")
    measured = calibrate(devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(measured.to_dict(), indent=2) + "\n", path)
    return measured


def _hardware(device: str) -> str:
    import torch

    return f"{Device.parse(device).hardware_name()}, torch {torch.__version__}, measured {_METHOD}"


def calibrate(devices: Sequence[str]) -> Calibration:
    """Measure with two workers on these devices; on one device, the executor's own work alone."""
    kind, hardware = Device.parse(devices[0]).kind, _hardware(devices[0])
    if len(devices) == 1:
        with tempfile.TemporaryDirectory(prefix="stagewright-calibration-") as root:
            action_s, step_s, chunk_s = _executor(devices[0], root)
        terms = EngineTerms(action_s=action_s, step_s=step_s, chunk_s=chunk_s)
        return Calibration(link=FREE, collective=FREE, terms=terms, kind=kind, hardware=hardware)
    with tempfile.TemporaryDirectory(prefix="stagewright-calibration-") as root:
        plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=64, mesh=Mesh(data=2), devices=tuple(devices[:2]))
        folder = RunFolder.create(root, plan)
        launch(plan, folder, job=_JOB)
        found = json.loads((folder.path / "calibration.json").read_text(encoding="utf-8"))
        action_s, step_s, chunk_s = _executor(devices[0], root)
    link = _fit(found["messages"])
    # An all-reduce of two workers takes two steps and moves its bytes once: S β.
    collective = _fit(found["sums"], steps=2)
    alone, together = found["alone_s"], found["together_s"]
    return Calibration(
        link=link,
        collective=collective,
        terms=EngineTerms(
            action_s=action_s,
            step_s=step_s,
            chunk_s=chunk_s,
            message_s_per_byte=max(0.0, found["with_messages_s"] - together) / found["message_bytes"],
            collective_share=min(1.0, max(0.0, found["with_sums_s"] - together) / found["sums_busy_s"]),
            crowding=max(0.0, together / alone - 1) if devices[0] != devices[1] else 1.0,
        ),
        kind=kind,
        hardware=hardware,
    )


def _fit(times: Mapping[str, float], steps: int = 1) -> Link:
    """Latency and bandwidth of the line; a collective's latency is that of one of its steps."""
    points = [
        LinkPoint(num_bytes=int(size), median_s=seconds, spread_s=0.0, num_messages=1)
        for size, seconds in times.items()
    ]
    line = fit_link(points).link
    return Link(bandwidth_bytes_per_s=line.bandwidth_bytes_per_s, latency_s=line.latency_s / steps)


def _executor(device: str, root: str) -> tuple[float, float, float]:
    """What passes between two actions, around a step's actions, and there for each micro-batch.

    Of a model so small that nothing else counts, with many micro-batches and with one.
    """
    few, many, steps = 1, 16, 20
    around: dict[int, float] = {}
    action_s = 0.0
    for chunks in (few, many):
        model = ModelSpec(name="mlp-mnist")
        plan = Plan(model=model, batch=many, microbatches=chunks, devices=(device,), steps=steps, warmup=3)
        result = run_plan(plan, root)
        events = [one for one in RunFolder.open(result["run"]).worker(0).events() if one["kind"] in _ACTIONS]
        action_s = statistics.median(after["start_s"] - before["end_s"] for before, after in itertools.pairwise(events))
        spans = [part[-1]["end_s"] - part[0]["start_s"] for part in _chunks(events, len(events) // steps)]
        around[chunks] = max(0.0, result["latency_s"] - statistics.median(spans))
    chunk_s = max(0.0, around[many] - around[few]) / (many - few)
    return action_s, max(0.0, around[few] - chunk_s * few), chunk_s


def _chunks(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)]
