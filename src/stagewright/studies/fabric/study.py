"""The study *fabric*: a model's gradients over 4 emulated hosts, on networks with one thing wrong each.

    the MNIST MLP's layers, then another model's buckets:
      floor        on this host's loopback: what the host alone costs
      clean        every link at the same rate
      slow-link    one host's link has a tenth of it
      lossy-link   one host's link loses packets
      late-host    one host is late before each message
    each ─► every trial of every layer ─► CDF, tail, and who is to blame (we know who it was)

The lab needs root. Without it everything runs on the loopback device, where links can't be made slow or lossy: what is
left are clean and late-host, and the answers say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stagewright.errors import RunError, UnknownName, UsageError
from stagewright.quantity import parse_rate
from stagewright.studies.fabric.answers import QUESTIONS
from stagewright.studies.fabric.findings import conclude
from stagewright.studies.framework.study import Bench, Part, Study

if TYPE_CHECKING:
    from stagewright.fabric.ranks.coordinator import Measured, Place, Settings
    from stagewright.fabric.traffic.workload import Workload

__all__ = ["NETWORKS", "QUICK", "Options", "has_lab", "study"]

NETWORKS = ("clean", "slow-link", "lossy-link", "late-host")
_ON_LOOPBACK = ("clean", "late-host")
_FLOOR_TRIALS = 30

QUICK: dict[str, Any] = {"trials": 120, "bucket_trials": 5, "bucket_networks": ("clean",), "time_limit_s": 20.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is studied; the defaults are the full size."""

    model: str = "mlp-mnist"
    """The model whose layers are sent one by one, and the one whose layers are put together as DDP does."""
    bucket_model: str | None = "deit-small"
    quick: bool = False
    """Whether defaults are the small ones."""
    where: str = "lab"
    """lab or loopback."""
    hosts: int = 4
    """Hosts of the lab, and the rate of each link."""
    rate: str = "1gbit"
    networks: tuple[str, ...] = NETWORKS
    """What is wrong in turn: clean, slow-link, lossy-link, late-host; and for the buckets."""
    bucket_networks: tuple[str, ...] = ("clean", "slow-link")
    wrong_host: int = 2
    """The host that is wrong; its link's rate, its loss, and how late it is."""
    slow_rate: str = "100mbit"
    loss: str = "1%"
    late_s: float = 0.02
    trials: int = 938
    """Times that everything is sent: steps of an epoch of MNIST with batches of 64; and for the buckets."""
    bucket_trials: int = 30
    bucket_bytes: int = 25 * 2**20
    time_limit_s: float = 120.0
    """The longest that one of them may take."""
    algorithm: str = "ring"
    """How it is summed."""
    seed: int = 0

    def __post_init__(self) -> None:
        from stagewright.fabric.collectives.algorithms import ALL_REDUCE
        from stagewright.zoo.named import catalog as catalogue

        if self.where not in ("lab", "loopback"):
            raise UsageError(f"{self.where!r} is no place for this study: use lab or loopback")
        if not 2 <= self.hosts <= 16:
            raise UsageError(f"a fabric of {self.hosts} hosts is not studied: use 2 to 16")
        if not 0 <= self.wrong_host < self.hosts:
            raise UsageError(f"host {self.wrong_host} is none of the {self.hosts} hosts: use 0 to {self.hosts - 1}")
        for name in (*self.networks, *self.bucket_networks):
            if name not in NETWORKS:
                raise UnknownName("network", name, NETWORKS)
        if self.algorithm not in ALL_REDUCE:
            raise UnknownName("way to sum gradients", self.algorithm, ALL_REDUCE)
        if not any(self.networks_of(model) for model in self.models):
            raise UsageError(
                f"on the loopback there is no {', '.join(self.networks) or 'network'}: put sudo before the command, or "
                f"use --networks {','.join(_ON_LOOPBACK)}"
            )
        for model in self.models:
            if ":" not in model:
                catalogue.entry(model)
        parse_rate(self.rate)
        parse_rate(self.slow_rate)

    @property
    def models(self) -> tuple[str, ...]:
        """Whose gradients are sent."""
        return (self.model,) if self.bucket_model is None else (self.model, self.bucket_model)

    def networks_of(self, model: str) -> tuple[str, ...]:
        """What is tried with a model where this study runs."""
        wanted = self.networks if model == self.model else self.bucket_networks
        return tuple(name for name in wanted if self.where == "lab" or name in _ON_LOOPBACK)


def has_lab() -> bool:
    """Whether a lab can be made here."""
    from stagewright.fabric.lab.kernel import need_root

    try:
        need_root()
    except UsageError:
        return False
    return True


def study(options: Options) -> Study:
    """The study with these options."""
    parts = []
    for model in options.models:
        plain = _plain(model)
        parts.append(
            Part(
                name=f"floor-{plain}",
                about=f"gradients of {model} on this host's loopback",
                run=partial(_floor, options, model),
            )
        )
        parts += [
            Part(
                name=f"sent-{plain}-{network}",
                about=f"gradients of {model}, {network}",
                run=partial(_send, options, model, network),
                needs=(f"floor-{plain}",),
            )
            for network in options.networks_of(model)
        ]
    return Study(
        name="fabric",
        title=f"Gradients of {' and '.join(options.models)} over {options.hosts} hosts",
        options=asdict(options),
        questions=QUESTIONS,
        parts=tuple(parts),
        conclude=partial(
            conclude,
            asdict(options) | {"sent": [(m, _plain(m), n) for m in options.models for n in options.networks_of(m)]},
        ),
    )


