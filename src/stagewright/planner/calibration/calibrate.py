"""The calibration of this machine: links, collectives, contention and executor overhead, measured once and cached.

    calibration job   two workers: P2P, all-reduce, compute alone, concurrently and overlapped with communication
    a tiny model      one worker, many micro-batches: overhead between two actions, and around a step

The cache entry is valid as long as hardware and torch version stay the same and the machine keeps its pace (`pace`).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from stagewright.cluster.cluster import FREE, Cluster, DeviceGroup, Link, Links
from stagewright.cluster.device import Device, are_separate
from stagewright.engine.jobs.compare import run_plan
from stagewright.engine.launch.launcher import launch
from stagewright.errors import UsageError
from stagewright.files.atomic import save_text
from stagewright.files.keyed_cache import default_cache_folder
from stagewright.machine.host_link import measure_host_link
from stagewright.machine.link_fit import LinkPoint, fit_link
from stagewright.machine.machine import default_devices
from stagewright.planner.calibration.pace import age_text, has_changed, probe_pace
from stagewright.runs.run_folder import RunFolder
from stagewright.simulator.costs.overheads import EngineOverheads
from stagewright.spec.plan import Mesh, ModelSpec, Plan

# Identifies the method in calibration files; after a change of this text the machine is measured again.
_METHOD = (
    "in rounds of both devices, beside six buckets, freed memory kept, one receive ahead, patient threads, "
    "FSDP beyond the caches, tensor groups by shared memory"
)
_JOB = "stagewright.planner.calibration.job:run"
_ACTIONS = ("forward", "backward")
_MIN_FITTED_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured links and overheads of this machine."""

    link: Link
    """P2P link between two of its devices."""
    collective: Link
    """Latency and bandwidth of a collective's steps, fitted to all-reduces of two workers."""
    overheads: EngineOverheads
    kind: str
    """Kind of the measured devices."""
    hardware: str
    """Hardware and torch version."""
    speeds: tuple[float, ...] = ()
    """Speed of each device relative to the first, on which models are profiled; further devices count as 1."""
    allreduce_points: tuple[tuple[int, float], ...] = ()
    """Measured all-reduces of two workers: bytes and seconds, both ascending."""
    tensor: Link | None = None
    """As ``collective``, in a tensor group, whose CPU workers share memory; None: as in other groups."""
    tensor_points: tuple[tuple[int, float], ...] = ()
    """As ``allreduce_points``, in a tensor group."""
    measured_at: str = ""
    """When it was measured, in ISO 8601."""
    pace_s: float = 0.0
    """The machine's pace meanwhile: see `pace.probe_pace`."""
    host: Link | None = None
    """Between a GPU and its host's memory; None on a CPU."""
    noise: float = 0.0
    """Variation between its rounds: interquartile range of the same computation, relative to the median."""

    def cluster(self, num_devices: int, memory_bytes: int | None = None) -> Cluster:
        """Return a cluster of that many devices on one host."""
        speeds = (*self.speeds, *[1.0] * num_devices)[:num_devices]
        groups = tuple(
            DeviceGroup(
                kind=self.kind,  # type: ignore[arg-type]
                count=len(list(group)),
                memory_bytes=memory_bytes,
                speed=speed,
                hardware=self.hardware,
            )
            for speed, group in itertools.groupby(speeds)
        )
        links = Links(
            intra_host=self.link,
            collective=self.collective,
            host=self.host,
            sums=self.allreduce_points,
            tensor=self.tensor,
            tensor_sums=self.tensor_points,
        )
        return Cluster(devices=groups, links=links)

    def overheads_on(self, cluster: Cluster) -> EngineOverheads:
        """Return the engine's overheads on a cluster; contention of another kind of device is unknown."""
        same_kind = self.kind == cluster.devices[0].kind
        return self.overheads if same_kind else EngineOverheads(action_s=self.overheads.action_s)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["terms"], values["sums"] = self.overheads.to_dict(), values.pop("allreduce_points")
        values["tensor_sums"] = values.pop("tensor_points")
        del values["overheads"]
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        return cls(
            link=Link(**data["link"]),
            collective=Link(**data["collective"]),
            overheads=EngineOverheads.from_dict(data["terms"]),
            kind=data["kind"],
            hardware=data["hardware"],
            speeds=tuple(data.get("speeds", ())),
            allreduce_points=_points(data, "sums"),
            tensor=None if data.get("tensor") is None else Link(**data["tensor"]),
            tensor_points=_points(data, "tensor_sums"),
            measured_at=str(data.get("measured_at", "")),
            pace_s=float(data.get("pace_s", 0.0)),
            noise=float(data.get("noise", 0.0)),
            host=None if data.get("host") is None else Link(**data["host"]),
        )


