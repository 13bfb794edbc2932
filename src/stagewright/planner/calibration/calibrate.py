"""The engine's own costs on this machine, measured once and kept: links, collectives, crowding, the executor's work.

    calibration_job   two workers: messages, sums, work alone, beside each other and beside traffic
    a tiny model      one worker, many micro-batches: what passes between two actions, and around a step

Kept in the cache folder for as long as hardware and torch stay the same.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.cluster.device import Device
from stagewright.engine.jobs.compare import run_plan
from stagewright.engine.launch.launcher import launch
from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.machine.link_fit import LinkPoint, fit_link
from stagewright.machine.machine import default_devices
from stagewright.profiler.cache import default_cache_folder
from stagewright.runs.run_folder import RunFolder
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.plan import Mesh, ModelSpec, Plan

__all__ = ["Calibration", "calibrate", "load_calibration", "calibrate_from_rounds"]

# In short; what another way gave is measured anew.
_METHOD = "in rounds of both devices, beside six buckets, freed memory kept, one receive ahead, patient threads"
_JOB = "stagewright.planner.calibration.job:run"
_ACTIONS = ("forward", "backward")
_LEAST_SUM_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What this machine's workers were measured to take."""

    link: Link
    """Between two of its devices."""
    collective: Link
    """What a step of a collective among them gets, by the line through what sums of two took."""
    terms: EngineOverheads
    """The engine's own costs."""
    kind: str
    """The kind of device that was measured."""
    hardware: str
    """The hardware and the version of torch that it is of."""
    speeds: tuple[float, ...] = ()
    """How fast each device was, relative to the first, on which models are profiled; further ones are as that."""
    sums: tuple[tuple[int, float], ...] = ()
    """What sums of two took: bytes and seconds, both rising."""

    def cluster(self, num_devices: int, memory_bytes: int | None = None) -> Cluster:
        """As many devices like these on one host."""
        speeds = (*self.speeds, *[1.0] * num_devices)[:num_devices]
        groups = tuple(
            DeviceGroup(
                kind=self.kind,  # type: ignore[arg-type]
                count=len(list(alike)),
                memory_bytes=memory_bytes,
                speed=speed,
                hardware=self.hardware,
            )
            for speed, alike in itertools.groupby(speeds)
        )
        links = Links(intra_host=self.link, collective=self.collective, sums=self.sums)
        return Cluster(devices=groups, links=links)

    def overheads_on(self, cluster: Cluster) -> EngineOverheads:
        """The engine's own costs on a cluster.

        The executor's work is the same everywhere; how cores slow each other down is this machine's.
        """
        alike = self.kind == cluster.devices[0].kind
        return self.terms if alike else EngineOverheads(action_s=self.terms.action_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        return cls(
            link=Link(**data["link"]),
            collective=Link(**data["collective"]),
            terms=EngineOverheads.from_dict(data["terms"]),
            kind=data["kind"],
            hardware=data["hardware"],
            speeds=tuple(data.get("speeds", ())),
            sums=tuple((int(size), float(taken)) for size, taken in data.get("sums", ())),
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
        terms = EngineOverheads(action_s=action_s, step_s=step_s, chunk_s=chunk_s)
        return Calibration(link=FREE, collective=FREE, terms=terms, kind=kind, hardware=hardware)
    with tempfile.TemporaryDirectory(prefix="stagewright-calibration-") as root:
        plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=64, mesh=Mesh(data=2), devices=tuple(devices[:2]))
        folder = RunFolder.create(root, plan)
        launch(plan, folder, job=_JOB)
        found = json.loads((folder.path / "calibration.json").read_text(encoding="utf-8"))
        action_s, step_s, chunk_s = _executor(devices[0], root)
    executor = EngineOverheads(action_s=action_s, step_s=step_s, chunk_s=chunk_s)
    plain = Calibration(link=FREE, collective=FREE, terms=executor, kind=kind, hardware=hardware)
    return calibrate_from_rounds(plain, found, alone=devices[0] != devices[1])


def calibrate_from_rounds(calibration: Calibration, found: Mapping[str, Any], *, alone: bool = True) -> Calibration:
    """The executor's own work as it is, all else from what two workers found in rounds; each has a device `alone`."""
    both: list[list[dict[str, Any]]] = found["workers"]
    rounds = list(zip(*both, strict=True))
    share, pace = _beside(rounds)
    sums = _sums(rounds)
    together, message_bytes = _medians(both[0], "together_s"), found["message_bytes"]
    speeds = (1.0, _speed([(first["alone_s"], second["alone_s"]) for first, second in rounds]))
    return replace(
        calibration,
        link=_fit(
            {size: statistics.median(one["messages"][size] for one in both[0]) for size in both[0][0]["messages"]}
        ),
        collective=_fit_sums(sums),
        terms=replace(
            calibration.terms,
            message_s_per_byte=max(0.0, _medians(both[0], "with_messages_s") - together) / message_bytes,
            collective_share=share,
            collective_pace=pace,
            crowding=_crowding(rounds, speeds) if alone else 1.0,
        ),
        speeds=speeds if alone else (),
        sums=_rising(sums),
    )


Round: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # of both workers


def _medians(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def _speed(times_s: Sequence[tuple[float, float]]) -> float:
    """How fast the second device is, of the first's speed; 1 where rounds do not agree on which is faster."""
    ratios = [first / second for first, second in times_s]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return float(f"{middle:.3g}") if low > 1 or high < 1 else 1.0


def _crowding(rounds: Sequence[Round], speeds: Sequence[float]) -> float:
    """How much longer than on one device alone it takes until both have done the same, beside what their speeds say."""

    def scaled(both: Round, name: str) -> list[float]:
        return [float(one[name]) * speed for one, speed in zip(both, speeds, strict=True)]

    until = _mean([max(scaled(both, "together_s")) for both in rounds])
    # Means both: of a core that goes at either of two speeds, a median is the one that it had a little more often.
    alone = _mean([taken for both in rounds for taken in scaled(both, "alone_s")])
    return max(0.0, until / alone - 1)


def _sums(rounds: Sequence[Round]) -> dict[int, float]:
    """What a sum takes, by size: the time of who came last to it, for the other one waited.

    Means, for Gloo's come in two kinds, at once or after some milliseconds, and a step has enough of them to have both.
    """
    return {
        int(size): _mean(
            [min(pair) for one, other in rounds for pair in zip(one["sums"][size], other["sums"][size], strict=True)]
        )
        for size in rounds[0][0]["sums"]
    }


def _mean(values: Sequence[float]) -> float:
    """Without the lowest and the highest tenth, which something else may have disturbed."""
    left_out = len(values) // 10
    return statistics.mean(sorted(values)[left_out : len(values) - left_out])


def _rising(times: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """The points by size; where a larger one took less, both take their mean."""
    pools: list[tuple[list[int], float]] = []
    for size, taken in sorted(times.items()):
        pools.append(([size], taken))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (sizes, one), (more, other) = pools[-2:]
            mean = (len(sizes) * one + len(more) * other) / (len(sizes) + len(more))
            pools[-2:] = [([*sizes, *more], mean)]
    return tuple((size, taken) for sizes, taken in pools for size in sizes)


def _beside(rounds: Sequence[Round]) -> tuple[float, float]:
    """The share of the device that sums take while they run beside work, and their pace meanwhile."""
    shares, paces = [], []
    for both in rounds:
        for one in both:
            worked, done = one["with_sums_s"], one["sums_done_s"]
            overlapped = min(worked, done)
            shares.append((worked - 2 * one["together_s"]) / overlapped)
            paces.append((one["beside_s"] - max(0.0, done - worked)) / overlapped)
    return min(0.95, max(0.0, statistics.median(shares))), min(1.0, max(0.1, statistics.median(paces)))


def _fit_sums(times: Mapping[int, float]) -> Link:
    """The line 2 α + S β of an all-reduce of two workers, by which the points are off least, each by its own size.

    Through two of the points, so that one which is far off bends nothing; the smallest, of a few bytes, is no part of
    it: what counts is what layers and buckets of gradients have.
    """
    points = [(size, taken) for size, taken in sorted(times.items()) if size >= _LEAST_SUM_BYTES]
    best = (math.inf, 0.0, 0.0)
    for (size, taken), (larger, longer) in itertools.combinations(points, 2):
        slope = (longer - taken) / (larger - size)
        level = taken - slope * size
        if slope <= 0 or level < 0:
            slope, level = longer / larger, 0.0
        error = sum(abs((level + slope * at) / seconds - 1) for at, seconds in points)
        best = min(best, (error, level, slope))
    _, level, slope = best
    return Link(bandwidth_bytes_per_s=float(f"{1 / slope:.4g}"), latency_s=float(f"{level / 2:.4g}"))


def _fit(times: Mapping[str, float]) -> Link:
    """Latency and bandwidth of the line."""
    points = [
        LinkPoint(num_bytes=int(size), median_s=seconds, spread_s=0.0, num_messages=1)
        for size, seconds in times.items()
    ]
    return fit_link(points).link


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
        events = [one for one in RunFolder.open(str(result.run)).worker(0).events() if one["kind"] in _ACTIONS]
        action_s = statistics.median(after["start_s"] - before["end_s"] for before, after in itertools.pairwise(events))
        spans = [part[-1]["end_s"] - part[0]["start_s"] for part in _chunks(events, len(events) // steps)]
        around[chunks] = max(0.0, result.latency_s - statistics.median(spans))
    chunk_s = max(0.0, around[many] - around[few]) / (many - few)
    return action_s, max(0.0, around[few] - chunk_s * few), chunk_s


def _chunks(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)]
