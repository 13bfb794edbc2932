"""What a fabric run shows: every layer with its distribution, bandwidths, ideal and floor; the total; who and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.fabric.collectives.algorithms import bus_factor, collective
from stagewright.fabric.collectives.simulate import ideal_s
from stagewright.fabric.ranks.coordinator import Measured
from stagewright.fabric.ranks.probe import alpha_beta
from stagewright.fabric.results.diagnosis import Mode, Verdict, judge, modes_of
from stagewright.fabric.results.distribution import Distribution, Threshold, distribution_of
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.fabric.trials import TrialTable

__all__ = ["FabricResult", "LayerResult", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """One message over all trials."""

    message: Message
    """The message."""
    times: Distribution
    """Its times."""
    algbw_bytes_per_s: float | None
    """S / t of the median, as nccl-tests defines it; None where there is no median."""
    busbw_bytes_per_s: float | None
    """algbw · f."""
    ideal_s: float | None
    """α–β of the probe; None where nothing was probed."""
    share_of_ideal: float | None
    """Of the median."""
    floor_s: float | None
    """The median without the network; None where there is none."""
    limited_by_host: bool | None
    """Whether the median is within 2 × of that."""
    wrong: int
    """Buffers that were wrong."""
    retransmits: int
    """Segments sent again."""
    modes: tuple[Mode, ...]
    """What the times look like."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.message.name,
            "bytes": self.message.num_bytes,
            "algorithm": self.message.algorithm,
            "ranks": len(self.message.groups[0]),
            "count": self.message.count,
            **self.times.to_dict(),
            "algbw_bytes_per_s": self.algbw_bytes_per_s,
            "busbw_bytes_per_s": self.busbw_bytes_per_s,
            "ideal_s": self.ideal_s,
            "share_of_ideal": self.share_of_ideal,
            "floor_s": self.floor_s,
            "limited_by_host": self.limited_by_host,
            "wrong": self.wrong,
            "retransmits": self.retransmits,
            "modes": [mode.to_dict() for mode in self.modes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricResult:
    """A whole run."""

    workload: Workload
    """What was sent."""
    engine: str
    """sockets, gloo or nccl."""
    layers: tuple[LayerResult, ...]
    """The layers, in the order in which they were sent."""
    total: Distribution
    """All messages of a trial."""
    trials: int
    """Trials that all ranks finished."""
    void: int
    """Of these, how many don't count because the lab was late."""
    verified: bool
    """Whether every buffer of every rank held the right values; False where there was no trial."""
    latency_s: float | None
    """One way of a small message between the best pair, and the rate between the best pair."""
    bytes_per_s: float | None
    projected_s: float | None
    """Communication of the whole job: steps × count × mean, one after the other."""
    projected_ideal_s: float | None
    """The same at the ideal."""
    verdict: Verdict
    """Who is to blame."""
    pairs: tuple[Mapping[str, Any], ...]
    """What lies between pairs, each direction."""
    connections: tuple[Mapping[str, Any], ...]
    """The kernel's view of each connection at the end (TCP_INFO), from both ends."""
    hosts: tuple[Mapping[str, Any], ...]
    """What each rank told of its host."""
    network: Mapping[str, Any] | None
    """How the network was made, where it is a lab."""
    wall_s: float
    """Time of all trials."""
    error: str | None
    """Who died; None where all went well."""
    dead: tuple[int, ...] = ()
    """The ranks that died."""

    def to_dict(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "workload": workload.name,
            "engine": self.engine,
            "ranks": workload.num_ranks,
            "trials": self.trials,
            "void": self.void,
            "overlap": workload.overlap,
            "layers": [layer.to_dict() for layer in self.layers],
            "total": self.total.to_dict(),
            "verified": self.verified,
            "latency_s": self.latency_s,
            "bytes_per_s": self.bytes_per_s,
            "projected_s": self.projected_s,
            "projected_ideal_s": self.projected_ideal_s,
            "verdict": self.verdict.to_dict(),
            "pairs": [dict(pair) for pair in self.pairs],
            "connections": [dict(one) for one in self.connections],
            "hosts": [dict(host) for host in self.hosts],
            "network": None if self.network is None else dict(self.network),
            "wall_s": self.wall_s,
            "error": self.error,
            "dead": list(self.dead),
        }

    def above(self, threshold: Threshold) -> list[str]:
        """The layers that miss a threshold, in sentences; what can't be told from so few samples is missed too."""
        found = []
        for layer in self.layers:
            value = layer.times.value(threshold.name)
            name = f"{layer.message.name} ({layer.message.num_bytes} bytes)"
            if value is None:
                found.append(f"{name}: {layer.times.samples} samples are too few for {threshold.name}")
            elif value > threshold.limit_s:
                found.append(
                    f"{name}: {threshold.name} is {value * 1e3:.3g} ms, above {threshold.limit_s * 1e3:.3g} ms"
                )
        return found


def summarise(
    workload: Workload,
    engine: str,
    measured: Measured,
    *,
    same_host: bool,
    floor: TrialTable | None = None,
    network: Mapping[str, Any] | None = None,
    job_steps: int | None = None,
) -> FabricResult:
    """Everything that follows from the raw trials; `job_steps` is how many the real job has, as many where None."""
    trials = measured.trials
    verdict = judge(trials, measured.pairs, measured.links, same_host=same_host, work=_work(workload))
    found = alpha_beta(measured.pairs)
    layers = tuple(
        _layer(index, message, trials, found, floor, verdict)
        for index, message in enumerate(workload.messages)
        if trials.num_trials or trials.num_messages
    )
    steps = workload.trials if job_steps is None else job_steps
    means = [layer.times.mean_s for layer in layers]
    ideals = [layer.ideal_s for layer in layers]
    return FabricResult(
        workload=workload,
        engine=engine,
        layers=layers,
        total=distribution_of(trials.totals()),
        trials=trials.num_trials,
        void=int(trials.void.sum()),
        verified=trials.num_trials > 0 and trials.num_wrong == 0,
        latency_s=None if found is None else found[0],
        bytes_per_s=None if found is None else found[1],
        projected_s=_projected(steps, workload, means),
        projected_ideal_s=_projected(steps, workload, ideals),
        verdict=verdict,
        pairs=tuple(pair.to_dict() for pair in measured.pairs),
        connections=tuple(measured.links),
        hosts=tuple(measured.hosts),
        network=network,
        wall_s=measured.wall_s,
        error=measured.error,
        dead=tuple(measured.dead),
    )


def _work(workload: Workload) -> list[int]:
    """Bytes that each rank sends and receives in a trial."""
    found = [0] * workload.num_ranks
    for message in workload.messages:
        for group in message.groups:
            one = collective(message.algorithm, len(group))
            sizes = one.chunk_sizes(message.num_bytes)
            for move in one.moves:
                found[group[move.source]] += sizes[move.chunk]
                found[group[move.destination]] += sizes[move.chunk]
    return found


def _projected(steps: int, workload: Workload, each: list[float | None]) -> float | None:
    if not each or any(value is None for value in each):
        return None
    return steps * sum(
        message.count * value for message, value in zip(workload.messages, each, strict=True) if value is not None
    )


def _layer(
    index: int,
    message: Message,
    trials: TrialTable,
    found: tuple[float, float] | None,
    floor: TrialTable | None,
    verdict: Verdict,
) -> LayerResult:
    times = trials.durations(index)
    spread = distribution_of(times)
    one = collective(message.algorithm, len(message.groups[0]))
    middle = spread.percentiles["p50"]
    algbw = message.num_bytes / middle if middle else None
    ideal = latency_part = bytes_part = None
    if found is not None:
        ideal = ideal_s(one, message.num_bytes, *found)
        latency_part = ideal_s(one, 0, *found)
        bytes_part = ideal - latency_part
    floor_s = float(np.median(floor.durations(index))) if floor is not None and floor.num_trials else None
    rows = trials.rows[~trials.void, index]
    again = rows["retransmits"].sum(axis=1).astype(np.int64)
    return LayerResult(
        message=message,
        times=spread,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw * bus_factor(one.kind, one.num_ranks),
        ideal_s=ideal,
        share_of_ideal=ideal / middle if ideal is not None and middle else None,
        floor_s=floor_s,
        limited_by_host=None if floor_s is None or middle is None else middle < 2 * floor_s,
        wrong=int(trials.rows[:, index]["wrong"].sum()),
        retransmits=int(again.sum()),
        modes=tuple(
            modes_of(
                times,
                again,
                ideal_bytes_s=bytes_part,
                ideal_latency_s=latency_part,
                floor_s=floor_s,
                verdict=verdict,
            )
        ),
    )