def _points(data: Mapping[str, Any], name: str) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), float(seconds)) for size, seconds in data.get(name, ()))


def load_calibration(
    cache: str | Path | None = None,
    *,
    devices: Sequence[str] = (),
    fresh: bool = False,
    if_slower: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Return this machine's calibration, cached or measured now (about 20 s).

    It is measured again if `fresh`, if the machine is faster than it was, or with `if_slower` slower. ``devices``: one
    or two that a plan uses; by default two of this machine's, or its only GPU.
    """
    devices = tuple(devices[:2]) or _default_pair()
    hardware = _hardware(devices[0])
    kind = Device.parse(devices[0]).kind
    share = Device.parse(devices[0]).share
    part = f"-share-{share}" if share > 1 else ""
    name = "calibration.json" if kind == "cpu" else f"calibration-{kind}-{len(devices)}{part}.json"
    path = (default_cache_folder() if cache is None else Path(cache)) / name
    reason = ""
    if not fresh and path.is_file():
        try:
            cached = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
            now_s = probe_pace(devices[0]) if cached.hardware == hardware else 0.0
            if now_s and not has_changed(cached.pace_s, now_s, if_slower=if_slower):
                return cached
            if now_s and cached.pace_s:
                age = age_text(cached.measured_at) or "unknown"
                reason = f": its pace has changed by {now_s / cached.pace_s - 1:+.0%} since then (age: {age})"
        except (ValueError, KeyError, TypeError, UsageError):
            pass  # written by another version: measure again
    if progress is not None:
        progress(f"measuring this machine's links, collectives and engine overhead (about 20 s){reason} …")
    measured = calibrate(devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(measured.to_dict(), indent=2) + "\n", path)
    return measured


def _default_pair() -> tuple[str, ...]:
    """Return two devices of the kind that runs use by default; one if there is only one GPU."""
    one, two = default_devices(1), default_devices(2, share=True)
    return two if Device.parse(one[0]).kind == Device.parse(two[0]).kind else one


def _hardware(device: str) -> str:
    import torch

    return f"{Device.parse(device).hardware_name()}, torch {torch.__version__}, measured {_METHOD}"


def calibrate(devices: Sequence[str]) -> Calibration:
    """Measure with two workers on these devices; on one device, only the executor overhead."""
    before_s = probe_pace(devices[0])
    measured = _calibrate(devices)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    host = measure_host_link(Device.parse(devices[0]).torch_device())
    return replace(measured, host=host, measured_at=now, pace_s=(before_s + probe_pace(devices[0])) / 2)


def _calibrate(devices: Sequence[str]) -> Calibration:
    kind, hardware = Device.parse(devices[0]).kind, _hardware(devices[0])
    if len(devices) == 1:
        with tempfile.TemporaryDirectory(prefix="stagewright-calibration-") as root:
            action_s, step_s, chunk_s = _measure_executor(devices[0], root)
        overheads = EngineOverheads(action_s=action_s, step_s=step_s, chunk_s=chunk_s)
        return Calibration(link=FREE, collective=FREE, overheads=overheads, kind=kind, hardware=hardware)
    with tempfile.TemporaryDirectory(prefix="stagewright-calibration-") as root:
        plan = Plan(model=ModelSpec(name="mlp-mnist"), batch=64, mesh=Mesh(data=2), devices=tuple(devices[:2]))
        folder = RunFolder.create(root, plan)
        launch(plan, folder, job=_JOB)
        measured = json.loads((folder.path / "calibration.json").read_text(encoding="utf-8"))
        action_s, step_s, chunk_s = _measure_executor(devices[0], root)
    executor = EngineOverheads(action_s=action_s, step_s=step_s, chunk_s=chunk_s)
    calibration = Calibration(link=FREE, collective=FREE, overheads=executor, kind=kind, hardware=hardware)
    return calibrate_from_rounds(calibration, measured, separate=are_separate(devices[:2]))


def calibrate_from_rounds(
    calibration: Calibration, measured: Mapping[str, Any], *, separate: bool = True
) -> Calibration:
    """Replace everything except the executor overhead with the rounds of two workers.

    ``separate``: whether each worker has its own device.
    """
    both: list[list[dict[str, Any]]] = measured["workers"]
    rounds = list(zip(*both, strict=True))
    share, pace = _overlap(rounds)
    allreduce_s, tensor_s = _allreduce_by_size(rounds, "sums"), _allreduce_by_size(rounds, "tensor_sums")
    unit_s, s_per_byte = _fsdp_overhead(rounds, _fit_allreduce(allreduce_s))
    together, message_bytes = _median(both[0], "together_s"), measured["message_bytes"]
    speeds = (1.0, _speed([(first["alone_s"], second["alone_s"]) for first, second in rounds]))
    return replace(
        calibration,
        link=_fit_p2p(
            {size: statistics.median(entry["messages"][size] for entry in both[0]) for size in both[0][0]["messages"]}
        ),
        collective=_fit_allreduce(allreduce_s),
        overheads=replace(
            calibration.overheads,
            message_s_per_byte=max(0.0, _median(both[0], "with_messages_s") - together) / message_bytes,
            collective_share=share,
            collective_pace=pace,
            fsdp_unit_s=unit_s,
            fsdp_s_per_byte=s_per_byte,
            contention=_contention(rounds, speeds) if separate else 1.0,
        ),
        speeds=speeds if separate else (),
        allreduce_points=_make_monotonic(allreduce_s),
        tensor=_fit_allreduce(tensor_s) if tensor_s else None,
        tensor_points=_make_monotonic(tensor_s),
        noise=_noise(both),
    )


Round: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # of the two workers


def _noise(workers: Sequence[Sequence[Mapping[str, float]]]) -> float:
    """Return the interquartile range of the same computation in all rounds, relative to its median; of both workers."""

    def spread(times: Sequence[float]) -> float:
        low, middle, high = statistics.quantiles(times, n=4)
        return (high - low) / middle

    return float(f"{max(spread([entry['alone_s'] for entry in rounds]) for rounds in workers):.3g}")


def _median(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(entry[name] for entry in rounds)


def _speed(times_s: Sequence[tuple[float, float]]) -> float:
    """Return the second device's speed relative to the first; 1 if the rounds disagree on which is faster."""
    ratios = [first / second for first, second in times_s]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return float(f"{middle:.3g}") if low > 1 or high < 1 else 1.0


def _contention(rounds: Sequence[Round], speeds: Sequence[float]) -> float:
    """Return the slowdown until both devices have done the same work at once, apart from their speeds."""

    def scaled(both: Round, name: str) -> list[float]:
        return [float(entry[name]) * speed for entry, speed in zip(both, speeds, strict=True)]

    together = _mean([max(scaled(both, "together_s")) for both in rounds])
    # Means, not medians: for a core that alternates between two speeds, the median picks one of them.
    alone = _mean([seconds for both in rounds for seconds in scaled(both, "alone_s")])
    return max(0.0, together / alone - 1)


def _allreduce_by_size(rounds: Sequence[Round], name: str) -> dict[int, float]:
    """Return the all-reduce time by size: that of the worker that joined last, since the other one waited.

    Means, because Gloo's times are bimodal (immediate, or delayed by milliseconds) and a step has enough for both.
    """
    return {
        int(size): _mean(
            [min(pair) for first, second in rounds for pair in zip(first[name][size], second[name][size], strict=True)]
        )
        for size in rounds[0][0].get(name, ())
    }


def _fsdp_overhead(rounds: Sequence[Round], link: Link) -> tuple[float, float]:
    """Return the time of FSDP's hooks and copies in a step: per unit, and per byte of its parameters.

    A unit is all-gathered twice and reduce-scattered once, each half of an all-reduce. That is subtracted.
    """
    sizes = sorted(rounds[0][0].get("fsdp", {}), key=int)
    if len(sizes) < 2:
        return 0.0, 0.0
    own: list[tuple[int, float]] = []
    for size in (sizes[0], sizes[-1]):
        added = statistics.median(max(entry["fsdp"][size] for entry in both) for both in rounds)
        own.append((int(size), added - 1.5 * (2 * link.latency_s + int(size) / link.bandwidth_bytes_per_s)))
    (small, less_s), (large, more_s) = own
    s_per_byte = max(0.0, (more_s - less_s) / (large - small))
    return max(0.0, less_s - small * s_per_byte), s_per_byte


def _mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and highest tenth, which may have been disturbed."""
    left_out = len(values) // 10
    return statistics.mean(sorted(values)[left_out : len(values) - left_out])


def _make_monotonic(times: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Return the points by size; if a larger one took less time, both get their mean."""
    pools: list[tuple[list[int], float]] = []
    for size, seconds in sorted(times.items()):
        pools.append(([size], seconds))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (sizes, mean), (later_sizes, later_mean) = pools[-2:]
            pooled = (len(sizes) * mean + len(later_sizes) * later_mean) / (len(sizes) + len(later_sizes))
            pools[-2:] = [([*sizes, *later_sizes], pooled)]
    return tuple((size, seconds) for sizes, seconds in pools for size in sizes)


def _overlap(rounds: Sequence[Round]) -> tuple[float, float]:
    """Return the fraction of the device that overlapped all-reduces take, and their relative speed meanwhile."""
    shares, paces = [], []
    for both in rounds:
        for entry in both:
            compute_s, done_s = entry["with_sums_s"], entry["sums_done_s"]
            overlap_s = min(compute_s, done_s)
            shares.append((compute_s - 2 * entry["together_s"]) / overlap_s)
            paces.append((entry["beside_s"] - max(0.0, done_s - compute_s)) / overlap_s)
    return min(0.95, max(0.0, statistics.median(shares))), min(1.0, max(0.1, statistics.median(paces)))


def _fit_allreduce(times: Mapping[int, float]) -> Link:
    """Fit the line 2 α + S β of an all-reduce of two workers with the least sum of relative errors.

    The line passes through two of the points, so that an outlier has no influence. Sizes of a few bytes are left out:
    layers and gradient buckets are larger.
    """
    points = [(size, seconds) for size, seconds in sorted(times.items()) if size >= _MIN_FITTED_BYTES]
    best = (math.inf, 0.0, 0.0)
    for (size, seconds), (larger_size, longer) in itertools.combinations(points, 2):
        slope = (longer - seconds) / (larger_size - size)
        intercept = seconds - slope * size
        if slope <= 0 or intercept < 0:
            slope, intercept = longer / larger_size, 0.0
        error = sum(abs((intercept + slope * point) / measured - 1) for point, measured in points)
        best = min(best, (error, intercept, slope))
    _, intercept, slope = best
    return Link(bandwidth_bytes_per_s=float(f"{1 / slope:.4g}"), latency_s=float(f"{intercept / 2:.4g}"))


def _fit_p2p(times: Mapping[str, float]) -> Link:
    """Fit latency and bandwidth of P2P."""
    points = [
        LinkPoint(num_bytes=int(size), median_s=seconds, spread_s=0.0, num_messages=1)
        for size, seconds in times.items()
    ]
    return fit_link(points).link


def _measure_executor(device: str, root: str) -> tuple[float, float, float]:
    """Measure the overhead between two actions, around a step, and per micro-batch.

    Uses a model so small that nothing else counts, with many micro-batches and with one.
    """
    few, many, steps = 1, 16, 20
    outside_s: dict[int, float] = {}
    action_s = 0.0
    for count in (few, many):
        model = ModelSpec(name="mlp-mnist")
        plan = Plan(model=model, batch=many, microbatches=count, devices=(device,), steps=steps, warmup=3)
        result = run_plan(plan, root)
        events = [event for event in RunFolder.open(str(result.run)).worker(0).events() if event["kind"] in _ACTIONS]
        action_s = statistics.median(after["start_s"] - before["end_s"] for before, after in itertools.pairwise(events))
        spans = [step[-1]["end_s"] - step[0]["start_s"] for step in _batched(events, len(events) // steps)]
        outside_s[count] = max(0.0, result.latency_s - statistics.median(spans))
    microbatch_s = max(0.0, outside_s[many] - outside_s[few]) / (many - few)
    return action_s, max(0.0, outside_s[few] - microbatch_s * few), microbatch_s


def _batched(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