def _plain(model: str) -> str:
    """A model as names of parts have it."""
    return re.sub(r"[^a-z0-9.]+", "-", model.lower()).strip("-.") or "model"


def _workload(options: Options, model: str) -> Workload:
    from stagewright import zoo
    from stagewright.fabric.traffic.from_model import from_model

    small = model == options.model
    return from_model(
        zoo.load(model, batch=2),
        options.hosts,
        algorithm=options.algorithm,
        bucket_bytes=None if small else options.bucket_bytes,
        trials=options.trials if small else options.bucket_trials,
        warmup=5 if small else 1,
        time_limit_s=options.time_limit_s,
        seed=options.seed,
    )


def _measure(workload: Workload, places: list[Place], settings: Settings, bench: Bench) -> Measured:
    from stagewright.fabric.ranks.coordinator import Coordinator

    told = 0

    def report(done: int, total: int) -> None:
        nonlocal told
        if done * 4 // max(1, total) > told:
            told = done * 4 // max(1, total)
            bench.tell(f"{done} of {total} trials")

    with Coordinator(workload, places, settings) as coordinator:
        measured = coordinator.run(report)
    if measured.error is not None:
        if measured.error == "interrupted":
            raise KeyboardInterrupt
        raise RunError(measured.error)
    return measured


def _floor(options: Options, model: str, bench: Bench) -> dict[str, Any]:
    """The same messages where there is no network; a few trials."""
    from stagewright.fabric.ranks.coordinator import Place, Settings

    workload = _workload(options, model)
    few = replace(workload, trials=min(workload.trials, _FLOOR_TRIALS))
    measured = _measure(few, [Place(name="local")] * options.hosts, Settings(probe=False, steps=False), bench)
    return _saved(few, measured, bench, same_host=True)


def _send(options: Options, model: str, network: str, bench: Bench) -> dict[str, Any]:
    """Everything over one network."""
    from stagewright.fabric.ranks.coordinator import Settings
    from stagewright.fabric.results.run_folder import FabricFolder

    workload = _workload(options, model)
    if network == "late-host":
        workload = workload.with_delays({options.wrong_host: options.late_s})
    floor = FabricFolder.open(bench.folder / bench.results[f"floor-{_plain(model)}"]["run"]).trials()
    with _hosts(options, network) as (places, view):
        measured = _measure(workload, places, Settings(steps=False), bench)
        if view is not None:
            measured.trials.void[:] = view.late_trials(measured.trials)
    found = _saved(workload, measured, bench, same_host=view is None, floor=floor, network=view and view.network)
    return {**found, "made": network}


@contextmanager
def _hosts(options: Options, network: str) -> Iterator[tuple[list[Place], Any]]:
    """Where ranks run: the hosts of a lab for the time of a block, or this one's loopback."""
    from stagewright.fabric.lab.network import LabNetwork
    from stagewright.fabric.lab.session import LabView, make_lab
    from stagewright.fabric.ranks.coordinator import Place

    if options.where == "loopback":
        yield [Place(name="local")] * options.hosts, None
        return
    wanted = LabNetwork.parse(
        hosts=options.hosts,
        rate=options.rate,
        slow_links=[f"{options.wrong_host}:{options.slow_rate}"] if network == "slow-link" else [],
        lossy_links=[f"{options.wrong_host}:{options.loss}"] if network == "lossy-link" else [],
    )
    with make_lab(wanted) as lab:
        places = [
            Place(name=f"host {at}", host=wanted.address(at), namespace=lab.namespace(at))
            for at in range(options.hosts)
        ]
        yield places, LabView(hosts=(), network={**wanted.to_dict(), "used": list(lab.used)}, lateness=None)


def _saved(
    workload: Workload, measured: Measured, bench: Bench, *, same_host: bool, floor: Any = None, network: Any = None
) -> dict[str, Any]:
    """A run folder with the raw trials; the result with the times of every trial, layer by layer."""
    from stagewright.fabric.results.result import summarise
    from stagewright.fabric.results.run_folder import FabricFolder

    result = summarise(workload, "sockets", measured, same_host=same_host, floor=floor, network=network)
    folder = FabricFolder.create(bench.runs, workload, {"engine": "sockets"})
    data = {**result.to_dict(), "folder": str(folder.path)}
    folder.write(workload, measured, data)
    if not result.verified:
        raise RunError(f"{sum(layer.wrong for layer in result.layers)} buffers held wrong sums")
    kept = _finite({name: value for name, value in data.items() if name not in ("connections", "pairs", "folder")})
    times = [measured.trials.durations(at).tolist() for at in range(len(workload.messages))]
    return {**kept, "times_s": times, "run": folder.path.relative_to(bench.folder).as_posix()}


def _finite(content: Any) -> Any:
    """JSON has no infinity: null instead."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
