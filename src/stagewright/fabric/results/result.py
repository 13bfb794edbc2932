"""The result of a fabric run: latency distribution, bandwidth, ideal and floor of every layer, total, diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stagewright.fabric.collectives.algorithms import bus_factor, collective
from stagewright.fabric.collectives.simulate import ideal_s
from stagewright.fabric.ranks.coordinator import Measurements
from stagewright.fabric.ranks.probe import alpha_beta
from stagewright.fabric.results.diagnosis import Diagnosis, Symptom, diagnose, find_symptoms
from stagewright.fabric.results.distribution import Distribution, Threshold, distribution_of
from stagewright.fabric.traffic.workload import Message, Workload
from stagewright.fabric.trials import TrialTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """Results of one message over all trials."""

    message: Message
    times: Distribution
    algbw_bytes_per_s: float | None
    """Algorithm bandwidth at the median, as in nccl-tests."""
    busbw_bytes_per_s: float | None
    ideal_s: float | None
    """Time in the α–β model of the probes; None without probes."""
    share_of_ideal: float | None
    floor_s: float | None
    """Median on this host's loopback; None if not measured."""
    limited_by_host: bool | None
    """Whether the median is within 2 × of the floor."""
    wrong: int
    """Buffers with wrong contents."""
    retransmits: int
    symptoms: tuple[Symptom, ...]

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
            "modes": [asdict(symptom) for symptom in self.symptoms],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricResult:
    """Results of a run."""

    workload: Workload
    engine: str
    """sockets, gloo or nccl."""
    layers: tuple[LayerResult, ...]
    """In the order of sending."""
    total: Distribution
    """Summed times of all messages of a trial."""
    trials: int
    """Trials that all ranks finished."""
    void: int
    """Trials discarded because the lab's switch was late."""
    verified: bool
    """Whether all buffers of all ranks were correct; False without trials."""
    latency_s: float | None
    """One-way latency of the best pair; `bytes_per_s` is the rate of the best pair."""
    bytes_per_s: float | None
    projected_s: float | None
    """Communication time of the whole job: steps × count × mean, without overlap."""
    projected_ideal_s: float | None
    """The same with ideal times."""
    diagnosis: Diagnosis
    pairs: tuple[Mapping[str, Any], ...]
    """Probes of all pairs, in each direction."""
    connections: tuple[Mapping[str, Any], ...]
    """TCP_INFO of each connection at the end, from both ends."""
    hosts: tuple[Mapping[str, Any], ...]
    """Each rank's description of its host."""
    network: Mapping[str, Any] | None
    """Settings of the lab, if the run is in one."""
    wall_s: float
    error: str | None
    """Which rank failed and why."""
    dead: tuple[int, ...] = ()

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
            "verdict": asdict(self.diagnosis),
            "pairs": [dict(pair) for pair in self.pairs],
            "connections": [dict(connection) for connection in self.connections],
            "hosts": [dict(host) for host in self.hosts],
            "network": None if self.network is None else dict(self.network),
            "wall_s": self.wall_s,
            "error": self.error,
            "dead": list(self.dead),
        }

    def violations(self, threshold: Threshold) -> list[str]:
        """Return a sentence for each layer above a threshold, or with too few samples to tell."""
        sentences = []
        for layer in self.layers:
            value = layer.times.value(threshold.name)
            name = f"{layer.message.name} ({layer.message.num_bytes} bytes)"
            if value is None:
                sentences.append(f"{name}: {layer.times.samples} samples are not enough for {threshold.name}")
            elif value > threshold.limit_s:
                sentences.append(
                    f"{name}: {threshold.name} is {value * 1e3:.3g} ms, above {threshold.limit_s * 1e3:.3g} ms"
                )
        return sentences


def summarize(
    workload: Workload,
    engine: str,
    measured: Measurements,
    *,
    same_host: bool,
    floor: TrialTable | None = None,
    network: Mapping[str, Any] | None = None,
    job_steps: int | None = None,
) -> FabricResult:
    """Compute the result from the raw trials; `job_steps` are the steps of the real job (default: the trials)."""
    trials = measured.trials
    diagnosis = diagnose(trials, measured.pairs, measured.links, same_host=same_host, work=_work(workload))
    network_model = alpha_beta(measured.pairs)
    layers = tuple(
        _layer(index, message, trials, network_model, floor, diagnosis)
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
        latency_s=None if network_model is None else network_model[0],
        bytes_per_s=None if network_model is None else network_model[1],
        projected_s=_projected(steps, workload, means),
        projected_ideal_s=_projected(steps, workload, ideals),
        diagnosis=diagnosis,
        pairs=tuple(asdict(pair) for pair in measured.pairs),
        connections=tuple(measured.links),
        hosts=tuple(measured.hosts),
        network=network,
        wall_s=measured.wall_s,
        error=measured.error,
        dead=tuple(measured.dead),
    )


def _work(workload: Workload) -> list[int]:
    """Return the bytes that each rank sends and receives in a trial."""
    work = [0] * workload.num_ranks
    for message in workload.messages:
        for group in message.groups:
            algorithm = collective(message.algorithm, len(group))
            sizes = algorithm.chunk_sizes(message.num_bytes)
            for move in algorithm.moves:
                work[group[move.source]] += sizes[move.chunk]
                work[group[move.destination]] += sizes[move.chunk]
    return work


def _projected(steps: int, workload: Workload, times_s: list[float | None]) -> float | None:
    if not times_s or any(value is None for value in times_s):
        return None
    return steps * sum(
        message.count * value for message, value in zip(workload.messages, times_s, strict=True) if value is not None
    )


def _layer(
    index: int,
    message: Message,
    trials: TrialTable,
    network_model: tuple[float, float] | None,
    floor: TrialTable | None,
    diagnosis: Diagnosis,
) -> LayerResult:
    times = trials.durations(index)
    distribution = distribution_of(times)
    algorithm = collective(message.algorithm, len(message.groups[0]))
    median = distribution.percentiles["p50"]
    algbw = message.num_bytes / median if median else None
    ideal = latency_part = bytes_part = None
    if network_model is not None:
        ideal = ideal_s(algorithm, message.num_bytes, *network_model)
        latency_part = ideal_s(algorithm, 0, *network_model)
        bytes_part = ideal - latency_part
    floor_s = float(np.median(floor.durations(index))) if floor is not None and floor.num_trials else None
    rows = trials.rows[~trials.void, index]
    retransmits = rows["retransmits"].sum(axis=1).astype(np.int64)
    return LayerResult(
        message=message,
        times=distribution,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None else algbw * bus_factor(algorithm.kind, algorithm.num_ranks),
        ideal_s=ideal,
        share_of_ideal=ideal / median if ideal is not None and median else None,
        floor_s=floor_s,
        limited_by_host=None if floor_s is None or median is None else median < 2 * floor_s,
        wrong=int(trials.rows[:, index]["wrong"].sum()),
        retransmits=int(retransmits.sum()),
        symptoms=tuple(
            find_symptoms(
                times,
                retransmits,
                ideal_bytes_s=bytes_part,
                ideal_latency_s=latency_part,
                floor_s=floor_s,
                diagnosis=diagnosis,
            )
        ),
    )
