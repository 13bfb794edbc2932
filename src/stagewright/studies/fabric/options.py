"""Options of the study *fabric*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.errors import UnknownName, UsageError
from stagewright.quantity import parse_rate, parse_s
from stagewright.studies.framework.options import Note, option, parse_words, setting

BATCH = 64
"""Samples per step."""
BATCHES_PER_EPOCH = 938
"""Batches in the 60000 samples of MNIST."""
NETWORKS = ("clean", "slow-link", "lossy-link", "failing-link", "late-host")
_ON_LOOPBACK = ("clean", "late-host")


def _parse_loss(text: str) -> str:
    """Check a packet loss; it is kept as it was typed."""
    from stagewright.fabric.lab.network import parse_loss

    parse_loss(text)
    return text


def _show_s(seconds: float) -> str:
    return f"{seconds / 60:g}min" if seconds % 60 == 0 else f"{seconds:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All-reduce a model's gradients over 4 emulated hosts: latency of each layer, tails and their cause."""

    model: str = option("mlp-mnist", "Model; its gradients are reduced layer by layer.")
    bucket_model: str | None = option("deit-small", "Model whose gradients are reduced in buckets, as DDP does.")
    quick: bool = setting(False)
    where: str = option(
        "lab",
        "Use this host's loopback instead of the lab, which needs root.",
        flag="--loopback",
        typed=bool,
        parse=lambda loopback: "loopback" if loopback else None,
        show=lambda where: "",
        panel="Execution",
    )
    """lab or loopback."""
    hosts: int = option(4, "How many emulated hosts.", flag="--num-hosts")
    rate: str = option("1gbit", "Rate of each host's link; in both directions.")
    networks: tuple[str, ...] = option(NETWORKS, "Networks to test.", parse=parse_words, choices=NETWORKS)
    bucket_networks: tuple[str, ...] = option(
        ("clean", "slow-link"), "Networks to test with the buckets.", parse=parse_words, quick=("clean",)
    )
    wrong_host: int = option(2, "Host whose link is slow or lossy, or which is late.")
    slow_rate: str = setting("100mbit")
    loss: str = option("1%", "Packet loss; of the lossy link.", parse=_parse_loss)
    failing_loss: str = setting("8%")
    """Packet loss of the failing link: losses of the same segment in a row are likely."""
    late_s: float = setting(0.02)
    epochs: int | None = option(
        None,
        "Passes over the samples; of MNIST, 938 all-reduces of each layer per epoch.",
        typed=int,
        minimum=1,
        default_text="by --trials",
        panel="Execution",
    )
    trials: int = option(
        BATCHES_PER_EPOCH,
        "Measured trials; all-reduces of each layer, without --epochs.",
        minimum=1,
        quick=120,
        panel="Execution",
    )
    bucket_trials: int = option(30, "All-reduces of each bucket.", minimum=1, quick=5, panel="Execution")
    bucket_bytes: int = setting(25 * 2**20)
    time_limit_s: float = option(
        120.0,
        "Stop after this time; each network.",
        flag="--time-limit",
        metavar="TIME",
        parse=parse_s,
        show=_show_s,
        quick=20.0,
        panel="Execution",
    )
    algorithm: str = setting("ring")
    """All-reduce algorithm."""
    seed: int = option(0, "Random seed; of weights and samples.", panel="Execution")

    def __post_init__(self) -> None:
        from stagewright.fabric.collectives.algorithms import ALL_REDUCE
        from stagewright.zoo.named import catalog

        if self.where not in ("lab", "loopback"):
            raise UsageError(f"this study can't run on {self.where!r}: use lab or loopback")
        if not 2 <= self.hosts <= 16:
            raise UsageError(f"this study can't emulate {self.hosts} hosts: use 2 to 16")
        if not 0 <= self.wrong_host < self.hosts:
            raise UsageError(f"there is no host {self.wrong_host} of {self.hosts}: use 0 to {self.hosts - 1}")
        for name in (*self.networks, *self.bucket_networks):
            if name not in NETWORKS:
                raise UnknownName("network", name, NETWORKS)
        if self.algorithm not in ALL_REDUCE:
            raise UnknownName("all-reduce algorithm", self.algorithm, ALL_REDUCE)
        if not any(self.networks_of(model) for model in self.models):
            raise UsageError(
                f"the loopback can't emulate {', '.join(self.networks) or 'a network'}: put sudo before the command, "
                f"or use --networks {','.join(_ON_LOOPBACK)}"
            )
        for model in self.models:
            if ":" not in model:
                catalog.entry(model)
        parse_rate(self.rate)
        parse_rate(self.slow_rate)

    @classmethod
    def machine_defaults(cls, given: Mapping[str, Any], *, quick: bool, note: Note) -> dict[str, Any]:
        """Use the loopback where this process can't create a lab."""
        reason = why_no_lab() if given.get("where") is None else ""
        if reason:
            note(f"{reason}; using this host's loopback instead, which can't show slow or lossy links")
            return {"where": "loopback"}
        return {}

    @property
    def num_trials(self) -> int:
        """All-reduces of each layer: one per batch and epoch."""
        return self.trials if self.epochs is None else BATCHES_PER_EPOCH * self.epochs

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose gradients are reduced."""
        return (self.model,) if self.bucket_model is None else (self.model, self.bucket_model)

    def networks_of(self, model: str) -> tuple[str, ...]:
        """The networks that are tested with a model, as far as they can be emulated."""
        wanted = self.networks if model == self.model else self.bucket_networks
        return tuple(name for name in wanted if self.where == "lab" or name in _ON_LOOPBACK)


def why_no_lab() -> str:
    """Why this process can't create a lab; empty if it can."""
    from stagewright.fabric.lab.kernel import check_root

    try:
        check_root()
    except UsageError as error:
        return str(error)
    return ""
